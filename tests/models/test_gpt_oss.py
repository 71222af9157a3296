"""gpt-oss as it is published: experts in MXFP4. Against transformers, llama.cpp's layout and bad files."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from decoders import build_decoder
from gguf_files import write_gguf as write_file
from layouts import edit
from paceline import LLM, SamplingParams
from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.gguf.tokenizer import end_ids
from paceline.checkpoints.loading import Tensors
from paceline.convert import to_gguf
from paceline.convert.quantized import save_quantized
from paceline.convert.to_gguf import write_gguf
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ConfigError, LoadError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.config import parse_target, read_config
from paceline.models.families import spec_of
from paceline.models.inspection import inspect
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.quantize import quantizer
from paceline.ops.reference import EagerRunner
from small_tokenizers import SIZE, byte_level
from testing import Setup, make_engine, run

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
LONG = 100  # tokens
TEXT = torch.randint(3, SIZE, (27,), generator=torch.Generator().manual_seed(5)).tolist()  # three windows
Made = tuple[Any, Path]


def as_published(model: Any, folder: Path) -> None:
    """Replace the experts of a saved model by random ones in MXFP4, in the file and, as floats, in `model`."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(4)
    tensors = load_file(file)
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            at, held = f"model.layers.{i}.mlp.experts.{name}", getattr(layer.mlp.experts, name)
            count, columns, rows = held.shape
            size = (count, rows, columns // 32, 16)
            blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 124, size[:-1], generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                held.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[at]
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = build_decoder("gpt-oss", folder, hidden_size=64, intermediate_size=96, vocab_size=SIZE)
    as_published(model, folder)
    byte_level(folder, "gpt-4o")
    return model, folder


def logits_of(target: GraphTarget, chunk: int = 7) -> torch.Tensor:
    """Of the text, `chunk` tokens at a time."""
    pages, parts = dict.fromkeys(target.layout.kinds, 4), []
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=64, dtype=target.kv_dtype)
    cache.open(0, TEXT)
    for at in range(0, len(TEXT), chunk):
        with cache.tail([(0, TEXT[at : at + chunk])]) as tail:
            parts.append(target.logits(target.forward(tail.rows(), cache)).clone())
            tail.commit([len(TEXT[at : at + chunk])])
    return torch.cat(parts)


