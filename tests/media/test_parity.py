"""Pictures against transformers on small random models of four kinds: pixels, soft tokens, logits and masks."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from media_models import ID, KINDS, SPECIAL, build_seeing, file_of, picture
from paceline.config import EngineConfig
from paceline.kv.cache import KVCache
from paceline.media import pixels
from paceline.media.build import reader_of
from paceline.media.pixels import Cut, read_pixels
from paceline.media.pixels import resized as pixels_resized
from paceline.media.talk import MediaItem, Talk
from paceline.models.config import read_config
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_target
from paceline.models.towers.base import Slices
from paceline.models.towers.load import stored_towers
from paceline.ops.native import NativeRunner
from paceline.ops.reaches import Reaches
from paceline.soft_tokens import MediaPrompt, MediaRows, media_rows, whole_runs
from paceline.text.tokenizer import Tokenizer

SIZES = [(100, 70), (9, 700), (900, 3), (17, 23), (1, 1), (480, 336), (640, 480)]  # width, height
PLACEHOLDER = ID["<|image|>"]


class Kit:
    """One kind: transformers' model, ours on both runners, and what reads pictures."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.theirs = build_seeing(kind, folder)
        self.targets = [load_target(folder), load_target(folder, runner=NativeRunner(1, exact=True))]
        reader = reader_of(EngineConfig(target=str(folder)), folder, self.targets[0], Tokenizer.load(folder))
        assert reader is not None
        self.reader = reader

    def prompt(self, text: str, *images: Any, budget: int = 70) -> MediaPrompt:
        return self.reader.prompt(
            text, Talk([], [MediaItem("image", image, budget=budget) for image in images])
        )

    @torch.no_grad()
    def expected(self, ids: list[int], media: MediaPrompt) -> torch.Tensor:
        """Logits [T, V] by transformers for `ids`, which begin with the prompt."""
        features = BaseModelOutputWithPooling(pooler_output=[item.vectors for item in media.media])
        runs = [0] * len(ids)
        for item in media.media:
            runs[item.start : item.end] = [1] * (item.end - item.start)
        said: dict[str, Any] = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([runs])}
        if self.kind == "unified12b":  # its own forward lets all layers see both ways: see masks
            return self._unified(ids, media)
        return self.theirs(**said, mm_encoder_outputs={"image": features}, use_cache=False).logits[0]

    def _unified(self, ids: list[int], media: MediaPrompt) -> torch.Tensor:
        embedded = self.theirs.get_input_embeddings()(torch.tensor([ids]))
        for item in media.media:
            embedded[0, item.start : item.end] = item.vectors
        model = self.theirs.model.language_model
        out = model(
            inputs_embeds=embedded,
            attention_mask=masks(ids, media, model.config.sliding_window),
            use_cache=False,
        )
        logits = self.theirs.lm_head(out.last_hidden_state)[0]
        cap = model.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap


def masks(ids: list[int], media: MediaPrompt, window: int) -> dict[str, torch.Tensor]:
    """What each row sees by layer kind, written out: full layers are causal, inside of pictures, too."""
    q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))[None]
    run = torch.full((len(ids),), -1)
    for i, item in enumerate(media.media):
        run[item.start : item.end] = i
    together = (run[:, None] == run[None]) & (run[:, None] >= 0)
    seen = {"full_attention": k <= q, "sliding_attention": ((k <= q) | together) & (k > q - window)}
    lowest = torch.finfo(torch.float32).min
    return {kind: torch.where(m, 0.0, lowest)[None, None] for kind, m in seen.items()}


@pytest.fixture(scope="module", params=list(KINDS))
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(request.param, tmp_path_factory.mktemp(request.param))


