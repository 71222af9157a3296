"""Shaping against transformers' logits processors, and the mistakes that other engines made there."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.sampling import filters
from paceline.sampling.shape import (
    Counts,
    LogitRow,
    _shape_device,
    check_token_ids,
    is_plain,
    shape,
    shape_candidates,
)

V = 300
PROMPT, OUTPUT = [5, 6, 7, 5, 299], [8, 9, 8, 5]


def make_row(params=None, prompt=PROMPT, output=OUTPUT, mask=None, stop_ids=(), **kwargs):
    params = params or SamplingParams(**kwargs)
    return LogitRow(params, 1, len(prompt) + len(output), Counts(prompt, output), mask, stop_ids)


def random_logits(rows=4, vocab=V, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def oracle(logits, params):
    """transformers' processors in its order; presence and frequency, which it lacks, by their definition."""
    ids = torch.tensor([PROMPT + OUTPUT] * len(logits))
    x = logits.clone()
    for token, bias in params.logit_bias.items():
        x[:, token] += bias
    if params.repetition_penalty != 1:
        x = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, x)
    for token in set(OUTPUT):
        x[:, token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    x = hf.TemperatureLogitsWarper(params.temperature)(ids, x)
    if params.top_k:
        x = hf.TopKLogitsWarper(params.top_k)(ids, x)
    if params.top_p < 1:
        x = hf.TopPLogitsWarper(params.top_p)(ids, x)
    if params.min_p:
        x = hf.MinPLogitsWarper(params.min_p)(ids, x)
    return x


COMBINATIONS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 2.0, "repetition_penalty": 0.7, "top_p": 0.6},
    {"temperature": 1.0, "presence_penalty": 1.5},
    {"temperature": 0.9, "frequency_penalty": -0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.1, "logit_bias": {5: 3.0, 17: -100.0}, "repetition_penalty": 1.2,
     "frequency_penalty": 0.5, "presence_penalty": 0.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
]  # fmt: skip


@pytest.mark.parametrize("values", COMBINATIONS, ids=str)
@pytest.mark.parametrize("near", [(8.0, 16.0, float("inf")), (0.5, 1.0, float("inf"))])
def test_equals_transformers(values, near, monkeypatch):
    monkeypatch.setattr(filters, "_NEAR", near)  # with the second, the first looks never find enough
    params, logits = SamplingParams(**values), random_logits()
    before = logits.clone()
    got, wanted = shape(logits, [make_row(params)] * 4), oracle(logits, params)
    assert torch.equal(logits, before)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    kept = wanted > -torch.inf
    torch.testing.assert_close(got[kept], wanted[kept])
    assert (got != logits).any()


@pytest.mark.parametrize("seed", range(3))
def test_the_batched_thresholds_of_a_gpu_are_the_hosts(seed):
    kinds = [(0, 0.9, 0.0), (5, 1.0, 0.0), (7, 0.6, 0.0), (0, 1.0, 0.2), (0, 1.0, 0.0), (400, 0.99, 0.01)]
    chosen = [filters.Filter(*kind) for kind in kinds]
    x = random_logits(len(chosen), seed=seed)
    x[:, 200:] = x[:, :100].clone()  # ties
    batched = filters.thresholds(x, chosen)
    for r, one in enumerate(chosen):
        host = filters.host_threshold(x[r].numpy(), one)
        assert batched[r] == host or abs(float(batched[r]) - host) < 1e-6
        assert filters.thresholds(x[r : r + 1], [one])[0] == batched[r]


def every_row():
    rows = [make_row(**values) for values in COMBINATIONS]
    rows += [make_row(), make_row(temperature=1.0), make_row(temperature=1.0, mask=np.arange(V) % 3 == 0)]
    rows += [make_row(min_tokens=9, stop_ids=(1, 2)), make_row(bad_token_ids=(4, 5), temperature=0.5)]
    return [*rows, make_row(allowed_token_ids=(4, 5, 200), temperature=0.5, top_p=0.9)]


