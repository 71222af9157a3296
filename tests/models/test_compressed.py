"""Checkpoints of compressed-tensors: symmetric int4 runs as it is; other kinds: test_quantized_folders.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_target
from layouts import edit, write
from paceline import LLM, SamplingParams
from paceline.convert.quantized import save_quantized
from paceline.errors import LoadError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.inspection import inspect
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner, dequantize

SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32}
IGNORED = ("router", "per_layer", "layers.1.mlp.down_proj", "embed_tokens")
CONFIG = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["re:.*router.*", "re:.*per_layer.*", "model.layers.1.mlp.down_proj", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None,
        "dynamic": False,
    }}},
}  # fmt: skip


def pack(values: torch.Tensor) -> torch.Tensor:
    """int [out, in] of -8..7 -> int32 [out, in / 8], as compressed-tensors' pack_to_int32 of 4 bits."""
    words = (values.long() + 8).view(values.shape[0], -1, 8) << torch.arange(0, 32, 4)
    return words.sum(-1).to(torch.int32)  # modulo 2^32


def compress(folder: Path, ignored: tuple[str, ...] = IGNORED, **group: Any) -> dict[str, torch.Tensor]:
    """Pack the matrices of a folder of float32; returns them dequantized with plain torch, under their stored names."""
    generator = torch.Generator().manual_seed(7)
    file = folder / "model.safetensors"
    out, plain = {}, {}
    for name, data in _experts_apart(load_file(file)).items():
        wanted = data.dim() == 2 and name.endswith(".weight") and not any(part in name for part in ignored)
        if not wanted:
            out[name] = data
            continue
        q = torch.randint(-8, 8, data.shape, generator=generator)
        scale = (torch.rand(len(data), data.shape[1] // 32, generator=generator) * 0.06 + 0.01).bfloat16()
        at = name.removesuffix(".weight")
        out |= {f"{at}.weight_packed": pack(q), f"{at}.weight_scale": scale}
        out[f"{at}.weight_shape"] = torch.tensor(data.shape)
        plain[name] = (q.view(len(q), -1, 32) * scale.float()[..., None]).flatten(1)
    save_file(out, file, metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config=CONFIG)
    return plain


def _experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantizers unroll the stacks of experts into matrices of their own."""
    out = {}
    for name, data in tensors.items():
        at, _, stack = name.rpartition(".")
        if not at.endswith(".experts"):
            out[name] = data
            continue
        parts = {"down_proj": data}
        if stack == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), data.chunk(2, 1)))
        out |= {
            f"{at}.{e}.{part}.weight": one.clone()
            for part, some in parts.items()
            for e, one in enumerate(some)
        }
    return out


def widened(folder: Path, packed: Path, plain: dict[str, torch.Tensor]) -> Path:
    """The same model in float32: what was packed is stored dequantized."""
    tensors = {n: t for n, t in load_file(packed / "model.safetensors").items() if "weight_" not in n}
    write(folder / "config.json", json.loads((packed / "config.json").read_text()))
    edit(folder / "config.json", quantization_config=...)
    save_file(tensors | plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder: Path, runner: Runner) -> torch.Tensor:
    target = load_target(folder, runner=runner)
    text = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(3)).tolist()
    pages = dict.fromkeys(target.layout.kinds, 20)
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=64, dtype=target.kv_dtype)
    cache.open(0, text, share=False)
    with cache.tail([(0, text)]) as tail:
        found = target.logits(target.forward(tail.rows(), cache)).clone()
        tail.commit([len(text)])
    return found


@pytest.mark.parametrize("family", ["e2b", "12b", "26b"])
def test_values_are_those_of_a_plain_dequantization(family: str, tmp_path: Path) -> None:
    build_target(family, tmp_path, **SIZES)
    plain = compress(tmp_path)
    seen: dict[str, Any] = {}

    def look(name: str, weight: Any) -> Any:
        seen[name] = weight
        return weight

    load_target(tmp_path, transform=look)
    kinds = {name: weight.kind for name, weight in seen.items()}
    assert kinds["layers.1.mlp.down_proj"] == kinds["embed_tokens"] == "float32", "on the ignore list"
    for stored, want in plain.items():
        name = stored.split("language_model.")[-1].removeprefix("model.").removesuffix(".weight")
        if ".experts." in name:
            at, expert, part = name.rsplit(".", 2)
            both = part in ("gate_proj", "up_proj")
            weight = seen[f"{at}.{'gate_up_proj' if both else part}.{expert}"]
            rows = slice(len(want), None) if part == "up_proj" else slice(len(want))
        elif name not in seen:
            continue  # K/V of layers that share another's
        else:
            weight, rows = seen[name], slice(None)
        assert weight.kind == "int4"
        assert torch.equal(dequantize(weight, None, torch.float32)[rows], want), name


@pytest.mark.parametrize("name", ["eager", "native"])
@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_logits_are_those_of_the_widened_model(family: str, name: str, tmp_path: Path) -> None:
    """With the embedding packed, too."""
    if name == "native" and not native.available():
        pytest.skip(str(native.why_not()))
    packed = tmp_path / "packed"
    build_target(family, packed, **SIZES)
    whole = widened(tmp_path / "whole", packed, compress(packed, ("router", "per_layer")))
    runners: tuple[Runner, Runner] = (EagerRunner(), EagerRunner())
    if name == "native":
        runners = (native.NativeRunner(2, exact=True), native.NativeRunner(2, exact=True))
    want = logits(whole, runners[0])
    assert want.std() > 1
    assert (logits(packed, runners[1]) - want).abs().max() < 2e-4 * want.abs().max()


def test_it_generates_the_same_text_with_any_drafter(tmp_path: Path) -> None:
    """End to end: the text is that of the widened model, with drafts and without."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    packed = tmp_path / "packed"
    build_target("e2b", packed, **SIZES)
    whole = widened(tmp_path / "whole", packed, compress(packed))
    letters = {chr(ord("0") + i): i for i in range(VOCAB)}
    for folder in (packed, whole):
        Tokenizer(WordLevel(letters, unk_token="0")).save(str(folder / "tokenizer.json"))
    texts = []
    for folder, drafter in ((packed, "none"), (packed, "ngram"), (whole, "none")):
        sampling = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        (one,) = LLM(str(folder), drafter=drafter, activations="float32").generate(["ABCABCABCABC"], sampling)
        texts.append(list(one.token_ids))
    assert len(texts[0]) == 32
    assert texts[0] == texts[1] == texts[2]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "scales of other rows": ({"weight_scale": torch.ones(32, 2)}, "do not fit together (4 bits;"),
    "groups that do not divide": ({"weight_scale": torch.ones(64, 3)}, "do not fit together (4 bits;"),
    "words of another width": ({"weight_packed": torch.zeros(64, 7, dtype=torch.int32)}, "do not fit together ("),
    "floats": ({"weight_packed": torch.zeros(64, 32, dtype=torch.float64)}, "does not describe"),
    "zero points": ({"weight_zero_point": torch.zeros(7, 2, dtype=torch.int32)}, "do not fit together (zero points;"),
    "g_idx": ({"weight_g_idx": torch.zeros(63, dtype=torch.int32)}, "do not fit together (g_idx;"),
    "no scale": ({"weight_scale": None}, "does not describe"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_together_is_refused(case: str, tmp_path: Path) -> None:
    tensors, words = CASES[case]
    build_target("dense", tmp_path, **SIZES)
    compress(tmp_path)
    file, at = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(file)
    for end, value in tensors.items():
        stored.pop(f"{at}.{end}", None)
        stored |= {} if value is None else {f"{at}.{end}": value}
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError) as caught:
        load_target(tmp_path)
    assert words in str(caught.value) or "are not supported: use" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert inspect(tmp_path).unsupported == [str(caught.value)]


def test_scales_that_an_order_left_in_place_are_read(tmp_path: Path) -> None:
    """actorder `weight` quantizes in another order and stores in this one."""
    build_target("dense", tmp_path, **SIZES)
    compress(tmp_path)
    said = json.loads(json.dumps(CONFIG))
    said["config_groups"]["group_0"]["weights"]["actorder"] = "weight"
    edit(tmp_path / "config.json", quantization_config=said)
    assert inspect(tmp_path).unsupported == []
    load_target(tmp_path)


def test_what_info_counts(tmp_path: Path) -> None:
    """Parameters are those of the model, bytes those of the file."""
    build_target("dense", tmp_path, **SIZES)
    before = inspect(tmp_path)
    compress(tmp_path)
    after = inspect(tmp_path)
    assert after.unsupported == []
    assert after.parameters == before.parameters
    entries = load_file(tmp_path / "model.safetensors")
    assert after.weight_bytes == sum(t.nbytes for n, t in entries.items() if not n.endswith("_shape"))


def test_what_cannot_be_done_with_it(tmp_path: Path) -> None:
    build_target("dense", tmp_path / "packed", **SIZES)
    compress(tmp_path / "packed")
    with pytest.raises(
        UsageError, match=r"quantized already \(compressed-tensors, 4 bits, groups of 32; kept as int4\)"
    ):
        save_quantized(tmp_path / "packed", tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()
    from paceline.ops.quantize import quantizer

    with pytest.raises((UsageError, LoadError), match="stored as int4 already"):
        load_target(tmp_path / "packed", transform=quantizer("int8"))
