"""Native draws against the Python on the host: the same token from the same logits, whatever surrounds a row."""

import numpy as np
import pytest
import torch

from paceline.core import SamplingParams
from paceline.ops import native, native_sampling
from paceline.ops.extension import extension
from paceline.sampling import noise
from paceline.sampling.choose import choose, choose_candidates, rule_of
from paceline.sampling.draw import draw_device
from paceline.sampling.shape import Counts, LogitRow, shape

pytestmark = pytest.mark.skipif(not native_sampling.available(), reason="the extension is not built")

FILTERS = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 3000}, {"top_p": 0.1}, {"top_p": 0.95}, {"top_p": 0.9999},
    {"min_p": 0.05}, {"min_p": 1e-9}, {"top_k": 64, "top_p": 0.9}, {"top_k": 500, "top_p": 0.5, "min_p": 1e-3},
]  # fmt: skip
TEMPERATURES = [0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 30.0]


def make_rows(count, seed, **values):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        params = {"temperature": TEMPERATURES[(seed + 3 * i) % 7], **FILTERS[(seed + i) % 11], **values}
        position = int(rng.integers(2**33 if i % 2 else 5000))
        rows.append(
            LogitRow(SamplingParams(**params), int(rng.integers(-(2**62), 2**62)), position, Counts())
        )
    return rows


