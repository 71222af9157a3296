"""Run by test_dense_writer.py with TRITON_INTERPRET=1: the Triton kernels against plain torch."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from paceline.ops.losses import Hybrid
from paceline.train.objectives import GREEDY_SHARE, HYBRID_DECAY, USED_AT, Laws, shaped

sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes" / "smollm2"))

from writer import plain_attend

whole = builtins.int


class Numbers(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, whole)


class Int(whole, metaclass=Numbers):
    """int() of an array of one number, which numpy 2.4 refuses and the interpreter of Triton 3.6 asks for."""

    def __new__(cls, x: Any = 0, *more: Any) -> Any:
        return whole(x.item() if isinstance(x, np.ndarray) else x, *more)


def check_attention(kernels: Any) -> None:
    q, k, v = torch.randn(3, 6, 16), torch.randn(3, 2, 70, 16), torch.randn(3, 2, 70, 16)
    positions = torch.tensor([3, 63, 69])
    got = kernels.attend(q, k, v, positions, 0.3)
    torch.testing.assert_close(got, plain_attend(q, k, v, positions, 0.3), atol=1e-5, rtol=1e-4)


def check_loss(kernels: Any) -> None:
    log_p = torch.log_softmax(3 * torch.randn(7, 50), -1)
    logits = (3 * torch.randn(9, 50)).requires_grad_()
    rows, weights = torch.randint(7, (9,)), torch.rand(9)
    given = log_p[rows]
    laws = Laws(given, torch.log_softmax(logits, -1), rows, given.argmax(-1))
    loss = shaped(laws) * weights
    (wanted,) = torch.autograd.grad(loss.sum(), logits)
    shape = Hybrid(USED_AT, GREEDY_SHARE, HYBRID_DECAY)
    value, gradient = kernels.shaped(logits.detach(), log_p, rows, weights, shape)
    torch.testing.assert_close(value, loss.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)


def check_choice(kernels: Any) -> None:
    logits = torch.randn(5000)
    logits[[4321, 17, 4990]] = torch.tensor([9.0, 8.5, 8.0])
    ordered, order = torch.softmax(logits / 0.8, 0).sort(descending=True)
    allowed = order[ordered.cumsum(0) - ordered < 0.9]
    temperatures = torch.tensor([0.8] * 8 + [0.0])
    drawn = kernels.choose(
        logits.expand(9, -1).contiguous(), temperatures, torch.full((9,), 0.9), torch.tensor([7])
    )
    assert len(set(drawn.tolist())) > 1
    assert set(drawn.tolist()) <= set(allowed.tolist())
    assert drawn[8] == 4321


def main() -> None:
    interpreter.int = Int
    import writing_kernels

    from paceline.train import kernels

    torch.manual_seed(0)
    check_loss(kernels)
    check_attention(writing_kernels)
    check_choice(writing_kernels)


if __name__ == "__main__":
    main()
