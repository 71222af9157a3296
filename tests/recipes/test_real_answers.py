"""What rounding of activations changes: how it is counted, and that the emulation rounds as the kernels do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gguf_files import gguf_name, interleaved, state_of, write_gguf
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.ops import native
from weights.test_gguf_models import SIZES, fields_of

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "real"


@pytest.fixture(scope="module")
def recipes() -> Iterator[tuple[ModuleType, ModuleType]]:
    """`answers` and `rounding`"""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        import answers
        import rounding

        yield answers, rounding


def run(patch: pytest.MonkeyPatch, recipe: ModuleType, *options: str) -> None:
    patch.setattr("sys.argv", [recipe.__name__, *options])
    recipe.main()


def test_there_are_a_hundred_short_questions(recipes: tuple[ModuleType, ModuleType]) -> None:
    questions = recipes[0].QUESTIONS
    assert len(set(questions)) == len(questions) == 100
    assert max(map(len, questions)) < 80


def test_divergence_is_kl_and_what_is_not_told_counts_as_one_token(
    recipes: tuple[ModuleType, ModuleType],
) -> None:
    answers, _ = recipes
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.2, 0.3, 0.1]).double()
    whole = answers.Position([0, 2, 1, 3], q[[0, 2, 1, 3]].log().tolist())
    assert answers.divergence(p.log(), whole) == pytest.approx(float((p * (p / q).log()).sum()))
    some = answers.Position([0, 2], q[[0, 2]].log().tolist())
    coarse = 0.5 * np.log(0.5 / 0.4) + 0.15 * np.log(0.15 / 0.3) + 0.35 * np.log(0.35 / 0.3)
    assert answers.divergence(p.log(), some) == pytest.approx(coarse)
    assert answers.divergence(p.log(), answers.Position([0, 1, 2, 3], p.log().tolist())) == 0


def test_the_first_position_with_another_likeliest_token_is_where_answers_part(
    recipes: tuple[ModuleType, ModuleType],
) -> None:
    answers, _ = recipes
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.5], [0.0, 0.0, 4.0]])
    equal = answers.compare(logits, [0, 1, 2], answers.likeliest(logits))
    assert (equal["at"], equal["gap"], equal["differ"]) == (None, None, 0)
    other = logits.clone()
    other[1] = torch.tensor([0.0, 1.5, 2.0])
    parted = answers.compare(logits, [0, 1, 2], answers.likeliest(other))
    assert (parted["at"], parted["gap"], parted["differ"]) == (1, pytest.approx(0.5), 1)
    assert [kl > 0 for kl in parted["kl"]] == [False, True, False]


def test_llama_cpp_begins_again_behind_a_token_that_it_would_not_write(
    recipes: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, _ = recipes
    asked: list[tuple[list[int], int]] = []

    def write(self: object, prompt: list[int], tokens: int) -> list[Any]:
        asked.append((prompt, tokens))  # it would write 7 behind 5 tokens, else what the text has
        would = {2: 10, 3: 11, 4: 12, 5: 7, 6: 14}
        return [answers.Position([would[len(prompt) + i]], [0.0]) for i in range(tokens)]

    monkeypatch.setattr(answers.Llama, "_write", write)
    text = answers.Text([1, 2], [10, 11, 12, 13, 14])
    (told,) = object.__new__(answers.Llama).read([text])
    assert [each.ids[0] for each in told] == [10, 11, 12, 7, 14]
    assert asked == [([1, 2], 5), ([1, 2, 10, 11, 12, 13], 1)]


def test_a_run_goes_on_where_it_stopped_and_is_reported(
    recipes: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    answers, _ = recipes
    out = tmp_path / "answers.json"
    options = ("demo", "--out", str(out), "--tokens", "5", "--threads", "1")
    run(monkeypatch, answers, *options, "--questions", "3")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3
    assert all(1 <= len(row["ids"]) == len(row["paceline"]["kl"]) <= 5 for row in rows)
    run(monkeypatch, answers, *options, "--questions", "4")
    again = json.loads(out.read_text())["rows"]
    assert again[:3] == rows
    assert len(again) == 4
    capsys.readouterr()
    run(monkeypatch, answers, "--report", str(out))
    assert "| paceline | " in (line := capsys.readouterr().out.splitlines()[-1])
    assert f"{answers.count_equal(again, 'paceline')} of 4" in line


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers as Q4_1, its table as Q8_0."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tensors = {}
    for name, value in state_of(model).items():
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        if "q_proj" in name or "k_proj" in name:
            value = interleaved(value, heads)
        if name != "lm_head.weight":
            tensors[gguf_name(name)] = np.ascontiguousarray(value)
    kinds = gguf.GGMLQuantizationType

    def kind_of(name: str, data: np.ndarray) -> gguf.GGMLQuantizationType:
        if data.ndim == 1:
            return kinds.F32
        return kinds.Q8_0 if "token_embd" in name else kinds.Q4_1

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, "llama", fields_of(model.config), tensors, kind_of)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_the_emulation_rounds_as_the_kernels_do(
    file: Path, recipes: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, rounding = recipes
    monkeypatch.setattr(answers, "PAGES", 16)
    checkpoint = GgufCheckpoint(file)
    rule = rounding.Rounding({n.removesuffix(".weight"): checkpoint.kind(n) for n in checkpoint.pieces})
    emulated = answers.Paceline(file, rounding.RoundingRunner(rule), rule.note)
    text = answers.Text(torch.randint(3, 96, (20,)).tolist(), torch.randint(3, 96, (12,)).tolist())
    exact, rounded = (
        answers.Paceline(file, answers.runner_of(1, exact)[0]).logits([text])[0] for exact in (True, False)
    )
    assert rule.layers == 2

    def off(scheme: Any, right: torch.Tensor) -> float:
        rule.scheme = scheme
        return float((emulated.logits([text])[0] - right).abs().mean())

    rule_of_kernels = float((rounded - exact).abs().mean())
    assert off(None, exact) < 1e-3 * rule_of_kernels
    assert off(rounding.Scheme(), rounded) < 0.05 * rule_of_kernels
    everything = rounding.SCHEMES["all 16 bits"]
    assert off(everything, exact) < 0.1 * rule_of_kernels
    assert off(rounding.Scheme(part=32), exact) > rule_of_kernels


def test_a_scale_of_least_error_is_never_worse(recipes: tuple[ModuleType, ModuleType]) -> None:
    _, rounding = recipes
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    plain, searched = (rounding.rounded(x, 16, 7.0, search) for search in (False, True))
    errors = [(y - x).view(-1, 16).square().sum(1) for y in (plain, searched)]
    assert bool((errors[1] <= errors[0] + 1e-6).all())
    assert bool((errors[1] < errors[0] * 0.9).any())
    assert torch.equal(rounding.rounded(torch.zeros(1, 16), 16, 127.0), torch.zeros(1, 16))