def make_logits(count, width, seed):
    """Peaked and flat rows, tied values, refused tokens."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=g) * [0.01, 1.0, 3.0, 12.0][seed % 4]
    if seed % 3 == 1:
        x = (x * 2).round() / 2
    if seed % 5 == 2:
        x[torch.rand(count, width, generator=g) < 0.7] = -torch.inf
    return x


def make_ids(count, width, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(3 * width, generator=g)[:width] for _ in range(count)])


@pytest.fixture
def python(monkeypatch):
    """`choose_candidates` without the extension."""

    def run(logits, ids, rows, purpose=noise.TARGET):
        with monkeypatch.context() as m:
            m.setattr(native_sampling, "suits", lambda *_: False)
            return choose_candidates(logits, ids, rows, purpose, 30_000)

    return run


@pytest.fixture
def restored():
    threads = native._extension().threads()
    yield
    native._extension().choose_isa("best")
    native.set_threads(threads)


def check(python, logits, ids, rows):
    """Where top_p cuts within a rounding of the mass, one more value may stay: tokens agree, confidence nearly."""
    wanted = python(logits, ids, rows)
    drawn = choose_candidates(logits, ids, rows, noise.TARGET)
    assert drawn.tokens == wanted.tokens
    for row, own, other in zip(rows, drawn.confidence, wanted.confidence, strict=True):
        assert own == pytest.approx(other, rel=2e-5 if row.params.top_p == 1 else 1e-3)
    if ids is None:
        assert choose(logits, rows).tokens == wanted.tokens
    return drawn


@pytest.mark.parametrize("width", [1, 7, 32, 63, 1000, 8192, 8193, 30_000])
@pytest.mark.parametrize("candidates", [False, True])
def test_tokens_are_the_references(python, width, candidates):
    for seed in range(22 if width < 8000 else 11):
        count = 1 + seed % 9
        ids = make_ids(count, width, seed) if candidates else None
        check(python, make_logits(count, width, seed), ids, make_rows(count, seed))


@pytest.mark.parametrize("seed", range(4))
def test_large_vocabularies(python, seed):
    check(python, make_logits(3, 300_000, seed), None, make_rows(3, 4 * seed))


@pytest.mark.parametrize("isa", ["generic", "avx2", "best"])
def test_threads_and_instruction_sets_and_neighbours_change_nothing(python, restored, isa):
    if not native._extension().choose_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    logits, rows = make_logits(9, 20_000, 1), make_rows(9, 5)
    native.set_threads(1)
    alone = check(python, logits, None, rows)
    for threads in (2, 5):
        native.set_threads(threads)
        together = choose_candidates(logits, None, rows, noise.TARGET)
        assert together == alone  # the confidence to the bit
        one = [choose_candidates(logits[i : i + 1], None, rows[i : i + 1], noise.TARGET) for i in range(9)]
        assert [o.tokens[0] for o in one] == alone.tokens
        assert [o.confidence[0] for o in one] == alone.confidence


@pytest.mark.parametrize(
    "values", [{}, *FILTERS[2:8:2], {"frequency_penalty": 1.0}, {"bad_token_ids": (70,)}], ids=str
)
def test_broken_rows_fail_alone(python, values):
    logits = make_logits(9, 9000, 1)
    rows = make_rows(9, 3, **values)
    whole = check(python, logits, None, rows)
    logits[1, 70], logits[2, 8999], logits[4, 5] = torch.nan, torch.nan, torch.inf
    logits[6], logits[7] = -torch.inf, torch.nan
    drawn = check(python, logits, None, rows)
    assert choose(logits, rows).ok == [i not in (1, 2, 4, 6, 7) for i in range(9)]
    assert [drawn.tokens[i] for i in (0, 3, 5, 8)] == [whole.tokens[i] for i in (0, 3, 5, 8)]
    assert [drawn.confidence[i] for i in (1, 2, 4, 6, 7)] == [0.0] * 5


def test_edited_rows_join_the_others(python):
    logits = make_logits(6, 9000, 1)
    kept = logits.clone()
    rows = make_rows(6, 2)
    rows[1].params = SamplingParams(temperature=1.0, logit_bias={5: 40.0})
    rows[2].params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3)
    rows[2].history = Counts([4, 5], list(range(2000)))
    rows[4].mask = np.arange(9000) % 3 == 0
    drawn = check(python, logits, None, rows)
    assert drawn.tokens[1] == 5
    assert drawn.tokens[4] % 3 == 0
    assert torch.equal(logits, kept)
    ids = make_ids(6, 9000, 1)
    check(python, logits, ids, rows)


@pytest.mark.parametrize("known", [9000, 8999, 100, 12_000])
@pytest.mark.parametrize("isa", ["generic", "avx2", "best"])
def test_a_constraint_refuses_tokens_without_a_copy_in_python(python, restored, monkeypatch, known, isa):
    if not native._extension().choose_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    logits, rows = make_logits(9, 9000, 1), make_rows(9, 3)
    rng = np.random.default_rng(known)
    for i, row in enumerate(rows[:-1]):
        row.mask = rng.random(known) < (0.001 if i % 2 else 0.5)
        row.mask[7] = True
    rows[3].params = SamplingParams()  # greedy, and nearly all is refused
    rows[0].mask = rows[0].mask.astype(np.uint8) * 3  # any integers will do
    kept = logits.clone()
    with monkeypatch.context() as m:
        m.setattr("paceline.sampling.choose.edited", None)
        drawn = choose_candidates(logits, None, rows, noise.TARGET)
    assert all(row.mask is None or row.mask[t] for row, t in zip(rows, drawn.tokens, strict=True))
    check(python, logits, None, rows)
    check(python, logits, make_ids(9, 9000, 1), rows)
    assert torch.equal(logits, kept)
    assert torch.equal(choose(logits, rows).shaped, shape(logits, rows))


def test_a_constraint_hides_no_broken_row(python):
    logits, rows = make_logits(4, 9000, 1), make_rows(4, 3)
    for row in rows:
        row.mask = np.zeros(9000, dtype=np.bool_)
        row.mask[:50] = True
    logits[0, 8999], logits[1, :50], rows[2].mask[:] = torch.nan, -torch.inf, False
    check(python, logits, None, rows)
    assert choose(logits, rows).ok == [False, False, False, True]


def test_drafts_with_noise_of_their_own(python):
    logits, rows = make_logits(9, 9000, 1), make_rows(9, 4)
    logits[3, 7] = torch.nan
    for ids in (None, make_ids(9, 9000, 1)):
        wanted = python(logits, ids, rows, noise.DRAFT)
        drawn = choose_candidates(logits, ids, rows, noise.DRAFT, 30_000)
        assert drawn.tokens == wanted.tokens
        assert drawn.confidence == wanted.confidence
        for own, other in zip(drawn.q, wanted.q, strict=True):
            assert (own is None and other is None) or torch.equal(own, other)


def test_ties_go_to_the_lowest_id(python):
    x = torch.zeros(2, 20_000)
    x[:, [19_999, 9_000, 8_500, 3]] = torch.tensor([2.0, 2.0, 2.0, -torch.inf])
    row = LogitRow(SamplingParams(), 1, 2, Counts())
    assert check(python, x, None, [row, row]).tokens == [8_500] * 2
    ids = make_ids(2, 20_000, 0)
    lowest = [int(ids[i, [19_999, 9_000, 8_500]].min()) for i in range(2)]
    assert check(python, x, ids, [row, row]).tokens == lowest


def test_cold_rows_are_drawn_in_double(python):
    """At 30 / 2e-5 neighbouring float32 values are 0.125 apart; scores must not be compared in them."""
    logits = 25 + torch.randn(30, 5000, generator=torch.Generator().manual_seed(0)) * 1e-4
    rows = [LogitRow(SamplingParams(temperature=(2e-5, 1e-4)[i % 2]), i, i, Counts()) for i in range(30)]
    drawn = check(python, logits, None, rows)
    assert drawn.tokens == draw_device(shape(logits, rows), None, rows, noise.TARGET).tolist()


def test_views_with_a_row_stride(python):
    wide = make_logits(4, 500, 1)
    assert native_sampling.suits(wide[:, :300], None)
    check(python, wide[:, 100:400], None, make_rows(4, 1))
    assert not native_sampling.suits(wide.T, None)
    assert not native_sampling.suits(wide.double(), None)


def test_shaped_logits_are_those_of_the_reference():
    logits, rows = make_logits(5, 400, 1), make_rows(5, 1)
    assert torch.equal(choose(logits, rows).shaped, shape(logits, rows))


def test_keys_are_those_of_the_noise():
    seeds, positions = [0, -1, 2**64 - 1, 2**40 + 3, 12345678901234], [0, 5, 2**33 + 1, 7, 2**31]
    for purpose in range(4):
        wanted = [noise.keys(s, p, purpose) for s, p in zip(seeds, positions, strict=True)]
        native = extension("draw")
        assert native is not None
        assert [
            native.noise_keys(s & (2**64 - 1), p, purpose) for s, p in zip(seeds, positions, strict=True)
        ] == wanted


@pytest.mark.parametrize("known", [9000, 100])
def test_a_greedy_row_that_is_looked_through_where_it_lies_hides_no_broken_one(known):
    logits, rows = make_logits(3, 9000, 1), [LogitRow(SamplingParams(), 1, 5, Counts()) for _ in range(3)]
    for row in rows:
        row.mask = np.zeros(known, dtype=np.bool_)
    rows[0].mask[40] = rows[1].mask[99] = True
    logits[1, 8999] = torch.nan  # refused, and beyond a short mask
    chosen = choose(logits, rows)
    assert (chosen.tokens, chosen.ok) == ([40, 0, 0], [True, False, False])


def test_a_top_k_that_no_register_holds_keeps_all():
    logits, rows = (
        make_logits(4, 300, 1),
        make_rows(4, 2, temperature=0.8, top_k=10**30, top_p=1.0, min_p=0.0),
    )
    free = [LogitRow(SamplingParams(temperature=0.8), r.seed, r.position, r.history) for r in rows]
    assert choose(logits, rows).tokens == choose(logits, free).tokens
    assert all(rule_of(row)[3] < 2**63 for row in rows)
