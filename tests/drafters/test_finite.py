"""A drafter whose file holds NaN or infinity is refused when it is loaded, in one line that says what to do."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_assistant, build_target
from decoders import build_decoder
from dflash_files import build_dflash
from eagle3_files import build_eagle3
from mtp_files import build_mtp
from paceline.cli import main
from paceline.convert.quantized import save_quantized

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """A target and its drafter, by the drafter's kind."""
    at = tmp_path_factory.mktemp("pairs")
    build_decoder("llama", at / "llama")
    build_target("e2b", at / "gemma")
    shutil.copyfile(at / "llama" / "tokenizer.json", at / "gemma" / "tokenizer.json")
    build_assistant("e2b", at / "assistant")
    save_quantized(at / "assistant", at / "assistant-int8", "int8")
    mtp = build_mtp(at / "llama", at / "mtp")
    return {
        "eagle3": (at / "llama", build_eagle3(at / "eagle3", hidden=48, vocab=VOCAB)),
        "dflash": (at / "llama", build_dflash(at / "dflash", hidden=48, vocab=VOCAB)),
        "mtp": (mtp, mtp),
        "assistant": (at / "gemma", at / "assistant"),
        "assistant-int8": (at / "gemma", at / "assistant-int8"),
    }


@pytest.mark.parametrize(("kind", "ending", "value", "options"), [
    ("eagle3", "mlp.up_proj.weight", math.nan, ["--quantize-drafter", "none"]),
    ("eagle3", "mlp.up_proj.weight", math.inf, []),  # made int8 while it is loaded
    ("dflash", "hidden_norm.weight", -math.inf, []),
    ("mtp", "eh_proj.weight", math.nan, []),
    ("assistant", "mlp.up_proj.weight", math.inf, []),
    ("assistant-int8", "mlp.up_proj.weight_scale", math.nan, []),
])  # fmt: skip
def test_weights_that_are_not_finite_are_refused_by_name(
    kind: str, ending: str, value: float, options: list[str], made: dict[str, Pair], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target, drafter = made[kind]
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for file in drafter.iterdir():
        (spoilt / file.name).symlink_to(file)
    path = next(file for file in spoilt.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in reversed(tensors) if name.endswith(ending))
    tensors[name] = tensors[name].to(torch.bfloat16 if tensors[name].ndim > 1 else torch.float32)
    tensors[name].view(-1)[3] = value
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    target = spoilt if kind == "mtp" else target
    given = ["mtp"] if kind == "mtp" else [str(spoilt)]
    for command in (["run", str(target), "0"], ["check", str(target), "--quick"])[
        : 2 if kind == "dflash" else 1
    ]:
        monkeypatch.setattr(
            "sys.argv", ["paceline", *command, "--drafter", *given, "--max-model-len", "64", *options]
        )
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 3
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "are not finite" in line]
        assert str(spoilt) in line
        assert ending.removesuffix("_scale").removesuffix(".weight") in line
        assert "download or train it again, or use the drafter ngram" in line
