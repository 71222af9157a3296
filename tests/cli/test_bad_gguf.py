"""GGUF files that cannot be run, by the command line: one line each, and nothing is allocated for what they claim."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from decoders import build_decoder
from paceline.cli import main
from paceline.convert.to_gguf import write_gguf
from small_tokenizers import SIZE, byte_level, fallback

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    build_decoder("llama3", folder / "hf", vocab_size=SIZE, num_hidden_layers=2)
    byte_level(folder / "hf")
    write_gguf(folder / "hf", folder / "good.gguf", "f32")
    return folder / "good.gguf"


def changed(good: Path, file: Path, **what: Any) -> Path:
    """`good` with other metadata (`...` removes a key) or, for `tensors`, without one or with another name."""
    reader, (gone, new) = gguf.GGUFReader(good), what.pop("tensors", ("", None))
    values = {
        ("general" if key == "architecture" else "llama") + "." + key.replace("__", "."): v
        for key, v in what.items()
    }
    writer = gguf.GGUFWriter(file, str(values.pop("general.architecture", "llama")))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in values:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        if add is not None:
            add(key, value)
    for tensor in reader.tensors:
        name = (new if tensor.name == gone else tensor.name) or ""
        if name:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture, *args: object) -> str:
    """What a command says that does not run."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, args)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (2, 3)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("paceline: ")
    return said


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"block_count": 2**31},
        "bad.gguf: llama: num_hidden_layers is 2147483648, not a whole number",
    ),
    "no heads": ({"attention__head_count": ...}, "bad.gguf lacks llama.attention.head_count in its metadata"),
    "heads": ({"attention__head_count_kv": 3}, "do not divide a width of 48: get another GGUF file"),
    "eps": ({"attention__layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps is nan"),
    "theta": ({"rope__freq_base": 0.0}, "rope_freqs.weight is not the scaling of Llama 3"),
    "experts": ({"expert_count": 8}, "lacks llama.expert_used_count in its metadata"),
    "missing": (
        {"tensors": ("blk.1.ffn_up.weight", None)},
        "do not fit its metadata: 1 missing (layers.1.mlp.up_proj",
    ),
    "unknown": (
        {"tensors": ("blk.1.ffn_up.weight", "blk.1.x.weight")},
        "'blk.1.x.weight' is not part of any llama",
    ),
    "architecture": ({"architecture": "mamba"}, "has the architecture 'mamba', which paceline does not run"),
    "picture": ({"architecture": "clip"}, "is the vision part of a model"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_cannot_be_run_is_one_line(
    case: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    changes, words = CHANGES[case]
    file = changed(good, tmp_path / "bad.gguf", **changes)
    for command in (
        ("info", "--no-measure", file),
        ("run", "x", "--target", file),
        ("convert", file, "-o", tmp_path / "o"),
    ):
        said = refused(monkeypatch, capsys, *command)
        assert words in said
        assert "config.json" not in said
    assert {*tmp_path.iterdir()} == {file}


@pytest.mark.parametrize(
    "command", ["info", "run", "check", "bench", "serve", "convert", "quantize", "generate"]
)
def test_a_download_that_broke_off(
    command: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = tmp_path / "half.gguf"
    file.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    more: dict[str, tuple[object, ...]] = {
        "run": ("x",), "serve": ("--port", 0), "convert": ("-o", tmp_path / "o"),
        "quantize": ("-o", tmp_path / "o", "--to", "int4"),
        "generate": (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl"),
    }  # fmt: skip
    said = refused(monkeypatch, capsys, command, *more.get(command, ()), "--target", file)
    assert "download it again" in said or "to quantize, name the safetensors checkpoint" in said


def test_other_places_for_a_file(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "no.gguf").write_bytes(b"PK" + bytes(99))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(good.read_bytes())
    build_decoder("llama", tmp_path / "hf", vocab_size=SIZE + 120)
    fallback(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "other.gguf", "f32")
    monkeypatch.chdir(tmp_path)
    for args, words in {
        ("--target", good, "--drafter", "no.gguf"): "no.gguf is no GGUF file",
        ("--target", good, "--adapter", good): "give the folder of a LoRA adapter",
        ("--target", "m-00001-of-00002.gguf"): "m-00002-of-00002.gguf is missing: download it too",
        ("--target", "none.gguf"): "there is no file none.gguf: check its name",
        ("--target", "hf/none.GGUF"): "there is no file hf/none.GGUF: check its name",
    }.items():
        assert words in refused(monkeypatch, capsys, "run", "x", *args)