def test_a_row_does_not_depend_on_its_neighbours():
    rows = every_row()
    logits = random_logits(len(rows))
    together = shape(logits, rows)
    for i, row in enumerate(rows):
        assert torch.equal(shape(logits[i : i + 1], [row])[0], together[i])
    backwards = shape(logits.flip(0), rows[::-1]).flip(0)
    assert torch.equal(backwards, together)


def test_the_batched_shaping_of_a_gpu_is_the_hosts():
    rows = every_row()
    logits = random_logits(len(rows))
    ids = torch.stack(
        [torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(len(rows))]
    )
    wanted = shape(logits, rows)
    assert torch.equal(_shape_device(logits, None, rows), wanted)
    assert torch.equal(_shape_device(logits.gather(1, ids), ids, rows), wanted.gather(1, ids))


def test_candidates_obey_the_same_distribution():
    """With all ids as candidates, in any order, the result is the whole vocabulary's, bit for bit."""
    rows = every_row()
    logits = random_logits(len(rows))
    ids = torch.stack(
        [torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(len(rows))]
    )
    got = shape_candidates(logits.gather(1, ids), ids, rows)
    wanted = shape(logits, rows).gather(1, ids)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_few_candidates_may_lack_the_tokens_that_a_request_names():
    ids = torch.tensor([[250, 3, 8, 40]])
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    row = make_row(
        temperature=1.0, logit_bias={3: 1.0, 77: 9.0}, bad_token_ids=(40, 41), frequency_penalty=1.0
    )
    assert shape_candidates(x, ids, [row])[0].tolist() == [1.0, 3.0, 1.0, -torch.inf]
    row = make_row(temperature=1.0, allowed_token_ids=(3, 100), mask=np.arange(200) != 8)
    assert shape_candidates(x, ids, [row])[0].tolist() == [-torch.inf, 2.0, -torch.inf, -torch.inf]


def test_greedy_rows_are_never_divided():
    """T=0 in a batch with sampled rows: no inf, no NaN, no sign change (S5)."""
    logits = random_logits(3)
    logits[:, 9] = -torch.inf
    rows = [make_row(), make_row(temperature=0.8, top_p=0.9), make_row(temperature=1e-30, top_k=3)]
    got = shape(logits, rows)
    assert torch.equal(got[0], logits[0])
    assert torch.equal(got[2], logits[2])
    assert not got.isnan().any()
    assert (got[:, 9] == -torch.inf).all()


def test_top_p_sees_what_top_k_left():
    """Joint filtering would keep another set (S11): after top_k=2 the first token has 0.6/0.9 of the mass."""
    x = torch.tensor([[0.6, 0.3, 0.1]]).log()
    kept = shape(x, [make_row(temperature=1.0, top_k=2, top_p=0.65, prompt=[], output=[])]) > -torch.inf
    assert kept.tolist() == [[True, False, False]]
    kept = shape(x, [make_row(temperature=1.0, top_p=0.65, prompt=[], output=[])]) > -torch.inf
    assert kept.tolist() == [[True, True, False]]


def test_ties_at_a_boundary_stand_or_fall_together():
    x = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for values in ({"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.13}):
        kept = shape(x, [make_row(temperature=1.0, prompt=[], output=[], **values)]) > -torch.inf
        assert kept.tolist() == [[True, True, True, True, False]], values
    flat = shape(torch.zeros(1, 1000), [make_row(temperature=1.0, top_k=5, top_p=0.5)])
    assert (flat == 0).all()


def test_penalties_count_the_output_once_and_the_draft_only_while_it_is_looked_at():
    """S9: no token twice, prompt tokens only for repetition, and refused drafts leave no trace."""
    history = Counts(PROMPT, OUTPUT)
    x = torch.zeros(1, V)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, presence_penalty=0.5)

    def penalties(counts):
        return {t: -v for t, v in enumerate(shape(x, [LogitRow(params, 1, 9, counts)])[0].tolist()) if v}

    plain = {8: 2.5, 9: 1.5, 5: 1.5}
    assert penalties(history) == plain
    assert penalties(history.with_draft([9, 70])) == {**plain, 9: 2.5, 70: 1.5}
    assert penalties(history.with_draft([9]).with_draft([70, 70])) == {**plain, 9: 2.5, 70: 2.5}
    assert penalties(history) == plain
    history.add([70])
    assert penalties(history) == {**plain, 70: 1.5}
    assert history.output_len == 5
    assert history.with_draft([1, 2]).output_len == 7


def test_history_agrees_with_a_plain_count_as_it_grows():
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 500, 40).tolist()
    history, said = Counts(prompt), []
    for _ in range(200):
        new = generator.integers(0, 500, generator.integers(0, 5)).tolist()
        history.add(new)
        said += new
        draft = generator.integers(0, 500, generator.integers(0, 4)).tolist()
        ids, counts = history.with_draft(draft).table()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            t: (said + draft).count(t) for t in dict.fromkeys(prompt + said + draft)
        }


