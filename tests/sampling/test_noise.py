"""The noise is exact, the same by every route, and good enough to sample from."""

import math

import numpy as np
import pytest
import torch

from paceline.sampling import noise


def mix(x):  # the pseudo-code of the module's docstring, written once more
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def by_docstring(seed, position, token, purpose):
    def absorb(start):
        h = mix((start + purpose) % 2**32)
        h = mix(h ^ seed % 2**32)
        h = mix((h + seed % 2**64 // 2**32) % 2**32)
        h = mix(h ^ position % 2**32)
        return mix((h + position // 2**32) % 2**32)

    return mix(mix((token * 0x9E3779B9 + absorb(0x243F6A88)) % 2**32) ^ absorb(0x85A308D3))


CASES = [(0, 0, 0), (7, 12, 1), (2**64 - 1, 2**31, 2), (-1, 5, 3), (2**40 + 3, 2**33 + 1, 0)]


@pytest.mark.parametrize(("seed", "position", "purpose"), CASES)
def test_every_route_gives_the_same_bits(seed, position, purpose):
    ids = torch.tensor([0, 1, 2, 999, 262_143])
    wanted = [by_docstring(seed, position, t, purpose) for t in ids.tolist()]
    assert noise.bits([seed], [position], ids, purpose)[0].tolist() == wanted
    assert noise.host_bits(noise.keys(seed, position, purpose), ids.numpy()).tolist() == wanted
    v = noise.uniform([seed], [position], ids, purpose)[0].tolist()
    assert v == [(h + 0.5) / 2**32 for h in wanted]
    torch.testing.assert_close(
        noise.host_gumbel(np.array(wanted, dtype=np.uint32)).tolist(),
        noise.gumbel(torch.tensor(v, dtype=torch.float64)).tolist(),
        rtol=1e-14, atol=1e-14,
    )  # fmt: skip
    assert v == [noise.scalar(seed, position, purpose, t) for t in ids.tolist()]


def test_known_values_never_change():
    known = [2242074609, 3958720896, 3866077640, 3165722171]  # a change would change every seeded text
    assert noise.bits([1234], [56], torch.arange(4), noise.TARGET)[0].tolist() == known


def test_candidates_get_the_noise_of_their_ids_whatever_stands_beside_them():
    whole = noise.uniform([3, 4], [10, 11], torch.arange(50), 0)
    ids = torch.tensor([[7, 3, 49], [0, 7, 8]])
    assert torch.equal(noise.uniform([3, 4], [10, 11], ids, 0), whole.gather(1, ids))


def test_noise_is_always_finite():
    edge = torch.tensor([0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32], dtype=torch.float64)
    low, high = noise.gumbel(edge).tolist()
    assert low == pytest.approx(22.87, abs=0.01)
    assert high == pytest.approx(-3.13, abs=0.01)


def chi_squared(v, cells=64):
    counts = np.bincount((np.asarray(v) * cells).astype(int).ravel(), minlength=cells)
    expected = counts.sum() / cells
    z = (((counts - expected) ** 2 / expected).sum() - (cells - 1)) / math.sqrt(2 * (cells - 1))
    return abs(float(z))  # about standard normal


def fields():
    """Uniforms [400, 400] along each axis that a hash could be weak on."""
    ids = torch.arange(400)
    yield "positions", noise.uniform([5] * 400, range(400), ids, 0)
    yield "seeds", noise.uniform(range(400), [9] * 400, ids, 0)
    yield "strided seeds", noise.uniform([s << 32 for s in range(400)], [9] * 400, ids, 0)
    yield "purposes", noise.uniform([5] * 400, [9] * 400, ids + 400 * torch.arange(400)[:, None], 1)


@pytest.mark.parametrize(("name", "v"), list(fields()))
def test_uniform_and_uncorrelated(name, v):
    assert chi_squared(v) < 5, name
    for a, b in ((v[1:], v[:-1]), (v[:, 1:], v[:, :-1]), (v[1:, 1:], v[:-1, :-1])):
        pairs = torch.stack([a.flatten(), b.flatten()])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / math.sqrt(pairs.shape[1]), name
        assert chi_squared((torch.floor(a * 8) + b) / 8) < 5, name  # joint, not only linear


def test_purposes_are_independent():
    ids = torch.arange(40_000)
    v = torch.cat([noise.uniform([5], [9], ids, purpose) for purpose in range(4)])
    off = torch.corrcoef(v) - torch.eye(4, dtype=torch.float64)
    assert float(off.abs().max()) < 5 / math.sqrt(40_000)


def test_the_draw_follows_the_distribution():
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    n = 40_000
    g = noise.gumbel(noise.uniform([11] * n, range(n), torch.arange(5), 0))
    counts = torch.bincount((p.log() + g).argmax(-1), minlength=5).double()
    chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi2 < 30  # 4 degrees of freedom, p = 5e-6; the noise is fixed, so this cannot flake


def test_seeds_of_texts_and_requests_differ():
    seeds = {noise.sibling_seed(7, i) for i in range(1024)} | {noise.sibling_seed(8, i) for i in range(1024)}
    assert len(seeds) == 2048
    assert noise.sibling_seed(7, 0) == 7
    assert all(0 <= s < 2**63 for s in seeds)
    assert noise.fresh_seed() != noise.fresh_seed()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_the_same_bits():
    ids = torch.arange(262_144)
    here = noise.bits([7, 8], [1, 2], ids, 0)
    assert torch.equal(noise.bits([7, 8], [1, 2], ids.cuda(), 0).cpu(), here)
