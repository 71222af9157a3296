"""Meta's layout as a folder: values and tokens are equal, and a pickle that is more than tensors is refused."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from heads_files import build_meta
from paceline.checkpoints.loading import read_entries
from paceline.cli import main
from paceline.convert import to_folder
from paceline.convert.from_meta import convert_meta
from paceline.convert.vocabulary import vocabulary
from paceline.errors import ConfigError, LoadError, PacelineError, UsageError, WeightsError
from paceline.text.tokenizer import Tokenizer
from small_tokenizers import SIZE, byte_level, fallback, lines

ROWS = SIZE + 120


def number(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(at: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return number(at << 3 | 2) + number(len(value)) + value
    if isinstance(value, float):
        return number(at << 3 | 5) + struct.pack("<f", value)
    return number(at << 3) + number(value % 2**64)


def spm(folder: Path, file: Path, *, kind: int = 2, chars_map: bytes = b"", squeezes: int = 0) -> None:
    """The tokenizer in `folder` as a tokenizer.model."""
    said = vocabulary(Tokenizer.load(folder), ROWS, False, folder)
    pieces = zip(said["ggml.tokens"], said["ggml.scores"], said["ggml.token_type"], strict=True)
    data = b"".join(
        field(1, field(1, token.encode()) + field(2, float(score)) + (field(3, t) if t != 1 else b""))
        for token, score, t in pieces
    )
    data += field(
        2,
        field(1, b"corpus.txt") + field(3, kind) + field(40, 3) + field(41, 2) + field(42, 1) + field(43, -1),
    )
    data += field(3, field(1, b"identity") + field(2, chars_map) + field(3, 1) + field(4, squeezes))
    file.write_bytes(data)


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return build_meta(tmp_path / "meta", rows=ROWS)


def test_values_are_metas_own(meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under our names, in several files where they are large; the rows of q and k go back to where Meta has them."""
    monkeypatch.setattr(to_folder, "SHARD", 100_000)
    size, notes = convert_meta(meta, tmp_path / "out")
    assert notes == [
        "there is no tokenizer.model: put the model's tokenizer.json into the new folder before you run it"
    ]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    made = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert size == sum(tensor.nbytes for tensor in made.values())
    theirs = torch.load(meta / "consolidated.pth", weights_only=True)
    assert len(made) == len(theirs) - 1  # the rotary frequencies are computed
    for k in range(3):
        at = f"extra_heads.{k}"
        assert torch.equal(made[f"{at}.mlp.down_proj.weight"], theirs[f"{at}.feed_forward.w2.weight"])
        q = made[f"{at}.self_attn.q_proj.weight"].view(4, 2, 6, 48).transpose(1, 2).reshape(48, 48)
        assert torch.equal(q, theirs[f"{at}.attention.wq.weight"])
    assert torch.equal(made["model.layers.2.mlp.gate_proj.weight"], theirs["layers.2.feed_forward.w1.weight"])
    assert torch.equal(made["lm_head.weight"], theirs["output.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["n_future_tokens"], config["dtype"]) == (3, 4, "float32")
    convert_meta(meta, tmp_path / "out", "bf16", force=True)
    assert {entry.dtype for entry in read_entries(tmp_path / "out").values()} == {"BF16"}


def test_transformers_runs_the_trunk(meta: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from heads_files import meta_forward

    convert_meta(meta, tmp_path / "out")
    tokens = [3, 50, 7, 90, 14, 300]
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor([tokens])).logits[0]
    right = meta_forward(meta, tokens)[:, 0]
    assert float((logits - right).abs().max()) < 1e-4 * float(right.abs().max())


def test_one_head_is_a_plain_llama(tmp_path: Path) -> None:
    meta = build_meta(tmp_path / "meta", n_future_tokens=1, max_seq_len=None)
    _, notes = convert_meta(meta, tmp_path / "out")
    assert notes[0].startswith("params.json names no max_seq_len: config.json gets a context of 4096 tokens")
    assert "n_future_tokens" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not [name for name in read_entries(tmp_path / "out") if name.startswith("extra")]


@pytest.mark.parametrize("above", [False, True])
def test_the_tokenizer_is_sentencepieces(above: bool, meta: Path, tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    fallback(folder, prefixed=True)
    spm(folder, (tmp_path if above else meta) / "tokenizer.model")
    assert convert_meta(meta, tmp_path / "out")[1] == []
    one, other = Tokenizer.load(folder), Tokenizer.load(tmp_path / "out")
    for line in lines(100):
        assert one.encode(line) == other.encode(line)
    assert (other.bos_id, other.eos_ids, other.adds_bos) == (2, (1,), True)
    with paceline.LLM(str(tmp_path / "out"), max_model_len=64, profile_dir="none") as llm:
        done = llm.generate("emoji and a line", paceline.SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert len(done.token_ids) == 8


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


def spoilt(folder: Path, **tensors: Any) -> None:
    held = torch.load(folder / "consolidated.pth", weights_only=True)
    held |= {name.replace("__", "."): value for name, value in tensors.items()}
    torch.save(
        {name: value for name, value in held.items() if value is not None}, folder / "consolidated.pth"
    )


def said(folder: Path, **changes: Any) -> None:
    file = folder / "params.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def words(folder: Path, **how: Any) -> None:
    fallback(folder, prefixed=True)
    spm(folder, folder / "tokenizer.model", **how)


BAD: dict[str, tuple[Any, type[PacelineError], str]] = {
    "code": (lambda f: torch.save({"x": Harmful()}, f / "consolidated.pth"), WeightsError, "only files of torch.save"),
    "no tensors": (lambda f: torch.save({"x": 3}, f / "consolidated.pth"), WeightsError, "does not hold tensors"),
    "a list": (lambda f: torch.save([torch.ones(2)], f / "consolidated.pth"), WeightsError, "does not hold tensors"),
    "an old file": (
        lambda f: torch.save({}, f / "consolidated.pth", _use_new_zipfile_serialization=False), WeightsError,
        "is not read"),
    "half a file": (
        lambda f: (f / "consolidated.pth").write_bytes((f / "consolidated.pth").read_bytes()[:5000]), WeightsError,
        "is not read"),
    "a pointer": (
        lambda f: (f / "consolidated.pth").write_text("version https://git-lfs.github.com/spec/v1\n"), LoadError,
        "is a Git LFS pointer"),
    "parts": (
        lambda f: (f / "consolidated.01.pth").write_bytes(b""), LoadError, "holds consolidated.01.pth, consolidated.pth"),
    "no file": (lambda f: (f / "consolidated.pth").unlink(), LoadError, "holds no consolidated.pth"),
    "a missing tensor": (
        lambda f: spoilt(f, extra_heads__1__ffn_norm__weight=None), WeightsError,
        "extra_heads.1.ffn_norm.weight is missing"),
    "no weights": (lambda f: torch.save({}, f / "consolidated.pth"), WeightsError, "tok_embeddings.weight is missing"),
    "another tensor": (
        lambda f: spoilt(f, extra_heads__3__x=torch.ones(2)), WeightsError, "extra_heads.3.x is not described"),
    "another trunk's": (
        lambda f: spoilt(f, extra_heads__0__attention__wq__weight=torch.ones(48, 40)), WeightsError,
        "extra_heads.0.attention.wq.weight is [48, 40]"),
    "whole numbers": (
        lambda f: spoilt(f, norm__weight=torch.ones(48).long()), WeightsError, "norm.weight is [48] of torch.int64"),
    "no params": (lambda f: (f / "params.json").write_text("{"), LoadError, "is not readable JSON"),
    "an empty params": (lambda f: (f / "params.json").write_text("{}"), ConfigError, "params.json: llama lacks n_heads"),
    "a size that is none": (lambda f: said(f, dim="wide"), ConfigError, "dim is 'wide', not a whole number"),
    "heads that do not divide": (lambda f: said(f, n_heads=5), ConfigError, "do not divide a width of 48"),
    "more heads than layers": (lambda f: said(f, n_future_tokens=7), ConfigError, "n_future_tokens=7 with"),
    "fewer heads than said": (lambda f: said(f, n_future_tokens=5), WeightsError, "3.attention_norm.weight is missing"),
    "another rotation": (lambda f: said(f, use_scaled_rope=True), ConfigError, "use_scaled_rope=True is not known"),
    "unigrams": (lambda f: words(f, kind=1), ConfigError, "tokenizer.model is no BPE"),
    "other characters": (lambda f: words(f, chars_map=b"xx"), ConfigError, "tokenizer.model normalizes texts"),
    "fewer spaces": (lambda f: words(f, squeezes=1), ConfigError, "tokenizer.model normalizes texts"),
    "noise": (lambda f: (f / "tokenizer.model").write_bytes(b"\x0a\xff\xff"), LoadError, "cannot be read as"),
    "no tokens": (lambda f: (f / "tokenizer.model").write_bytes(b""), LoadError, "holds no tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_is_no_such_model_is_refused_in_one_line(
    case: str, meta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, error, message = BAD[case]
    spoil(meta)
    with pytest.raises(error, match=re.escape(message)) as caught:
        convert_meta(meta, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]
    assert "run" not in capsys.readouterr().out


def test_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    meta = build_meta(tmp_path / "meta")
    words(meta)
    with pytest.raises(ConfigError, match=f"has {ROWS} tokens for a model of 96"):
        convert_meta(meta, tmp_path / "out")


def test_the_command(
    meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["paceline", *args])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    out = tmp_path / "out"
    assert call("convert", str(meta), "-o", str(out), "--to", "f16") == 0
    got = capsys.readouterr()
    assert f"{out}: 0.3 MB" in got.out
    assert "note: out: there is no tokenizer.model" in got.err
    byte_level(out)
    assert call("info", str(out), "--no-measure") == 0
    got = capsys.readouterr()
    assert "not loaded parallel heads: " in got.out
    assert f"heads+ngram: {out} holds 3 parallel heads" in got.out
    assert call("info", str(meta), "--no-measure") == 3
    assert "is in Meta's layout: `paceline convert" in capsys.readouterr().err
    assert call("convert", str(out), "-o", str(tmp_path / "m.gguf")) == 0
    assert "note: m.gguf: the parallel heads are left out" in capsys.readouterr().err
    for args, message in {
        ("-o", str(tmp_path / "m.gguf")): "is in Meta's layout, which is converted to a folder",
        ("-o", str(out)): "exists already",
        ("-o", str(tmp_path / "n"), "--to", "q8_0"): "a folder holds f32, bf16, f16",
        ("-o", str(tmp_path / "n"), "--drafter", "demo"): "convert the drafter's file by itself",
    }.items():
        assert call("convert", str(meta), *args) == 2
        assert message in capsys.readouterr().err
    spoilt(meta, norm__weight=torch.full((48,), 1e6))
    with pytest.raises(UsageError, match="past float16's largest"):
        convert_meta(meta, tmp_path / "n", "f16")
