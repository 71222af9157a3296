"""The engine's own draft steps against the training forward: the equality that acceptance hangs on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.models.registry import load_assistant
from paceline.train import GemmaAssistant, Text, pack
from paceline.train.methods.gemma_assistant.learning import load_module
from paceline.train.parallel import choose_anchors, valid_steps

STEPS = 3


def engine_round(pair: tuple[Path, Path], tokens: list[int], t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher-forced draft logits [STEPS, V] of the engine's net with token t pending, and the target's
    there.
    """
    target = GemmaAssistant().teacher(pair[0]).target
    net = load_assistant(pair[1], target)
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 8),
        max_sequences=1,
        max_tokens=64,
        dtype=target.dtype,
    )
    cache.open(0, tokens)
    tail = cache.tail([(0, tokens[:t])])
    hidden = target.forward(tail.rows(), cache)[-1:].clone()
    tail.commit([t])
    out = []
    for i in range(STEPS):
        rows = ForwardBatch(
            torch.tensor(tokens[t + i : t + i + 1]), torch.tensor([t], dtype=torch.int32),
            torch.tensor([cache.slot(0)], dtype=torch.int32), [0, 1],
        )  # fmt: skip
        step = net.step(rows, hidden, cache)
        assert step.ids is None
        hidden = step.hidden.clone()
        out.append(step.logits[0].float().clone())
    rest = cache.tail([(0, tokens[t : t + STEPS])])
    return torch.stack(out), target.logits(target.forward(rest.rows(), cache)).clone()


def test_packed_training_equals_the_engine_position_by_position(pair: tuple[Path, Path]) -> None:
    generator = np.random.default_rng(5)
    texts = [generator.integers(3, 96, size=n).tolist() for n in (29, 17, 21)]
    windows = pack((Text(t, ((0, len(t)),)) for t in texts), 50)
    assert len(windows) == 2
    teacher = GemmaAssistant().teacher(pair[0])
    captured = teacher.capture(windows)
    module, _, _ = load_module(pair[1])
    anchors = choose_anchors(captured, STEPS, 0, None)
    valid = valid_steps(captured, anchors, STEPS)
    with torch.no_grad():
        states = [module.logits(s) for s in module.unroll(captured, anchors, STEPS)]
    checked = 0
    for row, columns in enumerate(valid.all(-1)):
        for column in columns.nonzero()[:, 0].tolist()[::4]:
            index = int(anchors[row, column])
            t, number = int(captured.positions[row, index]), int(captured.segments[row, index])
            text = captured.tokens[row][captured.segments[row] == number].tolist()
            drafted, distribution = engine_round(pair, text, t)
            for i in range(STEPS):
                torch.testing.assert_close(states[i][row, column], drafted[i], rtol=0, atol=3e-5)
            ours = teacher.logits(captured.hidden[row, index : index + STEPS])
            torch.testing.assert_close(ours, distribution, rtol=0, atol=3e-5)
            checked += 1
    assert checked >= 12


def test_padding_is_never_a_key(pair: tuple[Path, Path]) -> None:
    windows = pack([Text(list(range(3, 15)), ((0, 12),))], 20)
    captured = GemmaAssistant().teacher(pair[0]).capture(windows)
    assert captured.segments[0].tolist() == [0] * 12 + [-1] * 8
    assert not captured.hidden[0, 12:].any()
    assert captured.positions[0, :12].tolist() == list(range(12))
