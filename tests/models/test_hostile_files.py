"""Files that anyone may have written, made to hang, to fill the memory or to write into a terminal: one line each."""

from __future__ import annotations

import base64
import errno
import fcntl
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.client import Endpoint
from paceline.checkpoints.gguf.reader import Gguf, is_gguf
from paceline.checkpoints.safetensors_file import read_header
from paceline.cli import main
from paceline.errors import (
    CapacityError,
    ConfigError,
    LoadError,
    PacelineError,
    PromptError,
    UsageError,
    WeightsError,
    sized,
)
from paceline.files import MOST_BYTES, parsed, read_json
from paceline.hub.repository import readable_errors
from paceline.kv.plan import plan_pages
from paceline.media.pixels import size_of
from paceline.models.adapter import fits
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

# tokenizer.json


def folder_with(folder: Path, **parts: Any) -> Path:
    """A small tokenizer.json, with some of its parts exchanged."""
    letters = {letter: i for i, letter in enumerate("abcdefgh")}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": letters, "merges": [], "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole | parts), encoding="utf-8")
    return folder


def test_padding_and_truncation_of_a_file_never_come_into_play(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    truncation = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    assert Tokenizer.load(folder_with(tmp_path, padding=padding, truncation=truncation)).encode("abc") == [
        0,
        1,
        2,
    ]
    multiple = padding | {"strategy": "BatchLongest", "pad_to_multiple_of": 2**40}
    assert Tokenizer.load(folder_with(tmp_path, padding=multiple)).encode("abc") == [0, 1, 2]


def replaces(content: str, pattern: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def charsmap(text: bytes) -> dict[str, Any]:
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(struct.pack("<I", 4) + b"\0\0\0\0" + text + b"\0").decode(),
    }


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replaces("a" * 16)] * 8}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 2**20}},
        {"normalizer": replaces("a" * 40)},
        {"normalizer": replaces("a" * 400, {"Regex": "[a-h]*"})},
        {"decoder": {"type": "Sequence", "decoders": [replaces("a" * 16)] * 8}},
    ],
)
def test_a_tokenizer_whose_steps_grow_without_end(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"makes a text more than 16 times longer.*: download it again$"):
        Tokenizer.load(folder_with(tmp_path, **parts))


def test_a_table_of_a_normalizer_that_writes_long_texts(tmp_path: Path) -> None:
    with pytest.raises(LoadError):  # the library may refuse the table by itself
        Tokenizer.load(folder_with(tmp_path, normalizer=charsmap(b"a" * 10_000)))