def test_min_tokens_is_not_off_by_one():
    """S10: with min_tokens=3 the first three tokens may not be a stop; the fourth may."""
    x = torch.zeros(1, V)
    banned = []
    for out in range(5):
        row = make_row(min_tokens=3, output=[9] * out, stop_ids=(1, 2))
        banned.append(bool((shape(x, [row])[0, [1, 2]] == -torch.inf).all()))
    assert banned == [True, True, True, False, False]
    draft = LogitRow(SamplingParams(min_tokens=3), 1, 9, Counts([1], [9]).with_draft([4, 4]), None, (1,))
    assert shape(x, [draft])[0, 1] == 0  # the block's own tokens count


def test_min_tokens_gives_way_where_the_constraint_has_ended():
    mask = np.zeros(V, dtype=bool)
    mask[1] = True
    got = shape(torch.zeros(1, V), [make_row(min_tokens=9, mask=mask, stop_ids=(1, 2))])[0]
    assert (got > -torch.inf).nonzero().flatten().tolist() == [1]


def test_a_mask_shorter_than_the_vocabulary_refuses_the_rest():
    got = shape(torch.zeros(1, V), [make_row(mask=np.ones(V - 10, dtype=bool))])[0]
    assert (got[: V - 10] == 0).all()
    assert (got[V - 10 :] == -torch.inf).all()
    got = shape(torch.zeros(1, V), [make_row(mask=np.ones(V + 10, dtype=bool))])[0]
    assert (got == 0).all()


def test_every_filter_holds_for_every_row_of_a_block():
    """S10: min_p once reached the bonus token only, logit_bias none."""
    x = torch.tensor([[0.0, -1.0, -9.0]]).repeat(5, 1)
    row = make_row(temperature=1.0, min_p=0.1, logit_bias={1: 0.5}, prompt=[], output=[])
    got = shape(x, [row] * 5)
    assert got.tolist() == [[0.0, -0.5, -torch.inf]] * 5


def test_plain_rows_are_recognised():
    assert is_plain(make_row())
    assert is_plain(make_row(temperature=0.7))
    assert is_plain(make_row(min_tokens=2, stop_ids=(1,)))  # already out
    assert is_plain(make_row(top_k=5))  # greedy: no filter moves an argmax
    assert not any(is_plain(row) for row in every_row()[1:12])


def test_ids_beyond_the_vocabulary():
    for values in (
        {"logit_bias": {V: 1.0}},
        {"bad_token_ids": (-1,)},
        {"stop_token_ids": (V,)},
        {"reference": [1, V]},
    ):
        with pytest.raises(UsageError, match=f"give ids from 0 to {V - 1}"):
            check_token_ids(SamplingParams(**values), V)
    check_token_ids(SamplingParams(allowed_token_ids=(0, V - 1), reference=(0, V - 1)), V)
    check_token_ids(SamplingParams(reference="a text"), V)
    smaller = shape(torch.zeros(1, 100), [make_row(bad_token_ids=(250, 3), repetition_penalty=2.0)])
    assert (smaller == -torch.inf).sum() == 1  # a drafter's smaller vocabulary ignores what it has not
