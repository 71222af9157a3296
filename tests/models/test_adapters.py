"""Adapters by request beside real weights: two and none in one batch, what they add, and those that cannot be chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoints import build_target
from decoders import build_decoder
from gguf_files import gguf_name, interleaved
from paceline import LLM, Completion, SamplingParams
from paceline.convert.to_gguf import write_gguf
from paceline.core import AdapterRows, Blend
from paceline.errors import LoadError, UsageError
from paceline.hub.resolve import bundled
from paceline.kv.cache import KVCache
from paceline.models.adapter import load_adapter
from paceline.models.adapters import AdapterBank
from paceline.models.registry import load_target
from paceline.ops.native import NativeRunner
from paceline.ops.reference import EagerRunner

RANK, ALPHA = 4, 8.0
Tensors = dict[str, torch.Tensor]
PROMPT = "Once upon a time there was"


def low_rank(shapes: Mapping[str, tuple[int, int]], seed: int, size: float = 0.2) -> Tensors:
    """lora_A and lora_B of each matrix [out, in]."""
    g = torch.Generator().manual_seed(seed)
    made: Tensors = {}
    for name, (out, inside) in shapes.items():
        made[f"{name}.lora_A"] = torch.randn(RANK, inside, generator=g) * size
        made[f"{name}.lora_B"] = torch.randn(out, RANK, generator=g) * size
    return made


def write_peft(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {f"base_model.model.model.{name}.weight": data for name, data in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def write_gguf_adapter(path: Path, tensors: Tensors, heads: Mapping[str, int], **keys: Any) -> Path:
    """As convert_lora_to_gguf writes one for `llama`, which turns the rows of q and k."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", keys.get("general_type", "adapter"))
    writer.add_string("adapter.type", keys.get("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", keys.get("alpha", ALPHA))
    for name, data in tensors.items():
        module, _, part = name.rpartition(".lora_")
        array = data.numpy()
        if part == "B" and (count := heads.get(module.rpartition(".")[2])):
            array = interleaved(array, count)
        stored = keys.get("rename", gguf_name)(f"{module}.weight")
        writer.add_tensor(f"{stored}.lora_{part.lower()}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "llama"
    build_decoder("llama", folder)
    return folder


def shapes_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Of all matrices of the layers."""
    from paceline.models.config import parse_target, read_config
    from paceline.models.families import spec_of

    config = parse_target(read_config(folder))
    found = spec_of(config.model_type).shapes(config)
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in found.items()
        if name.startswith("layers.") and name.endswith(".weight") and len(shape) == 2
    }


def hidden(target: Any, blends: list[Blend] | None = None) -> torch.Tensor:
    """Of a text of five tokens for each of `blends`, side by side; None: of one, in a step without adapters."""
    texts = [(i, [2, 3, 4, 5, 6]) for i in range(len(blends or [()]))]
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 8),
        max_sequences=4,
        max_tokens=32,
        dtype=target.kv_dtype,
    )
    for i, tokens in texts:
        cache.open(i, tokens, share=False)
    with cache.tail(texts) as tail:
        rows = tail.rows()
        rows.adapters = None if blends is None else AdapterRows(rows.starts, blends)
        out = target.forward(rows, cache).clone()
        tail.commit([5] * len(texts))
    return torch.as_tensor(out)


@pytest.mark.parametrize("form", ["peft", "gguf"])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_what_is_added_is_what_merging_adds(llama: Path, tmp_path: Path, native: bool, form: str) -> None:
    """Of every matrix of the layers, in either form of file, by each runner; a row without an adapter keeps its bits."""
    tensors = low_rank(shapes_of(llama), 1)
    raw = json.loads((llama / "config.json").read_text())
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    folder = write_peft(tmp_path / "peft", tensors)
    path = folder if form == "peft" else write_gguf_adapter(tmp_path / "a.gguf", tensors, heads)

    def runner() -> Any:
        return NativeRunner(1) if native else EagerRunner()

    bank = AdapterBank.of([("none", load_adapter(folder, llama)), ("a", load_adapter(path, llama))])
    one = load_target(llama, runner=runner(), adapters=bank)
    merged = hidden(load_target(llama, runner=runner(), transform=load_adapter(folder, llama)))
    plain = hidden(load_target(llama, runner=runner()))
    both = hidden(one, [((1, 1.0),), (), ((1, 0.0),), ((0, 0.5), (1, 0.5))])
    torch.testing.assert_close(both[:5], merged, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both[15:], merged, atol=1e-5, rtol=1e-4)
    assert (merged - plain).abs().max() > 0.1
    if native:
        assert torch.equal(both[5:10], plain)
    else:
        torch.testing.assert_close(both[5:10], plain, atol=1e-5, rtol=1e-4)
    assert torch.equal(hidden(one), plain), "a step without adapters is that of a target without them"


KINDS = ["qwen2", "qwen3_5", "qwen3_next", "phi3", "gemma3", "glm4", "granite", "lfm2", "olmo2", "smollm3", "gpt-oss",
         "deepseek", "deepseek-odd", "qwen2-moe", "exaone4", "glm4-moe", "ministral3"]  # fmt: skip
APART = (".mlp.gate", ".kv_b_proj", ".router.proj")  # of experts, and what latent attention takes apart


@pytest.mark.parametrize("family", [*KINDS, "e2b", "26b"])
def test_every_matrix_of_a_family(family: str, tmp_path: Path) -> None:
    """Also those that are stored fused, or in another order than they are computed in."""
    (build_decoder if family in KINDS else build_target)(family, tmp_path / "base")
    shapes = {name: shape for name, shape in shapes_of(tmp_path / "base").items() if not name.endswith(APART)}
    assert len(shapes) > 10
    folder = write_peft(tmp_path / "a", low_rank(shapes, 1, 0.1))
    adapter, made = load_adapter(folder, tmp_path / "base"), {"dtype": torch.float64}
    bank = AdapterBank.of([("a", adapter)])
    got = hidden(load_target(tmp_path / "base", adapters=bank, **made), [((0, 1.0),), ()])  # type: ignore[arg-type]
    merged = hidden(load_target(tmp_path / "base", transform=adapter, **made))  # type: ignore[arg-type]
    torch.testing.assert_close(got[:5], merged, atol=1e-5, rtol=1e-5)
    assert (got[:5] - got[5:]).abs().max() > 0.01


def demo_adapters(folder: Path) -> dict[str, Path]:
    shapes = {
        f"layers.{i}.mlp.{n}": s
        for i in range(6)
        for n, s in (("down_proj", (256, 512)), ("up_proj", (512, 256)))
    }
    return {
        name: write_peft(folder / name, low_rank(shapes, seed, 0.3), **changes)
        for name, seed, changes in (("a", 1, {}), ("b", 2, {"use_rslora": True}))
    }


def written(llm: LLM, asked: list[Any], temperature: float = 0.0) -> list[list[int]]:
    params = [SamplingParams(max_tokens=24, seed=5, temperature=temperature, lora=one) for one in asked]
    return [done.token_ids for done in llm.generate([PROMPT] * len(asked), params)]


def test_two_and_none_in_one_batch_are_each_alone_merged(tmp_path: Path) -> None:
    """With the bundled pair: its MTP drafter drafts for the base model."""
    made = demo_adapters(tmp_path)
    with LLM("demo", adapters=made, dtype="float32", profile_dir=None) as llm:
        together = [written(llm, ["a", (), "b"], temperature) for temperature in (0.0, 0.8)]
        (done,) = llm.generate(PROMPT, SamplingParams(max_tokens=24, lora="a", drafter="mtp", draft_tokens=3))
        assert isinstance(done, Completion)
        assert done.stats.drafted > 0
        assert done.token_ids == together[0][0]
        about = llm.engine.info["adapters"]["b"]
        assert about == {"path": str(made["b"]), "ranks": [RANK], "bytes": 4 * RANK * 12 * (256 + 512)}
    for i, path in enumerate((made["a"], None, made["b"])):
        with LLM("demo", adapter=path, dtype="float32", drafter="none", profile_dir=None) as alone:
            for texts, temperature in zip(together, (0.0, 0.8)):
                assert len({tuple(one) for one in texts}) == 3
                assert written(alone, [()], temperature) == [texts[i]]


def test_beside_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    """The blocks stay as they are in the file; merging makes float32 of them."""
    base = tmp_path / "target.gguf"
    write_gguf(bundled("target"), base, "q4_0")
    folder = demo_adapters(tmp_path)["a"]
    adapter = load_adapter(folder, base)
    one = load_target(base, runner=NativeRunner(1, True), adapters=AdapterBank.of([("a", adapter)]))
    assert one.layers[0].gate.kind == "q4_0"  # type: ignore[attr-defined]
    merged = hidden(load_target(base, runner=NativeRunner(1, True), transform=adapter))
    got = hidden(one, [((0, 1.0),), ()])
    torch.testing.assert_close(got[:5], merged, atol=2e-3, rtol=2e-3)
    assert (got[:5] - got[5:]).abs().max() > 0.1


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_beside_quantized_weights(tmp_path: Path, quantize: Any) -> None:
    made = demo_adapters(tmp_path)
    with LLM("demo", adapters=made, quantize=quantize, drafter="ngram", profile_dir=None) as llm:
        together = written(llm, ["a", (), "b"])
        assert [written(llm, [one])[0] for one in ("a", (), "b")] == together
    with LLM("demo", quantize=quantize, drafter="ngram", profile_dir=None) as plain:
        assert written(plain, [()]) == [together[1]] != [together[0]]


def refused(target: Path, path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_target(target, adapters=AdapterBank.of([("x", load_adapter(path, target))]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_adapters_that_no_request_can_choose(llama: Path, tmp_path: Path) -> None:
    shapes = shapes_of(llama)
    name, (out, inside) = next(iter(shapes.items()))
    few = low_rank({name: (out, inside)}, 1)
    whole = few | {f"{name}.modules_to_save.default": torch.ones(out, inside)}
    assert "as a whole (modules_to_save)" in refused(llama, write_peft(tmp_path / "whole", whole))
    head = low_rank({"lm_head": (96, inside)}, 1)
    folder = write_peft(tmp_path / "head", {f"../{key}": data for key, data in head.items()})
    save_file(
        {f"base_model.model.{key}.weight": data for key, data in head.items()},
        folder / "adapter_model.safetensors",
    )
    said = refused(llama, folder)
    assert "lm_head" in said
    high = {f"{name}.lora_A": torch.ones(1025, inside), f"{name}.lora_B": torch.ones(out, 1025)}
    assert "has rank 1025" in refused(llama, write_peft(tmp_path / "high", high, r=1025))
    other = low_rank({name: (out + 2, inside)}, 1)
    assert "give the base it was trained on" in refused(llama, write_peft(tmp_path / "other", other))
    assert "use_dora=True is not supported" in refused(
        llama, write_peft(tmp_path / "dora", few, use_dora=True)
    )


def test_gguf_files_that_are_no_adapter_for_this_target(llama: Path, tmp_path: Path) -> None:
    shapes = shapes_of(llama)
    name, (out, inside) = next(iter(shapes.items()))
    few = low_rank({name: (out, inside)}, 1)
    wrong = low_rank({name: (out, inside + 2)}, 1)
    half = {key: data for key, data in few.items() if key.endswith("A")}
    nan = {key: data * float("nan") for key, data in few.items()}
    for number, (tensors, keys, line) in enumerate((
        (few, {"general_type": "model"}, "is no LoRA adapter"),
        (few, {"adapter_type": "control"}, "is no LoRA adapter"),
        (few, {"alpha": -1.0}, "adapter.lora.alpha"),
        (few, {"rename": lambda stem: "blk.0.other.weight"}, "has no place for"),
        (wrong, {}, "give the base it was trained on"),
        (half, {}, "has only one of lora_A and lora_B"),
        (nan, {}, "no matrix of finite numbers"),
        ({}, {}, "has no tensors"),
    )):  # fmt: skip
        assert line in refused(llama, write_gguf_adapter(tmp_path / f"{number}.gguf", tensors, {}, **keys)), (
            line
        )


def test_what_a_model_computes_in_another_way_is_refused(tmp_path: Path) -> None:
    """The one matrix of latent attention that is taken apart."""
    build_decoder("deepseek", tmp_path / "target")
    shapes = {name: shape for name, shape in shapes_of(tmp_path / "target").items() if "layers.0" in name}
    inner = {name: shape for name, shape in shapes.items() if name.endswith("kv_b_proj")}
    assert "cannot join" in refused(tmp_path / "target", write_peft(tmp_path / "a", low_rank(inner, 1)))
    others = {
        name: shape for name, shape in shapes.items() if name.endswith(("o_proj", "kv_a_proj_with_mqa"))
    }
    folder = write_peft(tmp_path / "b", low_rank(others, 1))
    bank = AdapterBank.of([("b", load_adapter(folder, tmp_path / "target"))])
    load_target(tmp_path / "target", adapters=bank)


def test_names(tmp_path: Path) -> None:
    made = demo_adapters(tmp_path)
    with LLM("demo", adapter=[f"a={made['a']}"], drafter="ngram", profile_dir=None) as llm:
        with pytest.raises(UsageError, match=r"lora: no adapter 'c' is loaded: there is a"):
            llm.generate(PROMPT, lora="c")
        assert written(llm, [{"a": 0.0}]) == written(llm, [()])
    with pytest.raises(UsageError, match="two adapters are named a"):
        LLM("demo", adapters=[f"a={made['a']}", f"a={made['b']}"])
    for wrong in ({"": "x"}, {"a": ""}, {"a b": "x"}, ["x"], 3, {"a": 3}, {f"n{i}": "x" for i in range(257)}):
        with pytest.raises(UsageError, match="adapters="):
            LLM("demo", adapters=wrong)  # type: ignore[arg-type]
    for said in (
        3,
        {"a": "b"},
        {"a": 101},
        {"": 1},
        {"a": True},
        [("a", 1), ("a", 2)],
        [f"n{i}" for i in range(17)],
    ):
        with pytest.raises(UsageError, match="lora="):
            SamplingParams(lora=said)  # type: ignore[arg-type]
