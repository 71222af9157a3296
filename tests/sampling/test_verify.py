"""`reject` and `block` against the target's distribution by exact enumeration; `match` by its definition."""

import itertools
import math

import pytest
import torch

from odds import block_odds, reject_odds
from paceline.core import SamplingParams
from paceline.sampling import noise
from paceline.sampling.choose import choose_candidates
from paceline.sampling.shape import Counts, LogitRow
from paceline.sampling.verify import (
    Uniforms,
    residual,
    uniforms,
    verify_block,
    verify_match,
    verify_reject,
    verify_typical,
)

V = 3
RULES = {"reject": (reject_odds, verify_reject), "block": (block_odds, verify_block)}


class Tree:
    """A random distribution for every prefix, float64, with zeros and equalities among them."""

    def __init__(self, seed, zeros=0.0):
        self.generator, self.distributions, self.zeros = torch.Generator().manual_seed(seed), {}, zeros

    def __call__(self, prefix):
        if prefix not in self.distributions:
            x = torch.rand(V, generator=self.generator, dtype=torch.float64) ** 2
            x[torch.rand(V, generator=self.generator) < self.zeros] = 0
            x[int(torch.randint(V, (1,), generator=self.generator))] += 0.01
            self.distributions[prefix] = x / x.sum()
        return self.distributions[prefix]


def never(prefix):
    return False


def drafts(q, length, stop):
    """Every draft with its probability; `stop` ends a draft early by what it holds so far."""
    open_ = [((), 1.0)]
    for _ in range(length):
        nxt = []
        for tokens, chance in open_:
            if stop(tokens):
                yield tokens, chance
            else:
                distribution = q(tokens)
                nxt += [
                    ((*tokens, t), chance * float(distribution[t])) for t in range(V) if distribution[t] > 0
                ]
        open_ = nxt
    yield from open_


def output_law(odds, p, q, length, stop=never, claimed=None):
    """P(first length + 1 tokens) when later tokens are the target's own, and the expected number kept."""
    claimed = claimed or q
    out, kept_mean = {}, 0.0
    for draft, chance in drafts(q, length, stop):
        k = len(draft)
        ps = torch.stack([p(draft[:i]) for i in range(k + 1)])
        qs = [claimed(draft[:i]) for i in range(k)]
        result = odds(ps, qs, list(draft))
        assert sum(result.kept) == pytest.approx(1, abs=1e-12)
        for kept, share in enumerate(result.kept):
            kept_mean += chance * share * kept
            last = ps[k] if kept == k else residual(ps[kept], qs[kept], draft[kept], result.weight[kept])
            for t in range(V):
                spread(out, p, (*draft[:kept], t), chance * share * float(last[t]), length + 1)
    return out, kept_mean


def spread(out, p, prefix, chance, length):
    if chance == 0:
        return
    if len(prefix) >= length:
        out[prefix[:length]] = out.get(prefix[:length], 0.0) + chance
        return
    for t in range(V):
        spread(out, p, (*prefix, t), chance * float(p(prefix)[t]), length)


def error(out, p, length):
    """Largest difference from the target's own distribution over all sequences."""
    worst = 0.0
    for sequence in itertools.product(range(V), repeat=length + 1):
        wanted = math.prod(float(p(sequence[:i])[t]) for i, t in enumerate(sequence))
        worst = max(worst, abs(wanted - out.get(sequence, 0.0)))
    return worst


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", range(4))
@pytest.mark.parametrize(("seed", "zeros"), [(0, 0.0), (1, 0.0), (2, 0.5)])
def test_the_output_has_the_targets_distribution(rule, length, seed, zeros):
    p, q = Tree(seed, zeros), Tree(seed + 100, zeros)
    out, kept = output_law(RULES[rule][0], p, q, length)
    assert error(out, p, length) < 1e-12
    assert 0 < kept < length or length == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_may_stop_by_what_it_holds(rule):
    p, q = Tree(3), Tree(4)

    def stop(prefix):
        return prefix in {(0,), (1, 2)}

    out, _ = output_law(RULES[rule][0], p, q, 3, stop)
    assert error(out, p, 3) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_without_a_distribution(rule):
    """q None: the draft token was certain."""
    p = Tree(5)

    def one_hot(prefix):
        distribution = torch.zeros(V, dtype=torch.float64)
        distribution[len(prefix) % V] = 1
        return distribution

    for claimed in (one_hot, lambda prefix: None):
        out, kept = output_law(RULES[rule][0], p, one_hot, 3, claimed=claimed)
        assert error(out, p, 3) < 1e-12
        assert kept > 0


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_keep_everything(rule):
    """S4: the residual is empty everywhere, and nothing becomes NaN."""
    p = Tree(6, zeros=0.4)
    out, kept = output_law(RULES[rule][0], p, p, 3)
    assert error(out, p, 3) < 1e-12
    assert kept == pytest.approx(3, abs=1e-12)
    assert not residual(p(()), p(()).clone(), 0, 1.0).isnan().any()


