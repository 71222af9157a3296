"""A folder as GGUF and a GGUF file as folder: values, tokens and texts are equal, and nothing is left half-written."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError

import paceline
from checkpoints import FAMILIES, build_target
from decoders import DECODERS, LONG, build_decoder
from gguf_files import interleaved
from paceline.checkpoints.defaults import ModelDefaults, read_defaults
from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.loading import Tensors
from paceline.cli import main
from paceline.convert import to_gguf
from paceline.convert.quantized import save_quantized
from paceline.convert.to_folder import write_folder
from paceline.convert.to_gguf import write_gguf
from paceline.errors import CapacityError, ConfigError, LoadError, PacelineError, UsageError
from paceline.hub.resolve import bundled
from paceline.models.config import parse_target, read_config
from paceline.models.families import spec_of
from paceline.text.tokenizer import Tokenizer
from small_tokenizers import SIZE, byte_level, fallback, lines

GREEDY = paceline.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [2, 30, 31, 32, 80]
# what GGUF has a place for
SAID = [
    n
    for n in DECODERS
    if n not in ("qwen3-biases", "qwen3-moe-mixed")
    and not n.startswith(
        (
            "deepseek",
            "glm4-moe",
            "glm4-norms",
            "glm4-flash",
            "qwen3_5",
            "qwen3_next",
            "granite4",
            "muse",
            "nemotron",
        )
    )
    and n not in ("lfm2-biases", "ernie4_5-biases")
]


# variants of the tests in tests/models that the architecture of GGUF cannot say, as it can say them
AS_GGUF: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 16}, "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "qwen2-moe": {"mlp_only_layers": []}, "gemma2": {"query_pre_attn_scalar": 16},
    "ernie4_5-moe": {"moe_layer_end_index": -1},
}  # fmt: skip


def decoder(name: str, folder: Path, pre: str = "llama-bpe", **changes: Any) -> Any:
    model = build_decoder(name, folder, vocab_size=SIZE, **AS_GGUF.get(name, {}) | changes)
    byte_level(folder, pre)
    return model


def gemma(family: str, folder: Path, **changes: Any) -> Any:
    vocab = SIZE + 120
    more = {} if family == "12b" else {"vocab_size_per_layer_input": vocab}
    model = build_target(family, folder, vocab_size=vocab, **more, **changes)
    fallback(folder)
    return model


def values(path: Path) -> dict[str, torch.Tensor]:
    config: Any = parse_target(read_config(path))
    tensors = Tensors(path, spec_of(config.model_type).shapes(config), config.shared_layers, config.tied)
    return {name: tensors.take(name).float() for name in list(tensors.entries)}


def text(path: Path, **options: Any) -> list[int]:
    with paceline.LLM(str(path), drafter="none", max_model_len=64, activations="float32", **options) as llm:
        return llm.generate(PROMPT, GREEDY)[0].token_ids


@pytest.mark.parametrize("name", [*SAID, *FAMILIES])
def test_a_folder_as_gguf_has_its_values_and_its_tokens(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    (gemma if name in FAMILIES else decoder)(name, folder)
    written = write_gguf(folder, file, "f32")
    one, other = values(folder), values(file)
    assert one.keys() == other.keys()
    for key in one:
        assert torch.allclose(one[key], other[key], rtol=0, atol=1e-6 if name in SHIFTED else 0), key
    assert Tokenizer.load(file).encode("a b") == Tokenizer.load(folder).encode("a b")
    assert written.nbytes == file.stat().st_size
    assert bool(written.notes) == (
        name.endswith("window") or name == "ministral"
    )  # GGUF's llama and qwen2 know no window
    assert {*tmp_path.iterdir()} == {folder, file}


PLAIN = [
    "gemma3", "smollm3", "olmo3", "granite", "ministral3", "glm4", "phi4-mini", "lfm2", "seed-oss", "exaone4", "ernie4_5",
    "gemma2", "cohere2",
]  # fmt: skip
ARCHS = {name: name for name in PLAIN} | {
    "olmo3": "olmo2", "ministral3": "mistral3", "phi4-mini": "phi3", "seed-oss": "seed_oss",
}  # fmt: skip
SHIFTED = ("gemma2", "gemma3")  # norms are stored with 1 added
PAIRED = ("smollm3", "granite", "ministral3")


@pytest.mark.parametrize("name", PLAIN)
def test_names_and_rows_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Names by the package gguf; rows of q and k and norms as its converter changes them."""
    model = decoder(name, tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    file, config = Gguf(tmp_path / "m.gguf"), model.config
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == ARCHS[name])
    known = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    expected = {}
    for key, value in model.state_dict().items():
        if key.startswith("lm_head") and config.tie_word_embeddings:
            continue
        wanted, data = known.get_name(key, (".weight", ".bias")), value.numpy()
        if name in PAIRED and ("q_proj" in key or "k_proj" in key):
            data = interleaved(
                data, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            )
        data = data.squeeze(1) if "conv.conv" in key else data
        expected[wanted] = data + 1 if name in SHIFTED and key.endswith("norm.weight") else data
    factors = {
        "rope_factors_long.weight": LONG["long_factor"],
        "rope_factors_short.weight": LONG["short_factor"],
    }
    expected |= {key: np.array(said, np.float32) for key, said in factors.items() if name == "phi4-mini"}
    assert file.tensors.keys() == expected.keys()
    for key, data in expected.items():
        assert np.array_equal(file.floats(key), data), key


