"""Makes model folders in the layouts that are published, scaled down, each with the transformers model it writes like.

`gemma-4-E2B-it` has its own config, tensor names and auxiliary files (tests/real/data); the others are what transformers
saves of their configs, stored as their makers store them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from checkpoints import VOCAB, WINDOW, build_assistant, build_target, randomize
from layouts import edit, write
from models.test_compressed import compress
from models.test_experts import restored
from models.test_gguf import written
from paceline.convert.quantized import save_quantized
from packings import pack_folder
from real.test_adapter import GATE, Q, adapter

DATA = Path(__file__).parent / "real" / "data"
TEMPLATE = Path(__file__).parent / "text" / "templates" / "google_v5.jinja"
PROMPT = [2, 5, 9, 14, 33, 8, 5, 9, 14, 70, 41, 5, 9]
# what a size of gemma-4-E2B-it becomes: width, heads, feed-forward, vocabulary, per-layer table of 35 layers
SMALL = {1536: 48, 256: 16, 512: 32, 2048: 128, 4096: 256, 6144: 64, 12288: 128, 262144: VOCAB, 8960: 35 * 16}
SUGGESTED = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 90]}
TOWERS = {
    "vision_tower.encoder.layers.0.mlp.up_proj.linear.weight": (4, 4), "embed_vision.embedding_projection.weight": (4, 4),
    "audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight": (4, 4),
}  # fmt: skip


@dataclass
class Made:
    path: Path  # what is given to `paceline`
    theirs: PreTrainedModel | None  # None: no model of transformers has just these values
    options: dict[str, Any] = field(default_factory=dict)  # of `LLM`


def furnish(folder: Path) -> None:
    """A tokenizer of the models' size and what else lies beside the weights of an instruction-tuned Gemma 4."""
    letters = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>"])}
    letters |= {chr(ord("0") + i): i for i in range(len(letters), VOCAB)}
    Tokenizer(WordLevel(letters, unk_token="<pad>")).save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "processor_config.json"):
        write(folder / name, (DATA / name).read_text(encoding="utf-8"))
    write(folder / "chat_template.jinja", TEMPLATE.read_text(encoding="utf-8"))
    write(folder / "generation_config.json", SUGGESTED)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def store(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, form: str = "pt") -> None:
    """Write the weights anew, in so many files with an index, or in one without."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": form})
        return
    where = {
        n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(sorted(tensors))
    }
    for file in set(where.values()):
        some = {n: t for n, t in tensors.items() if where[n] == file}
        save_file(some, folder / file, metadata={"format": form})
    size = sum(t.nbytes for t in tensors.values())
    write(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def e2b_itself(folder: Path) -> Made:
    """google/gemma-4-E2B-it: its config with smaller sizes, and each tensor of its header, made smaller."""
    raw = json.loads((DATA / "e2b_config.json").read_text(encoding="utf-8"))
    del raw["metadata"]
    text = raw["text_config"]
    sizes = ("hidden_size", "head_dim", "global_head_dim", "intermediate_size", "hidden_size_per_layer_input",
             "vocab_size", "vocab_size_per_layer_input")  # fmt: skip
    raw["eos_token_id"] = SUGGESTED["eos_token_id"]
    text |= {name: SMALL[text[name]] for name in sizes} | {
        "sliding_window": WINDOW,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(**text))
    randomize(theirs)
    theirs = theirs.bfloat16().float().eval()
    theirs.set_attn_implementation("eager")
    values = theirs.state_dict()
    header = json.loads(gzip.decompress((DATA / "e2b_tensor_manifest.json.gz").read_bytes()))["tensors"]
    tensors = {}
    for name, one in header.items():
        language = name.startswith("model.language_model.")
        shape = [SMALL[n] if language and n != 1 else min(n, 2) for n in one["shape"]]
        value = values.get(name.replace(".language_model", "")) if language else None
        if value is None:  # a tower's, or K/V of a layer that takes another's
            value = torch.zeros(shape)
        assert list(value.shape) == shape, name
        tensors[name] = value.bfloat16().contiguous()
    folder.mkdir()
    write(folder / "config.json", raw)
    store(folder, tensors)
    furnish(folder)
    build_assistant("e2b", folder.with_name(folder.name + "-assistant"), ordered=True, num_key_value_heads=1)
    return Made(folder, theirs)


def release(
    family: str, *, ordered: bool = False, shards: int = 1, nested: bool = True, form: str = "pt",
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict, **config: Any,
) -> Callable[[Path], Made]:  # fmt: skip
    """As Google publishes one: towers beside the language model, and its assistant in the folder beside."""

    def make(folder: Path) -> Made:
        theirs = build_target(family, folder, multimodal=nested and family != "12b")
        towers = {f"model.{name}": torch.zeros(shape) for name, shape in TOWERS.items()} if nested else {}
        store(folder, change(stored(folder) | towers), shards, form)
        furnish(folder)
        edit(folder / "config.json", **config)
        build_assistant(family, folder.with_name(folder.name + "-assistant"), ordered=ordered)
        return Made(folder, theirs)

    return make


def as_mlx(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """mlx-vlm: the prefix the other way round, experts in three stacks of their own."""
    swapped = {
        n.removeprefix("model.").replace("language_model.", "language_model.model.", 1): t
        for n, t in tensors.items()
    }
    return restored(swapped, "MLX", "experts.switch_glu")


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return restored(tensors, "one by one", "")


def w4a16(folder: Path) -> Made:
    """`-qat-w4a16-ct`: matrices packed by compressed-tensors; embeddings, router and per-layer inputs stay."""
    theirs = build_target("e2b", folder, hidden_size=64)
    left = theirs.load_state_dict(compress(folder), strict=False)
    assert not left.unexpected_keys
    furnish(folder)
    build_assistant("e2b", folder.with_name(folder.name + "-assistant"), ordered=True, backbone=64)
    return Made(folder, theirs)


def packed_by(kind: str) -> Callable[[Path], Made]:
    """Matrices as another tool packs them, see tests/packings.py; the values are what transformers is given."""

    def make(folder: Path) -> Made:
        theirs = build_target("e2b", folder, hidden_size=64)
        left = theirs.load_state_dict(pack_folder(folder, kind), strict=False)
        assert not left.unexpected_keys
        furnish(folder)
        build_assistant("e2b", folder.with_name(folder.name + "-assistant"), ordered=True, backbone=64)
        return Made(folder, theirs)

    return make


def gguf(folder: Path) -> Made:
    theirs = build_target("e4b", folder)
    return Made(written(folder, folder.with_name("gemma-4-F32.gguf")), theirs)


def lora(folder: Path) -> Made:
    """A base, and the folder that PEFT saves."""
    theirs = build_target("e2b", folder)
    furnish(folder)
    made = adapter(folder.with_name("adapter"))
    weights, prefix = dict(theirs.named_parameters()), "base_model.model.model."
    with torch.no_grad():
        for at, middle in ((Q, ""), (GATE, ".default")):
            a, b = (made[f"{prefix}{at}.lora_{side}{middle}.weight"] for side in "AB")
            weights[f"model.{at}.weight"] += 2 * b @ a
    return Made(folder, theirs, {"adapter": str(folder.with_name("adapter"))})


def cached(folder: Path) -> Made:
    """What `hf download` leaves in its cache: links to files that are named by their content."""
    repository = folder.with_name("models--google--gemma-4-E4B-it")
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.parent.mkdir(parents=True)
    made = release("e4b", ordered=True)(snapshot)
    assistant = folder.with_name(f"{repository.name}-assistant") / "snapshots" / "cafe"
    assistant.parent.mkdir(parents=True)
    snapshot.with_name("c0ffee-assistant").rename(assistant)
    write(repository / "refs" / "main", "c0ffee")
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.symlink_to(path.rename(repository / "blobs" / f"b10b{path.name}"))
    return Made(repository, made.theirs)


def int8(folder: Path) -> Made:
    """What `paceline quantize` makes of a published one, elsewhere: it remembers the assistant."""
    source = release("e2b", ordered=True)(folder).path
    out = folder.with_name("small")
    save_quantized(source, out, "int8")
    return Made(out, None)


# layout -> (maker, a line of `info`, the drafter that is chosen)
PUBLISHED: dict[str, tuple[Callable[[Path], Made], str, str]] = {
    "E2B, its own names and shapes": (
        e2b_itself, "35 (28 sliding, 7 full; 20 share K/V; per-layer inputs of 16)", "mtp+ngram"),
    "E2B": (release("e2b", ordered=True), "6 (4 sliding, 2 full; 3 share K/V; per-layer inputs of 8)", "mtp+ngram"),
    "E4B": (release("e4b", ordered=True), "6 (3 sliding, 3 full; 2 share K/V; per-layer inputs of 8)", "mtp+ngram"),
    "12B": (release("12b"), "type       gemma4_unified", "mtp+ngram"),
    "26B-A4B in shards": (release("26b", shards=3), "6 experts, 2 active", "mtp+ngram"),
    "26B-A4B, an expert a tensor": (release("26b", shards=2, change=one_by_one), "6 experts, 2 active", "mtp+ngram"),
    "31B in shards": (release("31b", shards=3), "not loaded vision_tower", "mtp+ngram"),
    "31B, text alone": (release("31b", nested=False), "type       gemma4_text", "mtp+ngram"),
    "MLX": (release("26b", change=as_mlx, form="mlx"), "6 experts, 2 active", "mtp+ngram"),
    "old spellings of the config": (
        release("e2b", rope_parameters=..., rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, dtype=...,
                torch_dtype="float32"), "3 share K/V", "mtp+ngram"),
    "w4a16, compressed-tensors": (w4a16, "U8 x", "mtp+ngram"),
    "AWQ": (packed_by("awq"), "stored     AWQ, 4 bits, groups of 32, with zero points; kept as q5_0", "mtp+ngram"),
    "GPTQ": (packed_by("gptq"), "stored     GPTQ, 4 bits, groups of 32; kept as int4", "mtp+ngram"),
    "fp8, a scale for each row": (packed_by("fp8"), "8-bit floats, one scale a row; kept as bfloat16", "mtp+ngram"),
    "NVFP4, ModelOpt": (packed_by("nvfp4"), "stored     ModelOpt, NVFP4: 4-bit floats, groups of 16", "mtp+ngram"),
    "MLX in 4 bits": (packed_by("mlx"), "stored     MLX, 4 bits, groups of 32, with minima; kept as q4_1", "mtp+ngram"),
    "GGUF": (gguf, "gemma-4-F32.gguf", "ngram"),
    "LoRA adapter": (lora, "adapter ", "ngram"),
    "the hub's cache": (cached, "models--google--gemma-4-E4B-it", "mtp+ngram"),
    "int8 of quantize": (int8, "I8 x", "mtp+ngram"),
}  # fmt: skip