def test_a_regular_expression_of_a_tokenizer_that_backtracks(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.load(folder_with(tmp_path, pre_tokenizer=split))
    for text in ("a" * 60 + "b", "a" * 3000 + "b"):
        with pytest.raises(PromptError, match="gives up on this text"):
            tokenizer.encode(text)
    assert tokenizer.encode("b") == [1]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_file_of_a_hundred_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    with (folder_with(tmp_path) / name).open("wb") as file:
        file.truncate(100 * 2**30)  # sparse
    with pytest.raises(LoadError, match=r"has 107374182400 bytes, too many"):
        Tokenizer.load(tmp_path)


# small files


@pytest.mark.parametrize(
    "text", ['{"a": ' + "9" * 41 + "}", '{"a": -' + "9" * 5000 + "}", '{"a": [' + "1" * 4000 + "]}"]
)
def test_numbers_of_many_digits(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(LoadError, match=r"not readable JSON \(a number of \d+ digits\)"):
        read_json(path)


def test_what_transformers_writes_for_no_limit_is_a_number() -> None:
    assert parsed('{"model_max_length": 1000000000000000019884624838656}') == {"model_max_length": int(1e30)}


def test_a_small_file_that_is_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(LoadError, match="too many for what it should be"):
        read_json(path)


# safetensors


def header(path: Path, entries: object) -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def tensor(shape: list[int], end: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


LARGE = b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 0]}}'


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (LARGE % b", ".join([b"9" * 4000] * 2000), "its header is not JSON"),
        (LARGE % (b"9" * 5000), "its header is not JSON"),
        (LARGE % b", ".join([b"9" * 30] * 2000), "a has 2000 axes"),
        ({"a": tensor([10**18] * 60)}, "a takes 0 bytes where its shape needs"),
        ({f"t{i}": tensor([0]) for i in range(70_000)}, "lists 70000 tensors, more than 65536"),
    ],
)
def test_headers_that_cost_minutes(tmp_path: Path, entries: object, words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        read_header(header(tmp_path / "model.safetensors", entries))
    assert len(str(caught.value)) < 2100


@pytest.mark.parametrize(
    "name", ["a" * 2**20, "\x1b[31mred\x1b[0m", "a\nb", "a\u202eb", "\x9b31m", "x " * 2**20]
)
def test_names_reach_no_terminal_as_they_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read_header(header(tmp_path / "model.safetensors", {name: tensor([1])}))
    said = str(caught.value)
    assert len(said) < 2100
    assert said.isprintable()
    assert said.endswith(": download it again")


def test_a_long_path_stays_readable() -> None:
    path = "/models/" + "deep/" * 60 + "model.safetensors"
    assert path in str(LoadError(f"{path} is gone: download it again"))


# adapters


@pytest.mark.parametrize(
    ("key", "module", "fitting"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.qq_proj", False),
        ("q_proj", "q_proj", True),
        ("0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", False),
        ("layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q.proj", "model.layers.0.self_attn.q_proj", True),
        ("^model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("^layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", False),
        (r"layers\.(0|1)\..*up_proj$", "model.layers.1.mlp.up_proj", True),
        (r"layers\.(0|1)\..*up_proj", "model.layers.2.mlp.up_proj", False),
        (r".*\.[qk]_proj", "model.layers.0.self_attn.k_proj", True),
        (r"layers\.\d+\.mlp\.\w+", "model.layers.17.mlp.down_proj", True),
        ("(([a-z._0-9]+)+)+X", "model.layers.0.self_attn.q_proj" * 8, False),
        ("(a|a)*b|(.*)*z", "a" * 200, False),
    ],
)
def test_patterns_of_adapters_are_matched_without_backtracking(key: str, module: str, fitting: bool) -> None:
    assert fits(key, module) is fitting


@pytest.mark.parametrize("key", ["(", r"(a)\1", "a(?=b)", "[z-a]"])
def test_patterns_that_cannot_be_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match="is no pattern that can be matched without backtracking"):
        fits(key, "model.layers.0.mlp.up_proj")


# templates


@pytest.mark.parametrize("source", ["{{ 1 }}" * 500_000, "{# " + "a" * 2**19 + " #}"])
def test_a_template_that_is_too_long_is_not_compiled(source: str) -> None:
    with pytest.raises(
        UsageError, match=r"chat template has \d+ characters, more than the 262144 that are read"
    ):
        ChatTemplate(source, {})


# pictures


@pytest.mark.parametrize("size", [(20_000, 20_000), (60_000, 60_000), (16_400, 10), (8_000, 8_000)])
def test_a_picture_that_is_too_large_is_called_so(size: tuple[int, int]) -> None:
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", *size, 8, 2, 0, 0, 0)
    import zlib

    png += struct.pack(">I", zlib.crc32(png[12:]))
    png += struct.pack(">I4s", 0, b"IDAT") + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(PromptError, match="is too large: at most 16384 a side and 50 million pixels"):
        size_of(io.BytesIO(png).getvalue())


# sizes


def test_sizes_are_said_in_a_unit_that_says_something() -> None:
    assert [sized(n) for n in (0, 700, 3000, 5 * 2**20, 3 * 2**30)] == [
        "0 B",
        "700 B",
        "2.9 KiB",
        "5.0 MiB",
        "3.00 GiB",
    ]
    with pytest.raises(CapacityError, match=r"needs [\d.]+ [KM]iB of K/V cache and 1000 B are free"):
        _too_small()


def _too_small() -> None:
    class Small:
        kinds, states, windows = ("full",), (), {"full": None}

        def bytes_per_token(self, itemsize: int) -> dict[str, int]:
            return {"full": 8 * itemsize}

    plan_pages(Small(), budget=1000, itemsize=4, max_sequences=1, max_tokens=64, chunk=16)  # type: ignore[arg-type]


# generate


def test_two_runs_never_write_to_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr("sys.argv", ["paceline", "generate", str(source), "-o", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert f"{out} is in use by another run" in capsys.readouterr().err
    assert out.read_bytes() == b""


# proxies


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://127.0.0.1:1", "socks4://x"])
def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(
        UsageError, match=r"the proxy in the environment cannot be used \(.*socksio|correct it"
    ):
        Endpoint("http://example.org:8000")
    Endpoint("http://localhost:8000")  # no proxy is asked for this machine


def test_a_proxy_of_the_hub_is_one_line() -> None:
    with (
        pytest.raises(LoadError, match="for a SOCKS proxy `pip install socksio`"),
        readable_errors("org/name"),
    ):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")


# GGUF by its beginning


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    for name, data, found in (
        ("sha256-0123", b"GGUF\3\0\0\0", True), ("model", b"GGUF", True), ("model.bin", b"PK\3\4", False),
        ("model.safetensors", b"GGUF", False), ("empty", b"", False), ("model.gguf", b"", True),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert is_gguf(tmp_path / name) is found, name
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "gone")


def test_every_error_is_one_line() -> None:
    assert str(PacelineError("a\x1b[2Jb\r\nc\u2028d")) == r"a\x1b[2Jb\r\nc\u2028d"
    assert str(UsageError(5)) == "5"
    assert str(UsageError()) == ""


# what the operating system refuses


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EACCES, "change its permissions"), (errno.ENOMEM, "free memory"), (errno.EMFILE, "ulimit -n")],
)
def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path, monkeypatch, number, advice):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, "refused")

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(bytes(64))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LoadError, match=f"refused.*{advice}"):
        read_json(tmp_path / "config.json")
    with pytest.raises(WeightsError, match=f"refused.*{advice}"):
        Gguf(tmp_path / "x.gguf")