def run(target: Any, prompt: MediaPrompt, chunk: int) -> torch.Tensor:
    """Logits [T, V] of a prompt computed in chunks, as the scheduler cuts them."""
    pages = dict.fromkeys(target.layout.kinds, 80)
    cache = KVCache(target.layout, pages, max_sequences=2, max_tokens=1024, dtype=target.dtype)
    cache.open(0, prompt, share=False)
    parts, at = [], 0
    while at < len(prompt):
        count = whole_runs(prompt.media, at, min(chunk, len(prompt) - at))
        with cache.tail([(0, prompt[at : at + count])]) as tail:
            rows = tail.rows()
            rows.media = media_rows([prompt.media], [at], rows.starts)
            parts.append(target.forward(rows, cache).clone())
            tail.commit([count])
        at += count
    return target.logits(torch.cat(parts)).clone()


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_pixels_are_those_of_transformers(size: tuple[int, int], budget: int) -> None:
    image = picture(*size)
    mine = read_pixels(file_of(image), Cut(budget, 16, 3))
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget).preprocess(image, return_tensors="np")
    count = int(theirs["num_soft_tokens_per_image"][0])
    assert count == mine.height * mine.width // 48**2 <= budget
    patches = np.frombuffer(mine.rgb, np.uint8).reshape(mine.height // 16, 16, mine.width // 16, 16, 3)
    patches = patches.transpose(0, 2, 1, 3, 4).reshape(count * 9, -1)
    assert np.array_equal((np.asarray(theirs["pixel_values"])[0][: count * 9] * 255).round(), patches)


@pytest.mark.parametrize("size", SIZES[:5], ids=lambda s: f"{s[0]}x{s[1]}")
def test_soft_tokens(kit: Kit, size: tuple[int, int]) -> None:
    image = picture(*size)
    (mine,) = kit.prompt("a<|image|>b", image).media
    if kit.kind == "unified12b":
        pixels = read_pixels(file_of(image), Cut(70, 16, 3))
        tall, wide = pixels.height // 48, pixels.width // 48
        values = (
            torch.frombuffer(bytearray(pixels.rgb), dtype=torch.uint8).view(tall, 48, wide, 48, 3).float()
            / 255
        )
        values = values.transpose(1, 2).reshape(1, tall * wide, -1)
        places = torch.stack(
            [torch.arange(wide).repeat(tall), torch.arange(tall).repeat_interleave(wide)], -1
        )[None]
    else:
        found = Gemma4ImageProcessorPil(max_soft_tokens=70).preprocess(image, return_tensors="pt")
        values, places = found["pixel_values"], found["image_position_ids"]
    with torch.no_grad():
        theirs = kit.theirs.model.get_image_features(values, places, return_dict=True).pooler_output
    expected = torch.cat(list(theirs)) if isinstance(theirs, tuple | list) else theirs.flatten(0, -2)
    assert mine.vectors.shape == expected.shape
    assert (mine.vectors - expected).abs().max() < 1e-5 * expected.abs().max()


CASES = {
    "before": ("<|image|>what is it", 1), "after": ("look at this <|image|>", 1), "only": ("<|image|>", 1),
    "two": ("one <|image|> and <|image|> two", 2), "adjacent": ("<|image|><|image|>x", 2),
}  # fmt: skip


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits(kit: Kit, case: str, native: bool) -> None:
    text, count = CASES[case]
    prompt = kit.prompt(text, *[picture(100, 70), picture(60, 150, 1)][:count])
    expected = kit.expected(prompt, prompt)
    assert expected.std() > 1, "a flat distribution would hide errors"
    told = [i for i in range(len(prompt)) if prompt[i] != PLACEHOLDER or i == len(prompt) - 1]
    silent = [PLACEHOLDER, ID["<|audio|>"], ID["<|video|>"]]
    whole = run(kit.targets[native], prompt, 10_000)
    for chunk in (10_000, 1, 7, 16):
        mine = whole if chunk == 10_000 else run(kit.targets[native], prompt, chunk)
        difference = (mine - expected)[told]
        difference[:, silent] = 0
        assert difference.abs().max() < 1e-4
        if native:
            assert torch.equal(mine, whole), "bits depend on the chunks"


def test_equal_ids_with_another_picture_give_another_text(kit: Kit) -> None:
    a, b = kit.prompt("<|image|>x", picture(100, 70)), kit.prompt("<|image|>x", picture(100, 70, 3))
    assert list(a) == list(b)
    assert a.media[0].key != b.media[0].key
    one, other = (run(kit.targets[0], each, 64)[-1] for each in (a, b))
    written = one.isfinite()  # placeholders are never written
    assert (one - other)[written].abs().max() > 0.05


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p.transpose(Image.Transpose.ROTATE_180),
        lambda p: p.convert("L").convert("RGB"),
    ],
    ids=["turned", "gray"],
)
def test_the_tower_tells_pictures_apart(kit: Kit, make: Any) -> None:
    image = picture(100, 70)
    a, b = (kit.prompt("<|image|>", one).media[0].vectors for one in (image, make(image)))
    assert (a - b).abs().max() > 1e-2


def test_special_tokens_stand_around_a_picture(kit: Kit) -> None:
    prompt = kit.prompt("a<|image|>b", picture(100, 70))
    (item,) = prompt.media
    assert prompt[item.start - 1] == ID["<|image>"]
    assert prompt[item.end] == ID["<image|>"]
    assert list(prompt[item.start : item.end]) == [PLACEHOLDER] * len(item.vectors)
    assert min(i for i in prompt if i >= len(SPECIAL))


# -- each of the tests above fails for a wrong reading ---------------------------------------------------------------


def misread(patch: pytest.MonkeyPatch, kit: Kit, wrong: Any, **config: Any) -> None:
    """Have a reader use a tower of another config, or with `wrong(name, tensor)` in place of its tensors."""
    load = kit.reader._load_vision
    _, take = stored_towers(kit.folder, read_config(kit.folder))["vision"]
    tower = load.func(replace(load.args[0], **config), lambda name: wrong(name, take(name)))  # type: ignore[union-attr]
    patch.setattr(kit.reader, "_seeing", tower)
    forgotten(patch, kit.reader)


def forgotten(patch: pytest.MonkeyPatch, reader: Any) -> None:
    patch.setattr(reader, "_store", OrderedDict())
    patch.setattr(reader, "_known", {})


def as_stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def swapped(name: str, x: torch.Tensor) -> torch.Tensor:
    """The tables of x and of y."""
    return x.flip(1) if name.endswith("pos_embedding") else x.flip(0) if name.endswith("_table") else x


