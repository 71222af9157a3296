"""Pictures against transformers on small random models of four kinds: pixels, soft tokens, logits and masks."""

from __future__ import annotations

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
from paceline.media.build import reader_of
from paceline.media.pixels import Cut, read_pixels
from paceline.media.talk import MediaItem, Talk
from paceline.models.registry import load_target
from paceline.ops.native import NativeRunner
from paceline.soft_tokens import MediaPrompt, media_rows, whole_runs
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
