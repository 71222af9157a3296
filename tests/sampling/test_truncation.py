"""Samplers of llama.cpp against a second reading of their definitions, sorted candidate lists as it has them."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.sampling import noise
from paceline.sampling.choose import choose, choose_candidates
from paceline.sampling.repeats import dry_penalties
from paceline.sampling.shape import Counts, LogitRow, shape, shape_candidates
from paceline.sampling.truncation import next_mu
from paceline.text.breakers import breakers_of
from paceline.text.tokenizer import Tokenizer

V = 300


def row(position=9, seed=1, **values):
    return LogitRow(SamplingParams(**{"temperature": 1.0, **values}), seed, position, Counts([5, 6], [7]))


def logits(seed=0, scale=3.0):
    return torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * scale


def kept(x, text):
    return set(np.flatnonzero(shape(x, [text])[0].numpy() > -np.inf).tolist())


def candidates(x, temperature=1.0):
    """(id, logit, p), most likely first."""
    scaled = x[0].double().numpy() / temperature
    p = np.exp(scaled - scaled.max())
    return [(int(i), scaled[i], p[i] / p.sum()) for i in np.argsort(-scaled)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("sigmas", [0.5, 1.0, 2.5])
def test_top_n_sigma(sigmas, temperature, seed):
    x = logits(seed)
    values = [logit for _, logit, _ in candidates(x, temperature)]
    mean = sum(values) / V
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / V)
    wanted = {i for i, v, _ in candidates(x, temperature) if v >= values[0] - sigmas * deviation}
    assert kept(x, row(temperature=temperature, top_n_sigma=sigmas)) == wanted
    assert 0 < len(wanted) < V


def test_top_n_sigma_does_not_count_what_is_refused():
    x = logits()
    allowed = tuple(range(0, V, 7))
    some = x[0, list(allowed)].double().numpy()
    wanted = {i for i, v in zip(allowed, some, strict=True) if v >= some.max() - some.std()}
    assert kept(x, row(top_n_sigma=1.0, allowed_token_ids=allowed)) == wanted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mass", [0.2, 0.5, 0.9])
def test_typical(mass, seed):
    x = logits(seed)
    listed = candidates(x)
    entropy = -sum(p * math.log(p) for _, _, p in listed)
    order = sorted(listed, key=lambda one: abs(-math.log(one[2]) - entropy))
    whole, wanted = 0.0, set()
    for i, _, p in order:
        whole += p
        wanted.add(i)
        if whole > mass:
            break
    assert kept(x, row(typical_p=mass)) == wanted


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3])
def test_xtc_drops_the_likely_but_the_least_of_them(threshold, seed):
    x = logits(seed)
    listed = candidates(x)
    likely = [i for i, _, p in listed if p >= threshold]
    wanted = set(range(V)) - set(likely[:-1])
    assert kept(x, row(xtc_probability=1.0, xtc_threshold=threshold)) == wanted
    assert kept(x, row(xtc_probability=1.0, xtc_threshold=0.6)) == set(range(V))


def test_the_coin_of_xtc_is_of_its_position_and_not_the_noise_of_tokens():
    x = logits()
    fell = [len(kept(x, row(position=i, xtc_probability=0.3, xtc_threshold=0.05))) < V for i in range(2000)]
    assert fell == [noise.scalar(1, i, noise.XTC) <= 0.3 for i in range(2000)]
    assert 0.27 < sum(fell) / 2000 < 0.33
    coins = np.array([noise.scalar(1, i, noise.XTC) for i in range(2000)])
    for purpose in (noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL):
        other = np.array([noise.scalar(1, i, purpose) for i in range(2000)])
        assert abs(np.corrcoef(coins, other)[0, 1]) < 0.08


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("spread", "power"), [(0.5, 1.0), (0.9, 2.0), (2.0, 0.5)])
def test_dynamic_temperature_comes_last(spread, power, seed):
    x = logits(seed)
    top = candidates(x)[:40]
    p = np.array([one[2] for one in top])
    p /= p.sum()
    share = -(p * np.log(p)).sum() / math.log(40)
    low, high = max(0.0, 0.8 - spread), 0.8 + spread
    warmth = low + (high - low) * share**power
    got = shape(x, [row(temperature=0.8, top_k=40, dynatemp_range=spread, dynatemp_exponent=power)])[0]
    assert kept(x, row(temperature=0.8, top_k=40, dynatemp_range=spread)) == {one[0] for one in top}
    for i, logit, _ in top:
        assert float(got[i]) == pytest.approx(logit / warmth, rel=1e-4)


def test_temperature_after_the_filters_leaves_what_they_leave_at_one():
    x = logits()
    at_one = kept(x, row(min_p=0.1, top_p=0.8))
    assert kept(x, row(temperature=1.9, min_p=0.1, top_p=0.8, temperature_last=True)) == at_one
    assert kept(x, row(temperature=1.9, min_p=0.1, top_p=0.8)) != at_one
    got = shape(x, [row(temperature=1.9, min_p=0.1, temperature_last=True)])[0]
    for i in at_one:
        assert float(got[i]) == pytest.approx(float(x[0, i]) / 1.9, rel=1e-5)


EVERY = {
    "typical_p": 0.7, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.4,
    "top_k": 80, "top_p": 0.95, "min_p": 0.01, "temperature": 1.1, "dry_multiplier": 1.0, "dry_allowed_length": 0,
}  # fmt: skip


def test_both_ways_to_draw_agree_and_rows_do_not_touch_each_other():
    x = torch.cat([logits(seed) for seed in range(6)])
    rows = [row(position=i, **(EVERY if i % 2 else {})) for i in range(6)]
    together = choose(x, rows).tokens
    assert together == [choose(x[i : i + 1], [rows[i]]).tokens[0] for i in range(6)]
    strided = torch.stack([x, x], -1)[..., 0]  # not for the extension
    assert together == choose(strided, rows).tokens
    order = torch.randperm(V, generator=torch.Generator().manual_seed(3))[None].expand(6, V).contiguous()
    assert together == choose_candidates(x.gather(1, order), order, rows, noise.TARGET).tokens
    shaped, part = shape(x, rows), shape_candidates(x.gather(1, order), order, rows)
    torch.testing.assert_close(shaped.gather(1, order), part)


def test_rows_without_numbers_or_choices_stay_so():
    x = logits()
    x[0, 3] = torch.nan
    assert choose(x, [row(**EVERY)]).ok == [False]
    assert choose(torch.full((1, V), -torch.inf), [row(**EVERY)]).ok == [False]
    assert len(kept(logits(scale=1e4), row(**EVERY))) == 1


def test_greedy_rows_take_the_most_likely_token_whatever_filters_say():
    x = logits()
    assert choose(x, [row(**{**EVERY, "temperature": 0.0, "dry_multiplier": 0.0})]).tokens == [
        int(x.argmax())
    ]


def slow_dry(text, p, breakers=()):
    """By the definition: for each token, the longest end of the text that stands before one of its occurrences."""
    out: dict[int, float] = {}
    spans = [
        range(i, i + len(b)) for i in range(len(text)) for b in breakers if text[i : i + len(b)] == list(b)
    ]
    broken = {i for span in spans for i in span}
    for at in range(1, len(text)):
        length = 0
        while length < at and text[at - 1 - length] == text[len(text) - 1 - length]:
            if len(text) - 1 - length in broken:
                break
            length += 1
        if any((text[at],) == b for b in breakers) or length < p.dry_allowed_length:
            continue
        lost = p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
        out[text[at]] = max(out.get(text[at], 0.0), lost)
    return out


@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("breakers", [(), ((0,),), ((0,), (2,)), ((1,), (0, 2))])
def test_dry(allowed, breakers):
    rng = np.random.default_rng(allowed)
    p = SamplingParams(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed)
    seen = 0
    for _ in range(150):
        text = rng.choice(4, rng.integers(1, 80), p=[0.05, 0.1, 0.15, 0.7]).tolist()
        tokens, lost = dry_penalties(np.array(text), p, breakers)
        got = dict(zip(tokens.tolist(), lost.tolist(), strict=True))
        assert got == pytest.approx(slow_dry(text, p, breakers))
        seen += len(got)
    assert seen > 10


def test_dry_by_hand():
    p = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]  # 9 came after three such tokens, 8 after two
    tokens, lost = dry_penalties(np.array(text), p, ())
    assert dict(zip(tokens.tolist(), lost.tolist(), strict=True)) == {9: 2.0, 8: 1.0}
    tokens, lost = dry_penalties(np.array([7] * 500), p, ())
    assert np.isfinite(lost).all()  # as in llama.cpp the growth ends where float32 does


def test_breakers_are_the_tokens_that_write_a_text():
    words = {"a": 0, "b:": 1, ":": 2, "ba": 3, "ab": 4, "é": 5}
    tokenizer = Tokenizer(Backend(WordLevel(words, unk_token="a")), {})
    assert breakers_of(tokenizer, (":",)) == ((1,), (2,))
    assert breakers_of(tokenizer, ("ba",)) == ((1,), (3,), (4, 0))[1:]
    assert breakers_of(tokenizer, ("é", ":")) == ((5,), (1,), (2,))
    for wrong, why in (("", "an empty"), ("x" * 41, "a long text"), ("\ud800", "lone surrogate")):
        with pytest.raises(UsageError, match=f"dry_sequence_breakers has .*{why}"):
            SamplingParams(dry_sequence_breakers=("a", wrong))


def test_dry_looks_at_the_draft_and_as_far_back_as_asked():
    history = Counts([1, 2, 3], [9, 1]).with_draft([2, 3])
    assert history.last(-1) == [1, 2, 3, 9, 1, 2, 3]
    assert [history.last(n) for n in (0, 1, 3, 99)] == [[], [3], [1, 2, 3], [1, 2, 3, 9, 1, 2, 3]]
    x = torch.zeros(1, V)
    for last, lost in ((-1, 2.0), (7, 2.0), (6, 1.0), (4, 0.0), (0, 0.0)):
        p = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2, dry_penalty_last_n=last)
        got = shape(x, [LogitRow(p, 1, 7, history)])[0]
        assert float(got[9]) == -lost
        assert float(got.abs().sum()) == lost


def test_penalties_may_look_at_the_last_tokens_only():
    x = torch.ones(1, V)
    history = Counts([4, 5, 5, 6], [7]).with_draft([8, 7])
    for last, wanted in (
        (2, {8: 1, 7: 1}),
        (4, {6: 0, 7: 2, 8: 1}),
        (0, {}),
        (-1, {4: 0, 5: 0, 6: 0, 7: 2, 8: 1}),
    ):
        p = SamplingParams(
            repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, penalty_last_n=last
        )
        got = shape(x, [LogitRow(p, 1, 7, history)])[0]
        for token in range(V):
            times = wanted.get(token)
            assert float(got[token]) == (1.0 if times is None else 0.5 - 0.25 * times - 0.5 * (times > 0))


def mirostat_2(x, temperature, mu, tau, eta, choose_at):
    """llama.cpp's llama_sampler_mirostat_v2_apply: (what is left, the next mu) if candidate `choose_at` is drawn."""
    ranked = candidates(x, temperature)
    size = next((n for n, (_, _, p) in enumerate(ranked) if -math.log2(p) > mu), len(ranked))
    left = ranked[: max(size, 1)]
    whole = sum(p for _, _, p in left)
    token, _, p = left[min(choose_at, len(left) - 1)]
    return {i for i, _, _ in left}, token, mu - eta * (-math.log2(p / whole) - tau)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tau", "eta"), [(1.0, 0.9), (3.0, 0.1), (5.0, 0.1)])
def test_mirostat_over_a_text(seed, tau, eta):
    mu, sizes = 2 * tau, []
    for step in range(12):
        x = logits(seed * 100 + step)
        text = row(
            mirostat=2, mirostat_tau=tau, mirostat_eta=eta, temperature=0.8, top_k=3
        )  # no filter holds
        text.mu = mu if step else None
        left, token, wanted = mirostat_2(x, 0.8, mu, tau, eta, step % 5)
        assert kept(x, text) == left
        mu = next_mu(shape(x, [text])[0].numpy(), token, mu, text.params)
        assert mu == pytest.approx(wanted, abs=1e-4)
        sizes.append(len(left))
    assert 1 <= min(sizes) < max(sizes) <= V
    assert kept(logits(), row(mirostat=2, mirostat_tau=0.0)) == {int(logits().argmax())}
