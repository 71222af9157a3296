"""Towers in an mmproj file beside a GGUF model: written, read back, chosen, and the same answers as from the folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForImageTextToText

from media_models import ID, SPECIAL, VOCAB, build_seeing, file_of, picture, tone
from paceline import LLM
from paceline.checkpoints.gguf.projector import Projector, checkpoint_name, stored_name
from paceline.cli.convert import command as convert
from paceline.convert.projector import write_projector
from paceline.convert.to_gguf import write_gguf
from paceline.errors import LoadError, WeightsError
from paceline.hub.gguf import choose, towers_of
from paceline.hub.names import HubName
from paceline.media.beside import projector_of
from paceline.media.build import describe_media
from paceline.models.config import read_config
from paceline.models.towers.load import stored_towers

OPTIONS: dict[str, Any] = {"activations": "float32", "threads": 1, "max_model_len": 512, "cache_memory": 2**26,
                           "profile_dir": "none", "drafter": "none", "image_tokens": 70}  # fmt: skip
ASKED = [
    {
        "role": "user",
        "content": [{"type": "image", "image": file_of(picture(100, 70))}, {"type": "text", "text": "a"}],
    }
]
HEARD = [{"role": "user", "content": [{"type": "audio", "audio": (tone(0.5), 16_000)}]}]
SAID = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_every_name_is_one_that_llama_cpp_has(tmp_path: Path) -> None:
    kinds = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]}
    for kind in ("e2b", "moe26b", "unified12b"):
        folder = tmp_path / kind
        build_seeing(kind, folder)
        unified = kind == "unified12b"
        for shapes, _ in stored_towers(folder, read_config(folder)).values():
            for name in shapes:
                stored = stored_name(name, unified)
                assert checkpoint_name(stored, unified) == name
                base = stored.removesuffix(".weight").removesuffix(".bias")
                base = base.rpartition(".")[0] if base.endswith(("_min", "_max")) else base
                numbered = [
                    base.replace(f".{i}.", ".{bid}.").replace(f"{i}.norm", "{bid}.norm") for i in range(5)
                ]
                numbered += [base[:-1] + "{bid}" if base[-1].isdigit() else base]
                assert unified or kinds & {base, *numbered}, stored


def gemma_tokenizer(folder: Path) -> None:
    """Bytes and one merge: GGUF has no place for the byte-level tokenizer of the other tests."""
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    vocabulary = ID | {letter: len(SPECIAL) + i for i, letter in enumerate(letters)}
    backend = Tokenizer(
        models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_special_tokens(SPECIAL)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["e2b", "dense31b"])
def test_a_gguf_model_sees_what_its_folder_sees(kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "files"
    out.mkdir()
    build_seeing(kind, folder, vocab_size=VOCAB + 3, vocab_size_per_layer_input=VOCAB + 3)
    gemma_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"suppress_tokens": [8, 11]}')
    write_gguf(folder, out / "m.gguf", "f32")
    assert read_config(out / "m.gguf")["suppress_tokens"] == [8, 11]
    write_projector(folder, out / "mmproj-m.gguf", "f32")
    back = tmp_path / "back"
    convert.main([str(out / "m.gguf"), "-o", str(back), "--to", "f32"], standalone_mode=False)
    _, loaded = AutoModelForImageTextToText.from_pretrained(back, output_loading_info=True)
    assert not any(loaded.values()), loaded
    both = []
    for source in (folder, out / "m.gguf", back):
        with LLM(source, **OPTIONS) as llm:
            talks = [ASKED, HEARD] if kind == "e2b" else [ASKED]
            both.append(
                [
                    (llm.chat(talk, **SAID)[0].token_ids, llm.render(talk)[0].media[0].vectors)
                    for talk in talks
                ]
            )
            if kind == "dense31b":
                assert llm.reader is not None
                assert llm.render(ASKED)[0].media[0].together
    for (ids, one), *others in zip(*both, strict=True):
        for other_ids, other in others:
            assert (one - other).abs().max() < 1e-6 * one.abs().max()
            assert ids == other_ids
    _choices(folder, out)


def _choices(folder: Path, out: Path) -> None:
    model = out / "m.gguf"
    write_projector(folder, out / "other-name.gguf", "bf16")
    found = projector_of(model, None, 48)
    assert isinstance(found, Projector)
    assert found.path.name == "other-name.gguf"  # bfloat16 before float32
    assert isinstance(projector_of(model, str(out / "mmproj-m.gguf"), 48), Projector)
    assert projector_of(model, None, 64) is None
    with pytest.raises(WeightsError, match="made for another model, of width 48"):
        projector_of(model, str(out / "mmproj-m.gguf"), 64)
    with pytest.raises(WeightsError, match="no mmproj file"):
        projector_of(model, str(model), 48)
    shutil.copy(out / "other-name.gguf", out / "again.gguf")
    assert "name one with --mmproj" in str(projector_of(model, None, 48))
    (out / "broken.gguf").write_bytes(b"GGUF")
    assert "again.gguf, mmproj-m.gguf, other-name.gguf" in str(projector_of(model, None, 48))
    for path in out.glob("*.gguf"):
        if path != model:
            path.unlink()
    said, wrong = describe_media(model)
    assert not wrong
    assert "none that fits is beside it" in said["pictures"]


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_values_come_back(kind: str, tmp_path: Path) -> None:
    for model in ("e2b", "unified12b"):
        folder, file = tmp_path / model, tmp_path / f"{model}.gguf"
        build_seeing(model, folder)
        write_projector(folder, file, kind)
        found = Projector(file)
        for shapes, take in stored_towers(folder, read_config(folder)).values():
            for name, shape in shapes.items():
                value, stored = take(name), found.tensor(name, shape)
                exact = kind == "f32" or found.model.tensors[found.names[name]].kind == "F32"
                near = 1e-6 if exact else 2**-7
                assert stored.shape == value.shape
                limit = near * float(value.abs().max())
                assert (stored.float() - value.float()).abs().max() <= limit, name
                if exact and "per_dim_scale" not in name:
                    assert torch.equal(stored.float(), value.float()), name
        with pytest.raises(LoadError, match="lacks the tensor"):
            found.check("vision_tower.none", (1,))
        with pytest.raises(LoadError, match="has the shape"):
            found.check("embed_vision.embedding_projection.weight", (5, 5))


def test_pull_takes_the_most_exact_file_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "m-mmproj-Q8_0.gguf"]
    monkeypatch.setattr("paceline.hub.gguf.listing", lambda hub: ("x", dict.fromkeys(names, 1)))
    assert towers_of(HubName("org/m")) == "org/m:mmproj-BF16.gguf"
    assert choose(HubName("org/m", tag="mmproj-BF16.gguf"), names) == ["mmproj-BF16.gguf"]
    names[:] = names[:1]
    assert towers_of(HubName("org/m")) is None