def test_block_keeps_at_least_as_much_as_reject():
    gained = 0.0
    for seed in range(6):
        p, q = Tree(seed), Tree(seed + 50)
        _, single = output_law(reject_odds, p, q, 3)
        _, joint = output_law(block_odds, p, q, 3)
        assert joint >= single - 1e-12
        gained += joint - single
    assert gained > 0.1


def test_a_false_q_is_seen():
    """The negative control: an argmax draft that claims its softmax, as one library hands it over (S1)."""
    p, soft = Tree(7), Tree(8)

    def hard(prefix):
        distribution = torch.zeros(V, dtype=torch.float64)
        distribution[int(soft(prefix).argmax())] = 1
        return distribution

    for odds, _ in RULES.values():
        out, _ = output_law(odds, p, hard, 2, claimed=soft)
        assert error(out, p, 2) > 0.02


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_the_verdict_follows_its_odds(rule, seed):
    """Uniforms on a fine lattice: how often each verdict comes equals the enumerated chance."""
    odds, verify = RULES[rule]
    p, q = Tree(seed, 0.2), Tree(seed + 9)
    draft = [0, 1]
    ps = torch.stack([p(tuple(draft[:i])) for i in range(3)])
    qs = [q(tuple(draft[:i])) for i in range(2)]
    n = 40
    lattice = [(i + 0.5) / n for i in range(n)]
    counts = {}
    for a, b in itertools.product(lattice, lattice):
        verdict = verify(ps, qs, draft, Uniforms([a, b], [0.3, 0.3, 0.3]))
        counts[verdict.accepted] = counts.get(verdict.accepted, 0) + 1
    chances = odds(ps, qs, draft).kept
    for kept in range(3):
        assert counts.get(kept, 0) / n**2 == pytest.approx(chances[kept], abs=2 / n)
    picked = [verify(ps, qs, draft, Uniforms([1 - 1e-9] * 2, [u] * 3)).next_token for u in lattice]
    result = odds(ps, qs, draft)
    if result.kept[0] == pytest.approx(1 - max(0, 1 - result.kept[0])):
        first = verify(ps, qs, draft, Uniforms([1 - 1e-9] * 2, [0.5] * 3)).accepted
        last = ps[2] if first == 2 else residual(ps[first], qs[first], draft[first], result.weight[first])
        for t in range(V):
            assert picked.count(t) / n == pytest.approx(float(last[t]), abs=2 / n)


def sample_chain(verify, argmax_draft, n=2_000):
    """First tokens of n texts through drafts picked by `choose_candidates` and the noise of the engine."""
    target = torch.tensor([0.8, 0.0, 0.3, -1.0, 0.2, -0.5, 0.1, 0.4])
    drafter = torch.tensor([0.1, 0.9, 0.0, -0.4, 0.6, -2.0, 0.3, 0.0])
    p = torch.softmax(target.double(), -1).repeat(2, 1)
    params, history = SamplingParams(temperature=1.0), Counts([1])
    rows = [LogitRow(params, 17, i, history) for i in range(n)]
    drafted = choose_candidates(drafter.repeat(n, 1), None, rows, noise.DRAFT)
    counts = torch.zeros(8, dtype=torch.float64)
    for i in range(n):
        token = int(drafter.argmax()) if argmax_draft else drafted.tokens[i]
        verdict = verify(p, [drafted.q[i]], [token], uniforms(17, i, 1))
        counts[token if verdict.accepted else verdict.next_token] += 1
    return float(((counts - n * p[0]) ** 2 / (n * p[0])).sum())


@pytest.mark.parametrize("rule", RULES)
def test_sampled_outputs_follow_the_target(rule):
    assert (
        sample_chain(RULES[rule][1], argmax_draft=False) < 45
    )  # 7 degrees of freedom, p = 1e-7; fixed noise
    assert sample_chain(RULES[rule][1], argmax_draft=True) > 200  # the negative control must fail