def changed(made: Made, to: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the folder with other tensors, by the ends of their names in layer 1; None: without."""
    for path in made[1].iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    held = load_file(to / "model.safetensors")
    for end, value in tensors.items():
        name = next(name for name in held if name.startswith("model.layers.1.") and name.endswith(end))
        del held[name]
        held |= {} if value is None else {name: value}
    save_file(held, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("runner", ["eager", "native"])
def test_experts_in_mxfp4_give_what_transformers_gives(made: Made, runner: str) -> None:
    theirs, folder = made
    chosen = native.NativeRunner(2, exact=True) if runner == "native" else EagerRunner()
    target = load_target(folder, runner=chosen)
    with torch.no_grad():
        want = theirs(torch.tensor([TEXT])).logits[0]
    assert want.std() > 0.5
    assert (logits_of(target) - want).abs().max() < 1e-4
    assert target.layers[0].mlp.down[0].kind == ("mxfp4" if runner == "native" else "bfloat16")
    assert {"MXFP4": 8}.items() <= inspect(folder).dtypes.items()


def test_a_hundred_greedy_tokens_with_and_without_drafts(made: Made) -> None:
    theirs, folder = made
    options = {"max_new_tokens": LONG, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = theirs.generate(torch.tensor([TEXT]), **options)[0, len(TEXT) :].tolist()
    greedy = SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True)
    drawn, texts = SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True), []
    target = load_target(folder, runner=native.NativeRunner(2, exact=True))
    for drafter in (NgramDrafter(), None):
        for params in (greedy, drawn):
            pages = dict.fromkeys(target.layout.kinds, 20)
            cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=160, dtype=target.kv_dtype)
            (done,) = run(make_engine(Setup(), drafter, target=target, cache=cache), [TEXT], params)
            texts.append(done.token_ids)
    assert texts == [want, texts[1]] * 2


def test_inputs_rounded_to_bytes_change_little(made: Made) -> None:
    """As experts run where nothing else is asked for; each row has the same bits in any chunks."""
    target = load_target(made[1], runner=native.NativeRunner(2))
    exact = load_target(made[1], runner=native.NativeRunner(2, exact=True))
    one, other = logits_of(target, 64), logits_of(exact, 64)
    assert torch.equal(one, logits_of(target, 5))
    assert 0 < (one - other).abs().mean() < 0.1


def test_its_file_is_that_of_llama_cpp(made: Made, tmp_path: Path) -> None:
    """Tensors as conversion/gpt_oss.py of llama.cpp writes them, byte for byte, and the model that is read of them."""
    folder, file = made[1], tmp_path / "m.gguf"
    assert not write_gguf(folder, file, None).notes
    model, stored = Gguf(file), load_file(folder / "model.safetensors")
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == "gpt-oss")
    known, expected = gguf.get_tensor_name_map(arch, 4), {}
    for key, value in stored.items():
        for i, half in enumerate(("gate_proj", "up_proj") if "gate_up" in key else ("",)):
            name = key.replace("gate_up_proj", half) if half else key
            stem = re.sub("(_blocks|_scales|[_.]bias|[.]weight)$", "", name)
            to = known.get_name(stem) + (".bias" if name.endswith("bias") else ".weight")
            expected.setdefault(to, []).append(value[:, i::2] if half else value)
    assert model.tensors.keys() == expected.keys()
    for name, parts in expected.items():
        if len(parts) == 1:
            assert np.array_equal(model.floats(name), parts[0].float().numpy()), name
            continue
        blocks, scales = sorted(parts, key=torch.Tensor.dim, reverse=True)
        values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # in the order of the columns
        rows = torch.cat((scales[..., None], values[..., :16] | values[..., 16:] << 4), -1)
        assert model.tensors[name].kind == "MXFP4"
        assert np.array_equal(model.raw(name), rows.flatten(2).numpy()), name
    one, other = (load_target(path, runner=native.NativeRunner(2)) for path in (folder, file))
    assert torch.equal(logits_of(one), logits_of(other))
    assert model["gpt-oss.attention.sliding_window"] == 8
    assert model["general.file_type"] == 38


def test_gate_and_up_may_be_one_tensor_of_a_file(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the same converter writes them if it is asked to."""
    names = to_gguf.names_of

    def fused(architecture: str, name: str) -> list[str]:
        return list(
            dict.fromkeys(re.sub("(gate|up)_exps", "gate_up_exps", one) for one in names(architecture, name))
        )

    monkeypatch.setattr(to_gguf, "names_of", fused)
    write_gguf(made[1], tmp_path / "m.gguf", None)
    assert Gguf(tmp_path / "m.gguf").tensors["blk.3.ffn_gate_up_exps.bias"].shape == (6, 192)
    one, other = (load_target(path, runner=native.NativeRunner(2)) for path in (made[1], tmp_path / "m.gguf"))
    assert torch.equal(logits_of(one), logits_of(other))


@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_other_kinds_are_made_of_mxfp4(kind: str, made: Made, tmp_path: Path) -> None:
    write_gguf(made[1], tmp_path / "m.gguf", kind)
    config: Any = parse_target(read_config(tmp_path / "m.gguf"))
    name, mine = "layers.2.mlp.experts.gate_up_proj", spec_of("gpt_oss").shapes(config)
    found, want = (Tensors(path, mine).take(name).float() for path in (tmp_path / "m.gguf", made[1]))
    assert torch.equal(found, want) or (kind == "q8_0" and (found - want).abs().max() < 0.01)
    assert load_target(made[1], transform=quantizer("int4")).layers[0].mlp.down[0].kind == "int4"
    with pytest.raises(UsageError, match=r"quantized already .MXFP4.: it can be run"):
        save_quantized(made[1], tmp_path / "int8", "int8")


def test_a_message_of_harmony_ends_no_answer(tmp_path: Path) -> None:
    """<|end|> closes a thought, as it closes an answer of Phi-3: llama.cpp leaves it out for such vocabularies, too."""
    marks = ["<|end|>", "<|return|>", "<|call|>", "<|start|>"]

    def words(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list(["a", "b", *tokens])
        writer.add_token_types([1, 1, *([3] * len(tokens))])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(2)

    found = []
    for tokens in (marks, marks[:2]):
        file = tmp_path / f"{len(tokens)}.gguf"
        write_file(
            file, "gpt-oss", {}, {"output_norm.weight": np.ones(4)}, None, partial(words, tokens=tokens)
        )
        found.append(end_ids(Gguf(file)))
    assert found == [(3, 4), (3, 2)]


BYTES = torch.zeros(6, 192, 2, 16, dtype=torch.uint8)
BAD: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no sinks": ({"sinks": None}, r"1 missing \(layers.1.self_attn.sinks\)"),
    "sinks": ({"sinks": torch.ones(3)}, r"sinks has shape \[3\] where config.json needs \[4\]"),
    "no scales": ({"gate_up_proj_scales": None}, "_scales beside it is none, where MXFP4 has blocks of 16 bytes"),
    "scales": ({"gate_up_proj_scales": BYTES[..., 0, 0].clone()}, r"beside it is U8 \[6, 192\], where MXFP4"),
    "bytes": ({"gate_up_proj_blocks": BYTES[..., :8].clone()}, r"is U8 \[6, 192, 2, 8\] and _scales"),
    "rows": ({"gate_up_proj_blocks": BYTES[:, :64].clone(), "gate_up_proj_scales": BYTES[:, :64, :, 0].clone()},
             r"gate_up_proj has shape \[6, 64, 64\] where config.json needs \[6, 192, 64\]"),
    "bias": ({"down_proj_bias": None}, r"1 missing \(layers.1.mlp.experts.down_bias\)"),
    "router": ({"router.bias": None}, r"1 missing \(layers.1.mlp.gate.bias\)"),
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not supported: the experts of gpt-oss cut .* at 7"),
    "slope": ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
    "top": ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 of only 6 experts"),
    "kinds": ({"layer_types": ["full_attention"]}, "must name 4 layers"),
}


@pytest.mark.parametrize("case", [*BAD, *CONFIGS])
def test_bad_folders_are_one_line(case: str, made: Made, tmp_path: Path) -> None:
    tensors, said = BAD.get(case, ({}, ""))
    folder = changed(made, tmp_path, **tensors)
    if case in CONFIGS:
        fields, said = CONFIGS[case]
        edit(folder / "config.json", **fields)
    error: type[LoadError] = ConfigError if case in CONFIGS else WeightsError
    with pytest.raises(error, match=said) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_the_config_that_openai_publishes(made: Made, tmp_path: Path) -> None:
    """Older names of the fields, a factor of 32, three tokens that end a turn: gpt-oss-20b's, but for its sizes."""
    folder = changed(made, tmp_path)
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False}  # fmt: skip
    edit(folder / "config.json", rope_parameters=None, rope_scaling=rope, rope_theta=150000, experts_per_token=2,
         num_experts_per_tok=None, initial_context_length=4096, swiglu_limit=7.0, eos_token_id=3,
         max_position_embeddings=131072, layer_types=None)  # fmt: skip
    edit(folder / "generation_config.json", eos_token_id=[3, 4, 5])
    config: Any = parse_target(read_config(folder))
    assert (config.max_len, config.window, config.moe.top_k) == (131072, 8, 2)
    assert config.kinds[:2] == ("sliding_attention", "full_attention")
    assert config.rotary.attention == pytest.approx(1.3465735902799727)
    edit(
        folder / "config.json", rope_scaling=None, rope_theta=None
    )  # what transformers takes where none is said
    assert parse_target(read_config(folder)).rotary == config.rotary  # type: ignore[attr-defined]
    assert load_target(folder).eos_token_ids == (3, 4, 5)


