"""Choice is a function of (logits, request, position): whoever asks, beside whomever, for how many rows."""

import numpy as np
import pytest
import torch

from paceline.core import SamplingParams
from paceline.ops import native_sampling
from paceline.sampling import draw, noise
from paceline.sampling.choose import choose, choose_candidates, distribution, logprobs
from paceline.sampling.shape import Counts, LogitRow, shape

V = 500


def make_row(position=10, seed=1, mask=None, stop_ids=(), output=(), **values):
    return LogitRow(SamplingParams(**values), seed, position, Counts([3], list(output)), mask, stop_ids)


def random_logits(rows, vocab=V, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


KINDS = [
    {}, {"temperature": 0.7}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 1.2, "top_p": 0.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 1.0, "output": (5, 6)},
    {"repetition_penalty": 1.5, "output": (7,)}, {"temperature": 5.0, "mask": np.arange(V) % 2 == 0},
    {"temperature": 1e-7}, {"temperature": 1.0, "allowed_token_ids": (9, 10, 11)},
]  # fmt: skip


def mixed_rows(count):
    return [make_row(position=i, seed=i % 3, **KINDS[i % len(KINDS)]) for i in range(count)]


def test_rows_are_independent_of_batch_and_order():
    """Greedy and sampled, seeded alike and not, in one batch (S12): each as if alone."""
    rows, logits = mixed_rows(45), random_logits(45)
    together = choose(logits, rows)
    alone = [choose(logits[i : i + 1], [row]).tokens[0] for i, row in enumerate(rows)]
    assert together.tokens == alone
    assert choose(logits.flip(0), rows[::-1]).tokens == alone[::-1]
    assert all(together.ok)
    assert len(set(alone)) > 10


def test_a_discarded_position_shifts_nothing():
    """S13: position 12's token is the same whether 10 and 11 were drawn before it or not."""
    logits = random_logits(3)
    rows = [make_row(position=p, temperature=1.0) for p in (10, 11, 12)]
    assert choose(logits, rows).tokens[2] == choose(logits[2:], rows[2:]).tokens[0]


def test_the_batched_draw_of_a_gpu_is_the_hosts():
    rows, logits = mixed_rows(27), random_logits(27)
    logits[5, 3] = torch.nan
    shaped = shape(logits, rows)
    wanted = choose(logits, rows)
    batched = draw.draw_device(shaped, None, rows, noise.TARGET).tolist()
    assert [t for t, ok in zip(batched, wanted.ok, strict=True) if ok] == [t for t in wanted.tokens if t]
    ids = torch.stack([torch.randperm(V) for _ in range(27)])
    mixed = draw.draw_device(shaped.gather(1, ids), ids, rows, noise.TARGET).tolist()
    assert mixed == batched


def test_seed_and_position_both_matter():
    logits = torch.zeros(1, V)
    by_seed = {choose(logits, [make_row(seed=s, temperature=1.0)]).tokens[0] for s in range(40)}
    by_position = {choose(logits, [make_row(position=p, temperature=1.0)]).tokens[0] for p in range(40)}
    assert len(by_seed) > 30
    assert len(by_position) > 30


@pytest.mark.parametrize("width", [5, 64, 1000, 5000, 262_144])
def test_the_lowest_id_wins_ties(width):
    """S7, for every path that takes an argmax; torch promises it, this holds it to that."""
    x = torch.zeros(3, width)
    x[:, 0] = -1.0
    x[:, [3, 4, width - 1]] = 2.0
    assert choose(x, [make_row()] * 3).tokens == [3] * 3
    assert choose(x, [make_row(frequency_penalty=1.0, output=(0,))] * 3).tokens == [3] * 3
    ids = torch.tensor([[9, 4, 7, 3]])
    tied = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    assert choose_candidates(tied, ids, [make_row()], noise.TARGET).tokens == [3]


def test_screening_changes_nothing(monkeypatch):
    """The float32 screen of large vocabularies only leaves out tokens that cannot win."""
    logits = torch.cat([random_logits(20, 20_000), torch.zeros(20, 20_000)])
    rows = [make_row(position=i, temperature=0.3 + 0.1 * i) for i in range(40)]
    monkeypatch.setattr(native_sampling, "suits", lambda *_: False)
    screened = choose(logits, rows).tokens
    monkeypatch.setattr(draw, "_SCREEN_FROM", 10**9)
    assert choose(logits, rows).tokens == screened


SHAPINGS = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.0},
            {"temperature": 1.0, "top_k": 4},
            {"frequency_penalty": 1.0}]  # fmt: skip


@pytest.mark.parametrize("values", SHAPINGS, ids=str)
@pytest.mark.parametrize("bad", ["nan", "all nan", "inf", "nothing"])
def test_a_broken_row_fails_alone(values, bad):
    """S6: a valid id, ok False, and the neighbours as they would have been."""
    logits, rows = random_logits(3), [make_row(position=i, **values) for i in range(3)]
    before = choose(logits, rows).tokens
    broken = logits.clone()
    if bad == "nan":
        broken[1, 77] = torch.nan
    else:
        broken[1] = {"all nan": torch.nan, "inf": torch.inf, "nothing": -torch.inf}[bad]
    got = choose(broken, rows)
    assert got.ok == [True, False, True]
    assert (got.tokens[0], got.tokens[2]) == (before[0], before[2])
    assert 0 <= got.tokens[1] < V
    drafted = choose_candidates(broken, None, rows, noise.DRAFT)
    assert all(0 <= t < V for t in drafted.tokens)
    assert drafted.confidence[1] == 0
    assert drafted.q[1] is None