def test_match_keeps_the_common_prefix():
    for draft, kept in (([], 0), ([4], 0), ([1], 1), ([1, 2], 2), ([1, 9, 3], 1), ([9, 2, 3], 0)):
        target = [1, 2, 3, 4][: len(draft) + 1]
        verdict = verify_match(target, draft)
        assert (verdict.accepted, verdict.next_token) == (kept, target[kept])


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.5, 1.0), (1e-3, 1.0), (1.0, 1e-3)])
def test_typical_keeps_what_is_equal_or_above_its_threshold(epsilon, delta):
    """arXiv 2401.10774, section 2.3.1, token by token."""
    params, p = SamplingParams(typical_epsilon=epsilon, typical_delta=delta), Tree(11, zeros=0.3)
    for draft in itertools.product(range(V), repeat=3):
        for own in itertools.product(range(V), repeat=4):
            rows = [p(draft[:i]) for i in range(4)]
            kept = 0
            for row, token, mine in zip(rows, draft, own, strict=False):
                chances = [float(x) for x in row]
                entropy = -sum(x * math.log(x) for x in chances if x > 0)
                if token != mine and not chances[token] > min(epsilon, delta * math.exp(-entropy)):
                    break
                kept += 1
            verdict = verify_typical(torch.stack(rows), own, draft, params)
            assert (verdict.accepted, verdict.next_token) == (kept, own[kept])


def test_typical_keeps_nothing_that_cannot_be_and_nothing_of_scores_that_are_no_numbers():
    p = torch.tensor([[0.0, 1.0], [math.nan, math.nan]], dtype=torch.float64)
    assert verify_typical(p, [1, 1], [0], SamplingParams()).accepted == 0
    assert verify_typical(p.flip(0), [1, 1], [0], SamplingParams()).accepted == 0


NAN, INF = float("nan"), float("inf")
WEIRD = [
    [0, 0, 0],
    [NAN, NAN, NAN],
    [NAN, 0.5, 0.5],
    [1, 0, 0],
    [INF, 0, 0],
    [1e-320, 0, 0],
    [-1, 1, 1],
    [1 / 3] * 3,
]


@pytest.mark.parametrize("verify", [verify_reject, verify_block])
@pytest.mark.parametrize("last", [WEIRD[1], WEIRD[3], WEIRD[7]])
def test_ids_stay_in_the_vocabulary_for_any_input(verify, last):
    """S6: whatever p and q hold, the verdict names a token that exists."""
    rows = [torch.tensor(w, dtype=torch.float64) for w in WEIRD]
    for p0, q0, token, u in itertools.product(rows, [*rows, None], (0, 2, 3, 99, -1), (1e-10, 1 - 1e-10)):
        p = torch.stack([p0, torch.tensor(last, dtype=torch.float64)])
        verdict = verify(p, [q0], [token], Uniforms([u], [u, u]))
        assert 0 <= verdict.next_token < 3
        assert 0 <= verdict.accepted <= 1
        if not 0 <= token < 3:
            assert verdict.accepted == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_with_a_larger_or_smaller_vocabulary(rule):
    """S16: mass on ids that the target has not is refused, and the target's distribution still comes out."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for q in ([0.1, 0.2, 0.3, 0.4], [0.6, 0.4]):
        distribution = torch.tensor(q, dtype=torch.float64)
        out = torch.zeros(3, dtype=torch.float64)
        for token, chance in enumerate(q):
            result = RULES[rule][0](torch.stack([p, p]), [distribution], [token])
            if token < 3:
                out[token] += chance * result.kept[1]
            out += chance * result.kept[0] * residual(p, distribution, token, 1.0)
        torch.testing.assert_close(out, p, rtol=0, atol=1e-12)


def test_noise_is_addressed_by_round():
    """Same seed and first position, same uniforms; a round that begins elsewhere shares none, or `block` is biased."""
    a, b = uniforms(5, 100, 4), uniforms(5, 102, 2)
    assert uniforms(5, 100, 4) == a
    assert {*a.accept, *a.pick}.isdisjoint({*b.accept, *b.pick})
    assert set(a.accept).isdisjoint(a.pick)
    assert uniforms(6, 100, 4) != a