def test_granite_4_is_written_as_the_granite_that_llama_cpp_makes_of_it(tmp_path: Path) -> None:
    folder, file, back = tmp_path / "hf", tmp_path / "m.gguf", tmp_path / "back"
    decoder("granite4", folder)
    write_gguf(folder, file, "f32")
    one, other = values(folder), values(file)
    for i in range(4):
        halves = one.pop(f"layers.{i}.mlp.gate_up_proj.weight").chunk(2)
        for name, half in zip(("gate", "up"), halves, strict=True):
            assert torch.equal(other.pop(f"layers.{i}.mlp.{name}_proj.weight"), half)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert text(file) == text(folder)
    write_folder(file, back, "f32")
    assert read_config(back)["model_type"] == "granite"
    assert text(back) == text(folder)


def test_how_to_sample_goes_along(tmp_path: Path) -> None:
    """Both ways, and a GGUF file's own suggestion holds as that of a folder does."""
    folder, file, back = tmp_path / "hf", tmp_path / "m.gguf", tmp_path / "back"
    decoder("llama3", folder)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1}'
    )
    write_gguf(folder, file, "f16")
    assert gguf.GGUFReader(file).fields["general.sampling.top_k"].contents() == 20
    assert read_defaults(file) == ModelDefaults(0.6, 20, 0.95)
    with paceline.LLM(str(file), drafter="none", max_model_len=64, threads=1) as llm:
        assert (llm.params().temperature, llm.params().top_k) == (0.6, 20)
    write_folder(file, back, "f16")
    assert read_defaults(back) == ModelDefaults(0.6, 20, 0.95)


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe", "mistral-window", "e2b"])
def test_it_writes_the_text_of_the_folder(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    (gemma if name in FAMILIES else decoder)(name, folder)
    write_gguf(folder, file, None)  # as stored: float32
    expected = text(folder)
    if name == "mistral-window":
        assert parse_target(read_config(file)).max_len == 8
        return
    assert text(file) == expected


@pytest.mark.parametrize("kind", [*to_gguf.FLOATS, *to_gguf.BLOCKS])
def test_every_kind_is_what_llama_cpp_would_store(kind: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "hf", tmp_path / "m.gguf"
    decoder("qwen3", folder, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=32)
    notes = write_gguf(folder, file, kind).notes
    model, wanted = Gguf(file), values(folder)
    assert not notes
    up = model.tensors["blk.0.ffn_up.weight"]
    assert up.kind == kind.upper()
    data = wanted["layers.0.mlp.up_proj.weight"].numpy()
    stored = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(model.raw(up.name).view(stored.dtype).reshape(stored.shape), stored)
    assert model.tensors["blk.0.attn_norm.weight"].kind == "F32"
    table = kind if kind in to_gguf.FLOATS else "q8_0"
    assert model.tensors["token_embd.weight"].kind == table.upper()
    assert model["general.file_type"] == to_gguf.FILE_TYPES[kind]
    assert len(text(file)) == 12


def test_rows_that_fill_no_block_are_kept_and_said(tmp_path: Path) -> None:
    decoder("llama", tmp_path / "hf")
    written = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "q4_0")
    (note,) = written.notes
    assert "rows of no multiple of 32 values: kept as f16" in note
    assert Gguf(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"].kind == "F16"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level_tokenizers_keep_their_cuts(pre: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    decoder("llama", folder)
    backend = byte_level(folder, pre)
    if pre == "tekken":
        raw = json.loads(backend.to_str())
        raw["model"]["ignore_merges"] = True
        (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert not write_gguf(folder, tmp_path / "m.gguf", None).notes
    assert Gguf(tmp_path / "m.gguf")["tokenizer.ggml.pre"] == pre
    one, other = Tokenizer.load(folder), Tokenizer.load(tmp_path / "m.gguf")
    for line in lines(200):
        assert one.encode(line) == other.encode(line)
    assert (one.bos_id, one.eos_ids, one.pad_id, one.adds_bos) == (2, (1,), 0, True)
    assert (other.bos_id, other.eos_ids, other.pad_id, other.adds_bos) == (2, (1,), 0, True)
    assert other.template == "{{ messages }}"


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_tokenizer_of_llama_2_becomes_scores(prefixed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    build_decoder("llama", folder, vocab_size=SIZE + 130)
    fallback(folder, prefixed)
    write_gguf(folder, tmp_path / "m.gguf", None)
    model = Gguf(tmp_path / "m.gguf")
    assert model["tokenizer.ggml.model"] == "llama"
    assert model["tokenizer.ggml.tokens"][-1] == f"[PAD{SIZE + 129}]"  # rows of the table without a token
    one, other = Tokenizer.load(folder), Tokenizer.load(tmp_path / "m.gguf")
    wrong = [line for line in lines(300) if one.encode(line) != other.encode(line)]
    assert not wrong


def test_a_cut_that_gguf_cannot_say_is_counted(tmp_path: Path) -> None:
    (note,) = write_gguf(bundled("target"), tmp_path / "m.gguf", None).notes
    assert "2 of 7 sample texts get other token ids" in note


def test_padding_of_a_vocabulary_stands_for_nothing(tmp_path: Path) -> None:
    """A table with more rows than the tokenizer has tokens: in the folder, as GGUF, and as a folder again."""
    build_decoder("llama", tmp_path / "hf", vocab_size=SIZE + 40)
    byte_level(tmp_path / "hf", "llama-bpe")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    write_folder(tmp_path / "m.gguf", tmp_path / "back")
    ids = [30, SIZE + 7, 31, SIZE + 39]
    for path in (tmp_path / "hf", tmp_path / "m.gguf", tmp_path / "back"):
        tokenizer = Tokenizer.load(path)
        assert tokenizer.vocab_size <= SIZE
        assert tokenizer.decode(ids) == tokenizer.decode([30, 31])
    assert Gguf(tmp_path / "m.gguf")["tokenizer.ggml.tokens"][SIZE + 7] == f"[PAD{SIZE + 7}]", (
        "as llama.cpp has it"
    )


def test_an_assistant_drafts_for_its_target_from_files(tmp_path: Path) -> None:
    target, drafter = tmp_path / "t.gguf", tmp_path / "t-assistant.gguf"
    write_gguf(bundled("target"), target, "f32")
    notes = write_gguf(bundled("assistant"), drafter, "f32", bundled("target")).notes
    assert any("clusters of the head are left out" in note for note in notes)
    params = paceline.SamplingParams(max_tokens=24, temperature=0)
    found = {}
    for name in (str(drafter), "none"):
        with paceline.LLM(str(target), drafter=name, draft_tokens=4, max_model_len=128) as llm:
            (found[name],) = llm.generate([2, 700, 701, 702, 1200], params)
    assert found[str(drafter)].token_ids == found["none"].token_ids
    assert found[str(drafter)].stats.accepted > 4


FOLDERS = [
    *PLAIN,
    "lfm2-moe",
    "mixtral",
    "qwen2-moe",
    "ernie4_5-moe",
    "gpt-oss",
    "llama3",
    "llama-tied-biases",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "e2b",
    "26b",
]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_as_folder_is_what_transformers_runs(name: str, tmp_path: Path) -> None:
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    if name in FAMILIES:
        gemma(name, tmp_path / "hf")
    else:
        decoder(name, tmp_path / "hf", "qwen2" if "qwen" in name else "llama-bpe")
    write_gguf(tmp_path / "hf", file, "bf16")
    write_folder(file, out, "bf16")
    raw = json.loads((out / "config.json").read_text())
    ends = [1, 5] if name == "llama3" else 1
    assert (raw["dtype"], raw["eos_token_id"], raw["bos_token_id"]) == ("bfloat16", ends, 2)
    stored = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert stored.dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert text(out) == theirs
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    mine = Tokenizer.load(file)
    for line in lines(100):
        if line.strip() and unicodedata.is_normalized("NFC", line):  # Qwen's composes, which GGUF cannot say
            assert tokenizer.encode(line) == mine.encode(line)


def test_a_folder_from_a_file_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder("qwen3", tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", None)
    monkeypatch.setattr("paceline.convert.to_folder.SHARD", 60_000)
    seen: list[tuple[int, int]] = []
    size = write_folder(
        tmp_path / "m.gguf", tmp_path / "out", "f32", report=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (size, size)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    one, other = values(tmp_path / "hf"), values(tmp_path / "out")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("qwen3-biases", ConfigError, "architecture qwen3 has no place for layers.0.self_attn"),
        ("deepseek", UsageError, "is a deepseek_v3, of which no GGUF files are written: it runs as it is"),
        ("gemma2", LoadError, "gemma2 cannot say attention_scale=.*: run the folder"),
        ("ernie4_5-moe", LoadError, "ernie4_5-moe cannot say sparse=.*: run the folder"),
        ("granite4-nope", LoadError, "granite cannot say unturned=.*: run the folder"),
        ("gemma3", LoadError, "gemma3 cannot say attention_scale=.*: run the folder"),
        ("smollm3", LoadError, "smollm3 cannot say unturned=.*: run the folder"),
        ("lfm2-biases", ConfigError, "architecture lfm2 has no place for layers.0.conv"),
        ("qwen2-moe", LoadError, "qwen2moe cannot say sparse=.*: run the folder"),
        ("qwen3-moe-mixed", LoadError, "qwen3moe cannot say sparse=.*, renormalize=False: run the folder"),
    ],
)
def test_what_gguf_cannot_say_is_refused(
    name: str, error: type[PacelineError], message: str, tmp_path: Path
) -> None:
    decoder(name, tmp_path / "hf", **{key: DECODERS[name][1][key] for key in AS_GGUF.get(name, {})})
    with pytest.raises(error, match=message) as caught:
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf", None)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_other_tokenizers_and_quantized_weights_are_refused(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path / "words")
    with pytest.raises(ConfigError, match="of type WordLevel cannot be written as GGUF"):
        write_gguf(tmp_path / "words", tmp_path / "m.gguf", None)
    decoder("llama", tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    raw["pre_tokenizer"]["pretokenizers"][0] = {"type": "Whitespace"}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="cuts text in a way for which GGUF has no name"):
        write_gguf(tmp_path / "hf", tmp_path / "m.gguf", None)
    save_quantized(bundled("target"), tmp_path / "int8", "int8")
    with pytest.raises(UsageError, match="quantized already: convert the original"):
        write_gguf(tmp_path / "int8", tmp_path / "m.gguf", None)


def test_float16_holds_no_large_values(tmp_path: Path) -> None:
    model = decoder("llama", tmp_path / "hf")
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "hf")
    for write in (lambda: write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "f16"),
                  lambda: write_folder(tmp_path / "m32.gguf", tmp_path / "out", "f16")):  # fmt: skip
        if not (tmp_path / "m32.gguf").exists():
            write_gguf(tmp_path / "hf", tmp_path / "m32.gguf", "f32")
        with pytest.raises(UsageError, match="past float16's largest"):
            write()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "m32.gguf"}


def full(*args: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_nothing_is_left_after_a_full_disk_or_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file, out = bundled("target"), tmp_path / "m.gguf", tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_gguf(target, file, None, report=interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(to_gguf, "put", full)
        with pytest.raises(CapacityError, match=r"cannot write .*No space left on device.*: free space"):
            write_gguf(target, file, None)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
        with pytest.raises(CapacityError, match=r"takes 0.02 GB, of which 0.00 GB are free"):
            write_gguf(target, file, None)
    assert not list(tmp_path.iterdir())
    write_gguf(target, file, None)
    with pytest.raises(KeyboardInterrupt):
        write_folder(file, out, report=interrupted)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(CapacityError, match=r"cannot write .*No space left on device"):
            write_folder(file, out)
        patch.setattr(
            "safetensors.torch.save_file", mock.Mock(side_effect=SafetensorError("I/O error: quota"))
        )
        with pytest.raises(CapacityError, match=r"cannot write .*quota"):
            write_folder(file, out)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_there_is_replaced_by_force_alone(tmp_path: Path) -> None:
    target, file, out = bundled("target"), tmp_path / "m.gguf", tmp_path / "out"
    file.write_text("mine")
    with pytest.raises(UsageError, match="exists already: name another with -o, or give --force"):
        write_gguf(target, file, None)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(target, file, None, force=True, report=interrupted)
    assert file.read_text() == "mine"
    write_gguf(target, file, "q8_0", force=True)
    assert Gguf(file)["general.file_type"] == 7
    out.mkdir()
    write_folder(file, out)  # an empty folder is free
    (out / "extra").touch()
    with pytest.raises(UsageError, match="exists already"):
        write_folder(file, out)
    write_folder(file, out, force=True)
    assert not (out / "extra").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").touch()
    with pytest.raises(UsageError, match="holds no model, so it is not replaced"):
        write_folder(file, tmp_path / "mine", force=True)
    with pytest.raises(UsageError, match="is no folder: make it first"):
        write_gguf(target, tmp_path / "no" / "m.gguf", None)
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "out", "mine"}


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[convert\]'"):
        write_gguf(bundled("target"), tmp_path / "m.gguf", None)
    assert not list(tmp_path.iterdir())


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "convert", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_command_there_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "d.gguf"
    assert call(monkeypatch, "demo", "-o", str(file), "--to", "q8_0", "--drafter", "auto") == 0
    said = capsys.readouterr()
    assert f"{file}: 10.0 MB" in said.out
    assert f"{tmp_path / 'd-assistant.gguf'}: " in said.out
    assert "note: d.gguf: GGUF cannot say how this tokenizer cuts text" in said.err
    assert call(monkeypatch, "demo", "-o", str(file), "--to", "q8_0", "--force") == 0
    assert call(monkeypatch, "demo", "-o", str(tmp_path / "m.gguf"), "--drafter", "model") == 0
    assert (tmp_path / "m-draft.gguf").is_file()
    assert call(monkeypatch, str(file), "-o", str(tmp_path / "out"), "--to", "f16") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("demo", "-o", "out"), "give a name that ends in .gguf"),
        (("m.gguf", "-o", "n.gguf"), "m.gguf is a GGUF file already, which is converted to a folder"),
        (
            ("m.gguf", "-o", "out", "--to", "q4_0"),
            "a folder holds f32, bf16, f16; `paceline quantize` writes",
        ),
        (("m.gguf", "-o", "out", "--drafter", "demo"), "convert the drafter's file by itself"),
        (("demo", "-o", "n.gguf", "--drafter", "ngram"), "there is no model to convert (as asked)"),
        (("demo", "-o", "m.gguf"), "exists already"),
    ],
)
def test_the_command_refuses_in_one_line(
    args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
