"""The reader against the PyPI package `gguf`, and every way a file can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.checkpoints.gguf.reader import Gguf, header, is_gguf
from paceline.errors import WeightsError
from paceline.hub.names import gguf_files
from real_models import smollm2_file


def written(path: Path, tensors: dict[str, np.ndarray] | None = None, **fields: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "é▁", "x" * 300])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, -2.0, -3.0])
    writer.add_array("flags", [True, False, True])
    writer.add_bool("yes", True)
    writer.add_float64("double", 1e300)
    writer.add_int64("negative", -(2**40))
    for name, data in (tensors or {"one": np.arange(64, dtype=np.float32).reshape(2, 32)}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(kvs: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + kvs + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_values_and_tensors_equal_those_of_the_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = {
        "m": rng.random((3, 64), np.float32),
        "v": rng.random(7, np.float32),
        "h": rng.random((2, 2, 4)).astype("f2"),
    }
    path = written(tmp_path / "a.gguf", data)
    mine, theirs = Gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            ours = mine[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents()
    assert len(mine) == len([k for k in theirs.fields if not k.startswith("GGUF.")])
    for name, values in data.items():
        assert mine.tensors[name].shape == values.shape
        assert np.array_equal(mine.floats(name), values.astype(np.float32))


def test_a_real_file_equals_the_package() -> None:
    path = smollm2_file()
    mine, theirs = Gguf(path), gguf.GGUFReader(path)
    assert [t.name for t in theirs.tensors] == list(mine.tensors)
    for other in theirs.tensors[:12]:
        ours = mine.tensors[other.name]
        assert (ours.kind, ours.shape) == (other.tensor_type.name, tuple(reversed(other.shape.tolist())))
        assert np.array_equal(mine.raw(other.name).ravel(), other.data.view(np.uint8).ravel())
    assert mine["tokenizer.ggml.tokens"][:5] == theirs.fields["tokenizer.ggml.tokens"].contents()[:5]


def test_version_2_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert Gguf(path)["llama.block_count"] == 2


WRONG = {
    "empty": (b"", "only 0 bytes"),
    "magic": (b"PK\x03\x04" + bytes(40), "no GGUF file"),
    "older": (b"tjgg" + bytes(40), "before August 2023"),
    "version 1": (raw(version=1) + bytes(40), "version 1, only 2 and 3"),
    "version 9": (raw(version=9) + bytes(40), "version 9, only 2 and 3"),
    "big-endian": (raw(version=3 << 24) + bytes(40), "big-endian"),
    "counts": (raw(counts=(10**12, 0)) + bytes(40), "1000000000000 tensors"),
    "entries": (raw(counts=(0, 2**63)) + bytes(40), "more than 64 bytes can hold"),
    "string": (raw(struct.pack("<Q", 2**62) + bytes(40), counts=(0, 1)), "goes past its end"),
    "value": (raw(text(b"k") + struct.pack("<IQ", 8, 2**40) + bytes(8), counts=(0, 1)), "goes past its end"),
    "value type": (raw(text(b"k") + struct.pack("<I", 77) + bytes(8), counts=(0, 1)), "has type 77"),
    "array": (raw(text(b"k") + struct.pack("<IIQ", 9, 8, 10**12), counts=(0, 1)), "goes past its end"),
    "numbers": (raw(text(b"k") + struct.pack("<IIQ", 9, 6, 2**62), counts=(0, 1)), "goes past its end"),
    "strings": (
        raw(text(b"k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<QQ", 2**40, 0), counts=(0, 1)),
        "inside an array of strings",
    ),
    "nested": (
        raw(text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, counts=(0, 1)), "GGUF does not know",
    ),
    "twice": (raw((text(b"k") + struct.pack("<IB", 0, 1)) * 2 + bytes(9), counts=(0, 2)), "'k' is there twice"),
    "tensor twice": (
        raw(tensors=tensor(b"t", (4,), 0, 0) + tensor(b"t", (4,), 0, 32) + bytes(200), counts=(2, 0)),
        "'t' is there twice",
    ),
    "overlap": (
        raw(tensors=tensor(b"t", (16,), 0, 0) + tensor(b"u", (4,), 0, 32) + bytes(200), counts=(2, 0)),
        "'t' and 'u' overlap",
    ),
    "past the end": (raw(tensors=tensor(b"t", (2**20,), 0, 0) + bytes(64), counts=(1, 0)), "after the end"),
    "huge": (raw(tensors=tensor(b"t", (2**62,) * 4, 0, 0) + bytes(64), counts=(1, 0)), "after the end"),
    "offset": (raw(tensors=tensor(b"t", (4,), 0, 2**63) + bytes(64), counts=(1, 0)), "after the end"),
    "aligned": (raw(tensors=tensor(b"t", (4,), 0, 4) + bytes(64), counts=(1, 0)), "multiple of 32"),
    "dims": (raw(tensors=text(b"t") + struct.pack("<I", 9) + bytes(64), counts=(1, 0)), "9 dimensions"),
    "zero": (raw(tensors=tensor(b"t", (4, 0), 0, 0) + bytes(64), counts=(1, 0)), "no whole number"),
    "part of a block": (raw(tensors=tensor(b"t", (40,), 2, 0) + bytes(64), counts=(1, 0)), "of Q4_0 blocks"),
    "type": (raw(tensors=tensor(b"t", (256,), 15, 0) + bytes(999), counts=(1, 0)), "has type Q8_K"),
    "unknown type": (raw(tensors=tensor(b"t", (4,), 999, 0) + bytes(64), counts=(1, 0)), "type number 999"),
    "alignment": (
        raw(text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(9), counts=(0, 1)), "not a power of two",
    ),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    "page": (b"<!doctype html><html></html>" + bytes(20), "web page"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_files_are_one_line(case: str, tmp_path: Path) -> None:
    data, message = WRONG[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError) as error:
        Gguf(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_cut_off_anywhere_is_said(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.gguf").read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            Gguf(tmp_path / "cut.gguf")


def test_damage_anywhere_never_ends_in_another_error(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    read = 0
    for at in range(len(whole) - 300):
        for bit in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                model = Gguf(path)
            except WeightsError:
                continue
            read += 1
            for key in model:
                model[key]
    assert read  # a changed value is no damage that can be seen


def test_a_header_is_whole_when_its_last_byte_is_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", {"one": np.ones((2, 32), np.float32), "two": np.ones(3, np.float32)})
    whole, model = path.read_bytes(), Gguf(path)
    end = model.tensors["one"].offset  # less what fills it up to a multiple of 32
    for have in range(24, len(whole)):
        path.write_bytes(whole[:have] + bytes(len(whole) - have))
        complete, said = header(path, have)
        assert complete or have < end
        assert not complete or have > end - 32
        assert all(said[key] == model[key] for key in said)
    path.write_bytes(b"GGUX" + whole[4:])
    with pytest.raises(WeightsError, match="no GGUF file"):
        header(path, 100)


def test_capitals_are_the_same_format(tmp_path: Path) -> None:
    for file in split(tmp_path):
        file.rename(file.with_suffix(".GGUF"))
    assert is_gguf(file)
    assert len(Gguf(tmp_path / "m-00001-of-00003.GGUF").tensors) == 3
    assert gguf_files(tmp_path) == sorted(tmp_path.iterdir())


def split(folder: Path, parts: int = 3) -> list[Path]:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for i in range(parts):
        writer.add_tensor(f"t{i}", np.full(32, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_split_files_are_one_model_from_any_part(tmp_path: Path) -> None:
    files = split(tmp_path)
    assert len(files) == 3
    for file in files:
        model = Gguf(file)
        assert model["general.architecture"] == "llama"
        assert [model.floats(f"t{i}")[0] for i in range(3)] == [0, 1, 2]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00003\.gguf is missing"):
        Gguf(files[0])


def test_a_part_under_another_name_is_said(tmp_path: Path) -> None:
    files = split(tmp_path)
    with pytest.raises(WeightsError, match="model in 3 files, of which 1"):
        Gguf(files[0].rename(tmp_path / "model.gguf"))


def test_parts_that_lack_a_tensor_are_said(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[2].write_bytes(raw() + bytes(40))
    with pytest.raises(WeightsError, match="hold 2 tensors where the first says 3"):
        Gguf(files[0])


def test_a_long_vocabulary_is_opened_without_its_strings(tmp_path: Path) -> None:
    """262,144 tokens: what opening allocates is far below what the strings take."""
    import tracemalloc

    words = [f"token number {i}" for i in range(262_144)]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    model = Gguf(tmp_path / "a.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert model["tokenizer.ggml.tokens"] == words


def test_what_is_kept_of_a_header_is_read_again_when_the_file_has_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf")
    first = Gguf(path)
    other = written(tmp_path / "b.gguf", {"another": np.zeros((1, 32), np.float32)})
    other.replace(path)
    second = Gguf(path)
    assert (list(first.tensors), list(second.tensors)) == (["one"], ["another"])
    assert Gguf(path).tensors == second.tensors