def test_a_chat_ends_at_return_and_at_call_but_at_no_message(tmp_path: Path) -> None:
    """The published end tokens, beside the published template; thoughts and messages end at <|end|> and go on."""
    build_decoder("gpt-oss", tmp_path, vocab_size=SIZE + 8)
    backend = byte_level(tmp_path, "gpt-4o")
    names = ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"]
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = {name: backend.token_to_id(name) for name in names}
    edit(tmp_path / "generation_config.json", eos_token_id=[ids["<|return|>"], 0, ids["<|call|>"]])
    template = Path(__file__).parents[1] / "text" / "templates" / "families" / "gptoss.jinja"
    (tmp_path / "chat_template.jinja").write_text(template.read_text())
    found = {}
    with LLM(str(tmp_path), drafter="ngram", max_model_len=512, threads=1) as llm:
        for name in names[:3]:
            params = SamplingParams(max_tokens=6, temperature=0, logit_bias={ids[name]: 100.0})
            (done,) = llm.chat([{"role": "user", "content": "a"}], params)
            found[name] = done.finish_reason, len(done.token_ids)
        assert llm.tokenizer.format.name == "harmony"
    assert found == {"<|return|>": ("stop", 1), "<|call|>": ("stop", 1), "<|end|>": ("length", 6)}
