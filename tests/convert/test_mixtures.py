"""`convert --to q4_k_m` and the like: which type each tensor gets, how close the blocks come, and that the file runs."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import paceline
from convert.test_convert import PROMPT, decoder
from paceline.checkpoints.gguf.reader import Gguf
from paceline.convert.kquants import QUANTIZERS, quantize
from paceline.convert.mixtures import MIXTURES, Shape, kind_for
from paceline.convert.to_gguf import Stored, encoded, write_gguf
from paceline.errors import UsageError
from paceline.models.inspection import inspect
from paceline.ops.blocks import BY_NAME, dequantize


def values(seed: int = 0) -> torch.Tensor:
    """As weights are: a normal distribution, with columns that stand out."""
    x = torch.randn(48, 1024, generator=torch.Generator().manual_seed(seed)) * 0.03
    x[:, ::97] *= 6
    x[5, 256:512] = 0
    return x


def error(kind: str, x: torch.Tensor, packed: np.ndarray) -> float:
    found = torch.from_numpy(dequantize(kind.upper(), packed))
    return float((found - x).norm() / x.norm())


# Of the same bits, types that llama.cpp's own package quantizes; a K type has a scale of its own for fewer values.
SIMPLER = {"q4_k": "Q4_1", "q5_k": "Q5_1"}
MOST = {
    "q2_k": 0.35,
    "q3_k": 0.19,
    "q4_k": 0.09,
    "q5_k": 0.046,
    "q6_k": 0.024,
}  # of the size of what is stored


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_blocks_come_close(kind: str) -> None:
    x = values()
    packed = quantize(kind, x)
    assert packed.shape == (48, 1024 // 256 * BY_NAME[kind.upper()].size)
    off = error(kind, x, packed.numpy())
    assert off < MOST[kind]
    if kind in SIMPLER:
        theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[SIMPLER[kind]])
        assert off < error(SIMPLER[kind], x, theirs)
    assert (dequantize(kind.upper(), packed.numpy())[5, 256:512] == 0).all(), "zeros stay zeros"


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_what_a_type_holds_exactly_is_found_again(kind: str) -> None:
    """Values that are one block's already: every bit of the layout is where it is read."""
    layout, rng = BY_NAME[kind.upper()], np.random.default_rng(4)
    blocks = rng.integers(0, 256, (200, layout.size), dtype=np.uint8)
    for at in {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}[kind]:
        halves = rng.uniform(0.001, 0.002, 200).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(200, 2)
    x = torch.from_numpy(dequantize(kind.upper(), blocks))
    assert error(kind, x, quantize(kind, x).numpy()) < MOST[kind] / 2


@pytest.mark.parametrize("value", [1e7, float("nan"), float("inf")])
def test_values_that_no_scale_holds_are_refused(value: float) -> None:
    one = Stored("blk.0.ffn_up.weight", "layers.0.mlp.up_proj.weight", (1, 256), "q4_k")
    with pytest.raises(
        UsageError, match=r"layers.0.mlp.up_proj.weight has values past 1e\+06, or no numbers: give --to"
    ):
        encoded(torch.full((1, 256), value), one)
    held = encoded(torch.full((1, 256), 1e6), one)
    assert np.isfinite(dequantize("Q4_K", held)).all()


# What `llama-quantize` makes of a Llama with 32 layers, 32 heads and 8 K/V heads: (layer, tensor) -> type, by mixture
RULES: dict[str, str] = {
    "q4_k_m": "0.attn_v=q6_k 4.attn_v=q4_k 6.attn_v=q6_k 31.attn_v=q6_k 0.ffn_down=q6_k 5.ffn_down=q4_k 28.ffn_down=q6_k "
              "0.attn_q=q4_k 0.ffn_up=q4_k output=q6_k token_embd=q4_k 9.attn_output=q4_k 0.attn_qkv=q5_k",
    "q4_k_s": "0.attn_v=q5_k 4.attn_v=q4_k 3.ffn_down=q5_k 4.ffn_down=q4_k output=q6_k",
    "q5_k_m": "0.attn_v=q6_k 5.attn_v=q5_k 6.ffn_down=q6_k 0.ffn_gate=q5_k",
    "q5_k_s": "0.attn_v=q5_k 0.ffn_down=q5_k output=q6_k",
    "q3_k_m": "0.attn_v=q5_k 2.attn_v=q4_k 1.ffn_down=q5_k 2.ffn_down=q4_k 7.attn_output=q4_k 7.attn_q=q3_k",
    "q3_k_l": "9.attn_v=q5_k 9.ffn_down=q5_k 9.attn_output=q5_k",
    "q3_k_s": "9.attn_v=q3_k 9.ffn_down=q3_k",
    "q2_k": "9.attn_v=q4_k 9.ffn_down=q3_k 9.attn_output=q3_k 9.attn_k=q2_k output=q6_k",
    "q6_k": "0.attn_v=q6_k token_embd=q6_k output=q6_k",
}  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES)
def test_types_are_those_of_llama_quantize(mixture: str) -> None:
    for rule in RULES[mixture].split():
        name, kind = rule.split("=")
        name = f"blk.{name}.weight" if name[0].isdigit() else f"{name}.weight"
        assert kind_for(name, 4096, mixture, Shape(32, 4)) == kind, name


def test_rows_of_no_whole_block_get_a_smaller_one() -> None:
    shape = Shape(32, 4, tied=True)
    assert kind_for("blk.5.ffn_up.weight", 320, "q4_k_m", shape) == "q5_0"
    assert kind_for("token_embd.weight", 320, "q4_k_m", shape) == "q8_0"
    assert kind_for("blk.5.ffn_up.weight", 320, "q2_k", shape) == "q4_0"
    assert kind_for("blk.5.ffn_up.weight", 40, "q4_k_m", shape) == "f16"
    assert kind_for("token_embd.weight", 512, "q4_k_m", shape) == "q6_k", "it is the head"
    assert kind_for("blk.0.attn_v.weight", 512, "q4_k_m", Shape(32, 4, experts=8)) == "q8_0"


LARGE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("mixture", ["q4_k_m", "q2_k"])
def test_a_file_is_named_and_runs(mixture: str, tmp_path: Path) -> None:
    """The tensors have the types that the header announces, `info` names the mixture, and drafts change no token."""
    file = tmp_path / "m.gguf"
    decoder("llama", tmp_path / "hf", **LARGE)
    written = write_gguf(tmp_path / "hf", file, mixture)
    assert not written.notes
    model = Gguf(file)
    for name, tensor in model.tensors.items():
        want = (
            "F32"
            if len(tensor.shape) == 1
            else kind_for(name, tensor.shape[-1], mixture, Shape(4, 4)).upper()
        )
        assert tensor.kind == want, name
    said = inspect(file).quantized
    assert said is not None
    assert said.startswith(f"GGUF {mixture.upper()}, ")
    texts = []
    for drafter in ("ngram", "none"):
        with paceline.LLM(str(file), drafter=drafter, max_model_len=96, profile_dir="none") as llm:
            sampling = paceline.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            texts.append(llm.generate([PROMPT * 3], sampling)[0].token_ids)
    assert texts[0] == texts[1]


def test_gemmas_are_written_so_too(tmp_path: Path) -> None:
    from convert.test_convert import gemma

    gemma("31b", tmp_path / "hf", hidden_size=256)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "q4_k_m")
    kinds = {tensor.kind for tensor in Gguf(tmp_path / "m.gguf").tensors.values()}
    assert {"F32", "Q4_K", "Q6_K"} <= kinds
    assert inspect(tmp_path / "m.gguf").unsupported == []