def test_a_nan_behind_a_mask_is_still_an_error():
    logits = torch.zeros(1, V)
    logits[0, 5] = torch.nan
    assert choose(logits, [make_row(mask=np.arange(V) != 5)]).ok == [False]
    assert choose(logits, [make_row(temperature=1.0, allowed_token_ids=(1, 2))]).ok == [False]


def test_nothing_left_to_choose_is_an_error():
    assert choose(torch.zeros(1, V), [make_row(mask=np.zeros(V, dtype=bool))]).ok == [False]
    both = make_row(mask=np.arange(V) == 5, bad_token_ids=(5,), temperature=1.0)
    assert choose(torch.zeros(1, V), [both]).ok == [False]


def test_the_distribution_of_the_draw_is_the_shaped_distribution():
    n = 3_000
    x = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]]).repeat(n, 1)
    rows = [make_row(position=i, temperature=1.5, top_k=4) for i in range(n)]
    counts = torch.bincount(torch.tensor(choose(x, rows).tokens), minlength=5).double()
    p = distribution(shape(x[:1], rows[:1]), rows[:1])[0]
    assert counts[4] == 0
    chi2 = float(((counts - n * p)[:4] ** 2 / (n * p[:4])).sum())
    assert chi2 < 28  # 3 degrees of freedom, p = 4e-6; fixed noise, so this cannot flake


def test_a_drafter_with_equal_logits_draws_the_targets_token():
    rows, logits = mixed_rows(27), random_logits(27)
    ids = torch.stack([torch.randperm(V) for _ in range(27)])
    wanted = choose(logits, rows).tokens
    dense = choose_candidates(logits, None, rows, noise.TARGET)
    assert dense.tokens == wanted
    assert dense.q == [None] * 27
    assert choose_candidates(logits.gather(1, ids), ids, rows, noise.TARGET).tokens == wanted
    other = choose_candidates(logits, None, rows, noise.DRAFT).tokens
    assert other != wanted


def test_q_is_the_distribution_that_was_sampled():
    """S1: shaped by the request, of the very logits, in float64; greedy rows are one-hot (None)."""
    rows, logits = mixed_rows(9), random_logits(9)
    drafted = choose_candidates(logits, None, rows, noise.DRAFT)
    shaped = shape(logits, rows)
    for i, row in enumerate(rows):
        if row.params.temperature < 1e-5:
            assert drafted.q[i] is None
            continue
        assert torch.equal(drafted.q[i], torch.softmax(shaped[i].double(), -1))
        assert drafted.confidence[i] == pytest.approx(float(drafted.q[i][drafted.tokens[i]]), rel=1e-5)
    ids = torch.tensor([[9, 2, 4]])
    few = choose_candidates(torch.zeros(1, 3), ids, [make_row(temperature=1.0)], noise.DRAFT, vocab_size=12)
    assert few.q[0].tolist() == pytest.approx([1 / 3 if t in (9, 2, 4) else 0 for t in range(12)])
    assert few.tokens[0] in (9, 2, 4)


def test_drafts_follow_their_q():
    n = 3_000
    ids = torch.tensor([7, 1, 4]).repeat(n, 1)
    x = torch.tensor([1.0, 0.0, -1.0]).repeat(n, 1)
    rows = [make_row(position=i, temperature=0.8) for i in range(n)]
    drafted = choose_candidates(x, ids, rows, noise.DRAFT, vocab_size=8)
    counts = torch.bincount(torch.tensor(drafted.tokens), minlength=8).double()
    q = drafted.q[0]
    seen = q > 0
    chi2 = float(((counts - n * q)[seen] ** 2 / (n * q[seen])).sum())
    assert counts[~seen].sum() == 0
    assert chi2 < 25


def test_greedy_confidence_is_a_probability_not_a_certainty():
    x = torch.tensor([[1.0, 3.0, 2.0]])
    assert choose_candidates(x, None, [make_row()], noise.TARGET).confidence[0] == pytest.approx(
        0.6652, abs=1e-4
    )


def test_logprobs():
    """S14: neither 0.0 everywhere nor of another distribution than documented."""
    x = torch.tensor([1.0, 3.0, 2.0, 2.0])
    raw = torch.log_softmax(x, -1)
    shaped = shape(x[None], [make_row(temperature=0.5, top_k=2)])[0]
    got = logprobs(x, shaped, 2, 3)
    assert got.token == 2
    assert got.raw == pytest.approx(float(raw[2]))
    assert got.shaped == pytest.approx(float(torch.log_softmax(shaped, -1)[2]))
    assert [t for t, _ in got.top] == [1, 2, 3]  # the tie by id
    assert [v for _, v in got.top] == pytest.approx(raw[[1, 2, 3]].tolist())
    plain = logprobs(x, None, 1, 0)
    assert plain.top == []
    assert plain.raw == plain.shaped == pytest.approx(float(raw[1]))
    assert plain.raw < 0
    assert len(logprobs(x, None, 1, 99).top) == 4


def test_plain_greedy_needs_no_shaping():
    choice = choose(random_logits(2), [make_row(), make_row(top_k=3)])
    assert choice.shaped is None
    assert choose(random_logits(2), [make_row(), make_row(temperature=1.0)]).shaped is not None
