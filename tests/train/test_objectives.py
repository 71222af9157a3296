"""Values and gradients of the objectives, against finite differences and float64."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.train import scoring
from paceline.train.objectives import (
    OBJECTIVES,
    Laws,
    acceptance,
    expected_tokens,
    find_objective,
    kl,
    lk,
    position_weights,
    total_variation,
)

SMOOTH = [
    name for name in OBJECTIVES if name not in ("hybrid", "shaped")
]  # a constant weight: checked on its own


def distributions(
    dtype: torch.dtype = torch.float64, rows: int = 5, vocab: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = (2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(vocab, (rows,), generator=generator)
    return torch.log_softmax(p, -1).to(dtype), q.to(dtype), tokens


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_equals_finite_differences(name: str) -> None:
    log_p, q, tokens = distributions()

    def value(logits: torch.Tensor) -> torch.Tensor:
        return OBJECTIVES[name](Laws(log_p, torch.log_softmax(logits, -1), tokens, tokens))

    assert torch.autograd.gradcheck(value, (q.requires_grad_(),), eps=1e-6, atol=1e-6)


def test_hybrid_gradient_is_its_mixture_with_a_constant_weight() -> None:
    log_p, q, tokens = distributions()
    q.requires_grad_()

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of.sum(), q, retain_graph=True)[0]

    distribution = Laws(log_p, torch.log_softmax(q, -1), tokens, tokens)
    weight = torch.exp(-3 * acceptance(distribution)).detach()
    mixed = gradient(OBJECTIVES["hybrid"](distribution))
    torch.testing.assert_close(
        mixed, gradient(weight * kl(distribution)) + gradient((1 - weight) * total_variation(distribution))
    )


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_float32_gradient_is_close_to_float64(name: str) -> None:
    grads = []
    for dtype in (torch.float32, torch.float64):
        log_p, q, tokens = distributions(dtype, rows=16, vocab=50)
        q.requires_grad_()
        OBJECTIVES[name](Laws(log_p, torch.log_softmax(q, -1), tokens, tokens)).sum().backward()
        grads.append(q.grad.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n not in ("ce", "ce-tv", "shaped")])
def test_equal_laws_are_the_minimum_and_cost_nothing(name: str) -> None:
    log_p, _, tokens = distributions()
    value = OBJECTIVES[name](Laws(log_p, log_p.clone(), tokens, tokens))
    torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-12, rtol=0)
    worse = OBJECTIVES[name](Laws(log_p, log_p.roll(1, -1), tokens, tokens))
    assert (worse > value).all()


def test_acceptance_is_one_minus_total_variation() -> None:
    log_p, q, tokens = distributions()
    distribution = Laws(log_p, torch.log_softmax(q, -1), tokens, tokens)
    torch.testing.assert_close(acceptance(distribution), 1 - total_variation(distribution))
    torch.testing.assert_close(lk(distribution), -(1 - total_variation(distribution)).log())


def test_a_token_that_the_target_never_says_gives_finite_values() -> None:
    log_p = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    for name in ("ce", "kl", "tv", "lk", "hybrid", "ce-tv"):
        logits = torch.tensor([[30.0, -80.0, -90.0]], requires_grad=True)
        value = OBJECTIVES[name](
            Laws(log_p, torch.log_softmax(logits, -1), torch.tensor([0]), torch.tensor([0]))
        )
        value.sum().backward()
        assert value.isfinite().all(), name
        assert logits.grad.isfinite().all(), name


def test_credit_weighted_lk_has_the_gradient_of_the_expected_length() -> None:
    generator = torch.Generator().manual_seed(3)
    steps, vocab = 4, 6
    log_p = torch.log_softmax(torch.randn(steps, vocab, generator=generator, dtype=torch.float64), -1)
    q = torch.randn(steps, vocab, generator=generator, dtype=torch.float64, requires_grad=True)
    distribution = Laws(log_p, torch.log_softmax(q, -1), *2 * (torch.zeros(steps, dtype=torch.long),))
    alphas = acceptance(distribution)
    (exact,) = torch.autograd.grad(-alphas.cumprod(0).sum(), q, retain_graph=True)
    weights = position_weights("credit", alphas[None])[0]
    (ours,) = torch.autograd.grad((weights * lk(distribution)).sum(), q)
    torch.testing.assert_close(ours / ours.norm(), exact / exact.norm())


def test_weights_average_to_one() -> None:
    alphas = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    for kind in ("even", "decay", "credit"):
        weights = position_weights(kind, alphas)
        assert weights.shape == alphas.shape
        assert abs(float(weights.mean()) - 1) < 1e-6
    assert (position_weights("decay", alphas).diff(dim=1) < 0).all()


def test_expected_tokens_counts_a_chain() -> None:
    kept = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
    assert expected_tokens(kept, torch.ones_like(kept, dtype=torch.bool)) == 1 + (2 + 0) / 2


def test_an_unknown_objective_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"kl.*lk"):
        find_objective("mse")


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["hybrid", "shaped"])
@pytest.mark.parametrize("columns", [3, 16, 50, 1003])
def test_our_kernel_has_the_value_and_the_gradient_of_the_objective(
    columns: int, name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(columns)
    monkeypatch.setattr(scoring, "on_kernels", lambda objective: kernels)
    scores = 3 * torch.randn(9, columns, generator=generator)
    scores[3, 1] = -torch.inf
    log_p = torch.log_softmax(scores, -1)
    logits = 3 * torch.randn(70, columns, generator=generator)
    row, weights = torch.randint(9, (70,), generator=generator), torch.rand(70, generator=generator)
    best = log_p.argmax(-1)
    best[::4] = -1
    task = scoring.Task(scoring.Scored(log_p, best, row, best[row]), weights, OBJECTIVES[name])
    exact = logits.double().requires_grad_()
    laws = Laws(log_p.double()[row], torch.log_softmax(exact, -1), best[row], best[row])
    whole = (OBJECTIVES[name](laws) * weights).sum()
    (expected,) = torch.autograd.grad(whole, exact)
    value, grad = scoring.value_and_gradient(task, slice(0, 70), logits.clone())
    torch.testing.assert_close(value.double(), whole.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["kl", "tv", "hybrid", "ce", "shaped"])
def test_a_loss_in_pieces_has_the_value_and_gradients_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(7)
    log_p = torch.log_softmax(torch.randn(9, 20, generator=generator), -1)
    states, head = torch.randn(23, 6, generator=generator), torch.randn(20, 6, generator=generator)
    weights = torch.rand(23, generator=generator)
    row, tokens = torch.randint(9, (23,), generator=generator), torch.randint(20, (23,), generator=generator)
    best = log_p.argmax(-1)
    states.requires_grad_()
    head.requires_grad_()
    whole = (
        OBJECTIVES[name](Laws(log_p[row], torch.log_softmax(states @ head.T, -1), tokens, best[row]))
        * weights
    ).sum()
    expected = torch.autograd.grad(3 * whole, (states, head))
    monkeypatch.setattr(scoring, "CPU_PIECE", 4 * 20 * 5)
    monkeypatch.setattr(scoring, "KERNEL_PIECE", 4 * 20 * 5)
    loss = scoring.head_loss(
        states,
        head,
        scoring.Task(scoring.Scored(log_p, best, row, tokens), weights, OBJECTIVES[name]),
    )
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, (states, head)), expected)
