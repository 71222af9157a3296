"""A dense target computes what the engine does, writes its own texts, and the Triton kernels are the plain arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import VOCAB
from decoders import build_decoder
from paceline.errors import PairError
from paceline.models.registry import load_target
from paceline.ops.reference import EagerRunner
from paceline.train import Text, pack
from paceline.train.capture import TargetTeacher

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2"
sys.path.append(str(RECIPE))

from dense import DenseTarget  # noqa: E402
from writer import BatchWriter, Manner, Prompt, plain_choose  # noqa: E402

CLOSE, END, LENGTH = (7, 8, 9), 1, 48


def dense_of(folder: Path, name: str, taps: tuple[int, ...] = ()) -> tuple[DenseTarget, TargetTeacher]:
    build_decoder(name, folder)
    target = load_target(folder, runner=EagerRunner(torch.float32))
    target.tap(taps)
    return DenseTarget(target, torch.device("cpu"), torch.float32), TargetTeacher(target)


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "qwen2", "qwen3-biases"])
def test_a_dense_target_captures_what_the_engine_does(name: str, tmp_path: Path) -> None:
    dense, teacher = dense_of(tmp_path, name, (0, 2, 4))
    generator = np.random.default_rng(5)
    windows = pack((Text(generator.integers(3, VOCAB, size=n).tolist(), ((3, n),)) for n in (29, 17, 21)), 50)
    mine, its = dense.capture(windows), teacher.capture(windows)
    filled = its.segments >= 0
    for what in ("tokens", "segments", "counted"):
        assert torch.equal(getattr(mine, what), getattr(its, what))
    for what in ("positions", "embeddings", "hidden", "states"):
        torch.testing.assert_close(
            getattr(mine, what)[filled], getattr(its, what)[filled], atol=2e-4, rtol=1e-4
        )
    some = its.hidden[filled][:9]
    torch.testing.assert_close(dense.logits(some), teacher.logits(some), atol=1e-4, rtol=1e-4)
    dense.narrow(torch.tensor([3, 5, 8]))
    torch.testing.assert_close(dense.narrow_logits(some), dense.logits(some)[:, [3, 5, 8]])


def test_a_dense_target_refuses_what_it_cannot_compute(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="no plain decoder"):
        dense_of(tmp_path, "mistral-window")


def written(dense: DenseTarget, *, temperature: float) -> tuple[BatchWriter, list[tuple[int, Text]]]:
    """Texts of prompts of which every third is answered at once."""
    prompts = [
        Prompt([2, 11, 12, *range(20, 21 + i % 5)], temperature, 0 if i % 3 == 2 else 6 + i % 4, 9 + i % 3)
        for i in range(7)
    ]
    manner = Manner(CLOSE, frozenset({END}), frozenset({END, 30, 31, 32, 33}), (0.9, 0.95), 0.9, LENGTH)
    writer = BatchWriter(dense, prompts, manner, (3, 40), seed=4)
    writer.start()
    while writer.counts[0] < 20:
        writer.run(1)
    return writer, writer.texts()


def test_texts_are_prompt_question_turn_and_answer(tmp_path: Path) -> None:
    dense, _ = dense_of(tmp_path, "llama3")
    writer, texts = written(dense, temperature=0.0)
    assert writer.shared == 4
    assert {i for i, _ in texts} == set(range(7))
    for number, text in texts:
        prompt, tokens = writer.prompts[number], list(text.tokens)
        assert tokens[: len(prompt.tokens)] == list(prompt.tokens)
        assert len(tokens) <= LENGTH
        begin, end = text.counted[-1]
        assert end == len(tokens)
        assert end - begin <= prompt.answer
        assert END not in tokens[begin : end - 1]
        assert tokens[-1] == END or end - begin == prompt.answer
        if prompt.question:
            stop = begin - len(CLOSE)
            assert tuple(tokens[stop:begin]) == CLOSE
            assert stop - len(prompt.tokens) <= prompt.question
            assert not {END, 30, 31, 32, 33} & {*tokens[len(prompt.tokens) : stop]}
        else:
            assert begin == len(prompt.tokens)
        # what was written with a cache, beside other texts, is what the whole text gives
        captured = dense.capture(pack([text], LENGTH))
        best = dense.logits(captured.hidden[0]).argmax(-1).tolist()
        assert tokens[begin:end] == best[begin - 1 : end - 1]
    assert writer.counts[1] >= sum(b - a for _, t in texts for a, b in t.counted)


def test_plain_choice_keeps_to_top_p_and_temperature_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).repeat(600, 1)
    temperatures = torch.full((600,), 0.8)
    temperatures[:100] = 0.0
    drawn = plain_choose(logits, temperatures, torch.full((600,), 0.9), torch.tensor([3]))
    assert set(drawn[:100].tolist()) == {1}
    assert set(drawn[100:].tolist()) == {1, 2}
    share = torch.softmax(torch.tensor([3.0, 2.0]) / 0.8, 0)[0]
    assert abs(float((drawn[100:] == 1).float().mean()) - float(share)) < 0.06


def test_triton_kernels_are_the_plain_arithmetic() -> None:
    """In a process of its own: Triton's interpreter is chosen when its kernels are made."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("triton_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
