"""Sound: WAV files of all kinds, resampling, mel features, soft tokens and logits as transformers computes them."""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from media_models import ID, build_seeing, file_of, picture, tone, wav
from paceline import LLM, UsageError
from paceline.errors import PromptError
from paceline.media.sound import read_samples, resampled
from paceline.models.config import read_config
from paceline.models.towers.gemma4_audio import features, frames_of
from paceline.models.towers.load import stored_towers

LENGTHS = [162, 320, 321, 5600, 16_000, 68_800]  # samples at 16 kHz


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_wav_of_all_widths(bits: int) -> None:
    samples = tone(0.3)
    stereo = np.stack([samples, -samples * 0.5], axis=1)
    assert np.abs(read_samples(wav(samples, bits=bits)) - samples).max() < 2.0 ** (2 - bits) + 1e-6
    assert np.abs(read_samples(wav(stereo, bits=bits)) - samples / 4).max() < 2.0 ** (2 - bits) + 1e-6


def test_floating_wav_and_streams() -> None:
    samples = tone(0.2)
    form = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    head = (
        b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", len(form)) + form + b"LIST\x03\x00\x00\x00abc\x00"
    )
    data = head + b"data\xff\xff\xff\xff" + samples.tobytes()  # sizes as a pipe writes them
    assert np.array_equal(read_samples(data), samples)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_keeps_tones(rate: int) -> None:
    t = np.arange(rate // 2) / rate
    out = resampled(np.sin(2 * np.pi * 440 * t).astype(np.float32), rate, 16_000)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(out)) / 16_000)
    assert len(out) == 8000
    assert np.abs(out - expected)[100:-100].max() < 2e-3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"RIFF\x00\x00\x00\x00WAVE", "no format"),
        (b"ID3 no sound", "no sound of a known kind"),
        (wav(tone(0.01)), "too few"),
        (wav(tone(31.0, 8000), 8000), "split it"),
    ],
    ids=["empty", "bare", "text", "short", "long"],
)
def test_bad_sound(kit: Any, data: bytes, message: str) -> None:
    _, llm = kit
    if message == "too few" and "12b" in str(llm):
        return
    with pytest.raises(PromptError, match=message):
        llm.chat([{"role": "user", "content": [{"type": "audio", "audio": data}]}])


@pytest.mark.parametrize("length", LENGTHS)
def test_features(length: int) -> None:
    samples = tone(5)[:length]
    theirs = Gemma4AudioFeatureExtractor()([samples], return_tensors="np")
    mask = np.asarray(theirs["input_features_mask"])[0]
    mine = features(samples)
    assert len(mine) == mask.sum() == frames_of(length)
    assert np.abs(mine - np.asarray(theirs["input_features"])[0][mask]).max() < 1e-5


@pytest.fixture(scope="module", params=["e2b", "unified12b"])
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = build_seeing(request.param, folder)
    options = {
        "threads": 1,
        "max_model_len": 1024,
        "cache_memory": 2**26,
        "activations": "float32",
        "image_tokens": 70,
    }
    with LLM(folder, drafter="ngram", profile_dir="none", **options) as llm:
        yield theirs, llm


@pytest.mark.parametrize("length", LENGTHS)
def test_soft_tokens(kit: Any, length: int) -> None:
    theirs, llm = kit
    samples = tone(5)[:length]
    prompt, _ = llm.render([{"role": "user", "content": [{"type": "audio", "audio": (samples, 16_000)}]}])
    (item,) = prompt.media
    if theirs.config.model_type == "gemma4_unified":
        frames = torch.zeros(-(-length // 640) * 640)
        frames[:length] = torch.from_numpy(samples)
        given, mask = frames.view(1, -1, 640), None
    else:
        found = Gemma4AudioFeatureExtractor()([samples], return_tensors="pt")
        given, mask = found["input_features"], found["input_features_mask"]
    with torch.no_grad():
        out = theirs.model.get_audio_features(given, mask, return_dict=True)
    expected = out.pooler_output[0] if mask is None else out.pooler_output[out.attention_mask]
    assert item.vectors.shape == expected.shape
    assert (item.vectors - expected).abs().max() < 1e-5 * expected.abs().max()
    assert prompt[item.start - 1] == ID["<|audio>"]
    assert prompt[item.end] == ID["<audio|>"]
    assert not item.together


def test_sound_beside_a_picture_with_a_drafter(kit: Any) -> None:
    _, llm = kit
    content = [{"type": "audio", "audio": (tone(1), 16_000)}, {"type": "text", "text": "and "},
               {"type": "image", "image": file_of(picture(100, 70))}]  # fmt: skip
    talk = [{"role": "user", "content": content}]
    said = {"max_tokens": 16, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    one, two = (llm.chat(talk, drafter=name, **said)[0] for name in ("none", "ngram"))
    assert one.token_ids == two.token_ids
    assert two.stats.cached_prompt_tokens > 80


def test_a_model_that_does_not_hear_says_so(tmp_path: Path) -> None:
    build_seeing("dense31b", tmp_path)
    with (
        LLM(tmp_path, drafter="none", profile_dir="none", max_model_len=256, cache_memory=2**26) as llm,
        pytest.raises(UsageError, match="does not hear"),
    ):
        llm.chat([{"role": "user", "content": [{"type": "audio", "audio": wav(tone(1))}]}])


WRONG = {
    "a thirteenth row": {"horizon": 13}, "clipping left out": {"clipped": False}, "scores cut at 5": {"cap": 5.0},
    "whole residuals": {"residual": 1.0}, "scale as stored": {}, "another floor": {},
}  # fmt: skip


@pytest.mark.parametrize(("kit", "wrong"), [("e2b", wrong) for wrong in WRONG], indirect=["kit"])
def test_soft_tokens_of_a_wrong_tower_are_refuted(
    kit: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = kit[1].reader
    said, folder = reader._load_audio.args[0], Path(kit[1].info["target"])
    _, take = stored_towers(folder, read_config(folder))["audio"]
    tower = reader._load_audio.func(
        replace(said, **WRONG[wrong]),
        lambda name: take(name) * (0.5 if wrong == "scale as stored" and "per_dim_scale" in name else 1),
    )
    if wrong == "another floor":
        monkeypatch.setattr("paceline.models.towers.gemma4_audio.FLOOR", 1e-5)
    for name, value in {"_listening": tower, "_store": OrderedDict(), "_known": {}}.items():
        monkeypatch.setattr(reader, name, value)
    with pytest.raises(AssertionError):
        test_soft_tokens(kit, 16_000)
