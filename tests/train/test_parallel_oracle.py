"""The training forward against transformers' assistant, one position and one step at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from paceline.train.methods.gemma_assistant.learning import load_module
from paceline.train.parallel import Captured, choose_anchors, valid_steps

STEPS = 3


def hf_capture(target: Gemma4ForCausalLM, tokens: torch.Tensor) -> tuple[Captured, torch.Tensor]:
    """What the target says of windows [B, T] that are one text each, and its logits [B, T, V]."""
    with torch.no_grad():
        out = target(tokens, output_hidden_states=True, return_shared_kv_states=True)
    batch, length = tokens.shape
    whole = torch.ones_like(tokens)
    captured = Captured(
        tokens=tokens, segments=whole * 0, counted=whole.bool(),
        positions=torch.arange(length).expand(batch, -1),
        embeddings=target.get_input_embeddings()(tokens).detach(),
        hidden=out.hidden_states[-1], kv={k: (v[0], v[1]) for k, v in out.shared_kv_states.items()},
    )  # fmt: skip
    return captured, out.logits


@torch.no_grad()
def hf_round(
    pair: tuple[Gemma4ForCausalLM, Gemma4AssistantForCausalLM], tokens: torch.Tensor, t: int
) -> torch.Tensor:
    """Logits [STEPS, V] of one teacher-forced round with token t pending, on a clean cache of t tokens."""
    target, assistant = pair
    out = target(tokens[:, :t], output_hidden_states=True, return_shared_kv_states=True)
    hidden = out.hidden_states[-1][:, -1:]
    logits = []
    for i in range(STEPS):
        embedding = target.get_input_embeddings()(tokens[:, t + i : t + i + 1])
        step = assistant(
            inputs_embeds=torch.cat((embedding, hidden), -1), position_ids=torch.tensor([[t]]),
            shared_kv_states=dict(out.shared_kv_states), use_cache=False,
        )  # fmt: skip
        hidden = step.last_hidden_state
        logits.append(step.logits[0, 0])
    return torch.stack(logits)


def test_all_positions_at_once_equal_single_rounds(pair: tuple[Path, Path]) -> None:
    target = Gemma4ForCausalLM.from_pretrained(pair[0]).eval()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(pair[1]).eval()
    module, _, _ = load_module(pair[1])
    tokens = torch.randint(3, 96, (1, 30), generator=torch.Generator().manual_seed(1))
    captured, _ = hf_capture(target, tokens)
    anchors = choose_anchors(captured, STEPS, 0, None)
    with torch.no_grad():
        states = module.unroll(captured, anchors, STEPS)
        ours = torch.stack([module.logits(s)[0] for s in states], 1)  # [A, STEPS, V]
    assert anchors.shape[1] == 30 - STEPS - 1
    for row, t in enumerate(anchors[0].tolist()):  # far past the window of 8
        theirs = hf_round((target, assistant), tokens, t)
        torch.testing.assert_close(ours[row], theirs, rtol=0, atol=3e-5)


def test_texts_in_one_window_do_not_see_each_other(pair: tuple[Path, Path]) -> None:
    target = Gemma4ForCausalLM.from_pretrained(pair[0]).eval()
    module, _, _ = load_module(pair[1])
    texts = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(2))
    alone, _ = hf_capture(target, texts)
    packed = Captured(
        tokens=alone.tokens.reshape(1, 24), segments=torch.tensor([[0] * 12 + [1] * 12]),
        counted=torch.ones(1, 24, dtype=torch.bool), positions=alone.positions.reshape(1, 24),
        embeddings=alone.embeddings.reshape(1, 24, -1), hidden=alone.hidden.reshape(1, 24, -1),
        kv={k: tuple(x.transpose(1, 2).reshape(1, 24, *x.shape[1::2]).transpose(1, 2) for x in v)
            for k, v in alone.kv.items()},
    )  # fmt: skip
    one, two = choose_anchors(alone, STEPS, 0, None), choose_anchors(packed, STEPS, 0, None)
    valid = valid_steps(packed, two, STEPS)
    with torch.no_grad():
        apart = module.unroll(alone, one, STEPS)[-1]
        together = module.unroll(packed, two, STEPS)[-1]
    for text in range(2):
        for row, t in enumerate(one[0].tolist()):
            column = t + 12 * text - 1
            torch.testing.assert_close(together[0, column], apart[text, row], rtol=0, atol=1e-5)
            assert valid[0, column].all()
    assert (
        valid.any(-1).sum() == 10 + 8
    )  # anchors 1..10 of a text have a next token; a window ends 2 anchors early


@pytest.mark.parametrize("count", [0, 5])
def test_gradients_are_finite_with_uncounted_anchors(pair: tuple[Path, Path], count: int) -> None:
    target = Gemma4ForCausalLM.from_pretrained(pair[0]).eval()
    module, _, _ = load_module(pair[1])
    captured, _ = hf_capture(
        target, torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(3))
    )
    captured.segments = torch.tensor([[0] * 10 + [1] * 10, [0] * 15 + [-1] * 5])
    anchors = choose_anchors(captured, STEPS, count, torch.Generator().manual_seed(0))
    valid = valid_steps(captured, anchors, STEPS)
    states = module.unroll(captured, anchors, STEPS)
    sum((s[valid[..., i]].square().sum() for i, s in enumerate(states)), torch.zeros(())).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