def plus_one(name: str, x: torch.Tensor) -> torch.Tensor:
    """Norms as Gemma's earlier models have them."""
    return x + 1 if name.endswith("layernorm.weight") else x


def channels_first(name: str, x: torch.Tensor) -> torch.Tensor:
    """A patch's values by channel, row and column."""
    return x.view(len(x), -1, 3).transpose(1, 2).flatten(1) if name.endswith("input_proj.weight") else x


def spoilt(patch: pytest.MonkeyPatch, reader: Any, change: Any) -> None:
    """Change what the tower gives."""
    tower, first = reader.vision(), type(reader.vision()).slices

    def changed(self: Any, pixels: torch.Tensor) -> Slices:
        return change((yield from first(self, pixels)))

    patch.setattr(type(tower), "slices", changed)
    forgotten(patch, reader)


WRONG_TOWERS: dict[str, tuple[tuple[str, ...], Any]] = {
    "x and y swapped": (("e2b", "unified12b"), lambda p, k: misread(p, k, swapped)),
    "clipping left out": (("e2b",), lambda p, k: misread(p, k, as_stored, clipped=False)),
    "not standardized": (("moe26b",), lambda p, k: misread(p, k, as_stored, standardize=False)),
    "rotary of text": (("dense31b",), lambda p, k: misread(p, k, as_stored, theta=10_000.0)),
    "norms plus one": (("e2b",), lambda p, k: misread(p, k, plus_one)),
    "channels first": (("moe26b",), lambda p, k: misread(p, k, channels_first)),
    "reversed": (("dense31b",), lambda p, k: spoilt(p, k.reader, lambda x: x.flip(0))),
    "rounded": (("unified12b",), lambda p, k: spoilt(p, k.reader, lambda x: x.bfloat16().float())),
}


@pytest.mark.parametrize(
    ("kit", "wrong"),
    [(kind, w) for w, (kinds, _) in WRONG_TOWERS.items() for kind in kinds],
    indirect=["kit"],
)
def test_soft_tokens_of_a_wrong_tower_are_refuted(
    kit: Kit, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_soft_tokens(kit, (100, 70))
    WRONG_TOWERS[wrong][1](monkeypatch, kit)
    with pytest.raises(AssertionError):
        test_soft_tokens(kit, (100, 70))


def other_rows(patch: pytest.MonkeyPatch, change: Any) -> None:
    first = media_rows

    def changed(*given: Any) -> Any:
        found = first(*given)
        return None if found is None else change(found)

    patch.setattr(sys.modules[__name__], "media_rows", changed)


def other_window(patch: pytest.MonkeyPatch, change: Any) -> None:
    first = Reaches.of
    patch.setattr(Reaches, "of", lambda self, kind, window, *rest: first(self, kind, change(window), *rest))


ALL = 10**9  # a window that hides nothing, in which rows of pictures see each other
WRONG_PROMPTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "the placeholder's per-layer row": (("e2b",), lambda p: p.setattr(GemmaTarget, "_padded", lambda s, rows, _: rows)),
    "scaled as text is": (
        ("e2b", "dense31b"),
        lambda p: other_rows(p, lambda m: MediaRows([(i, v * 48**0.5) for i, v in m.pieces], m.reach)),
    ),
    "causal inside": (
        ("moe26b", "dense31b", "unified12b"), lambda p: other_rows(p, lambda m: MediaRows(m.pieces, None))
    ),
    "full layers both ways": (
        ("moe26b", "dense31b", "unified12b"), lambda p: other_window(p, lambda w: ALL if w is None else w)
    ),
    "a run not bounded by the window": (("moe26b", "unified12b"), lambda p: other_window(p, lambda w: w and ALL)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kit", "wrong"),
    [(kind, w) for w, (kinds, _) in WRONG_PROMPTS.items() for kind in kinds],
    indirect=["kit"],
)
def test_logits_of_a_wrong_prompt_are_refuted(kit: Kit, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG_PROMPTS[wrong][1](monkeypatch)
    with pytest.raises(AssertionError):
        test_logits(kit, "before", False)


def resampled_before(how: Any) -> Any:
    first = pixels.fitted

    def fitted(image: Image.Image, cut: Cut) -> Any:
        tall, wide = pixels.resized(image.height, image.width, cut)
        return first(image.resize((wide, tall), how), cut)

    return fitted


WRONG_PIXELS: dict[str, tuple[str, Any]] = {
    "bilinear": ("fitted", resampled_before(Image.Resampling.BILINEAR)),
    "small pictures kept small": ("resized", lambda h, w, cut: (h // 48 * 48 or 48, w // 48 * 48 or 48)),
    "sides rounded up": ("resized", lambda h, w, cut: tuple(side + 48 for side in pixels_resized(h, w, cut))),
}


@pytest.mark.parametrize("wrong", WRONG_PIXELS)
def test_wrong_pixels_are_refuted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, *WRONG_PIXELS[wrong])
    with pytest.raises(AssertionError):
        test_pixels_are_those_of_transformers((100, 70), 70)
