"""EAGLE-3 and modules for multi-token prediction after a picture: what they draft, against their sources read over the
whole text with soft tokens as embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decoders import build_decoder
from eagle3_files import Reference, build_eagle3
from media_models import VOCAB, build_seeing, picture
from mtp_files import MtpReference, build_mtp
from paceline.config import EngineConfig
from paceline.media.build import reader_of
from paceline.media.talk import MediaItem, Talk
from paceline.models.drafters.base import FINAL
from paceline.ops.native import NativeRunner
from paceline.ops.reference import EagerRunner
from paceline.soft_tokens import MediaPrompt, media_rows
from paceline.text.tokenizer import Tokenizer
from tapping import Pair, cache_of, params


def made(drafter: str, kind: str, tmp_path: Path) -> tuple[Path, Path, Any]:
    target, other = tmp_path / "target", tmp_path / "drafter"
    build_seeing(kind, target)
    tensors = load_file(target / "model.safetensors")
    table, head = (
        next(t for name, t in tensors.items() if name.endswith(f"{part}.weight") and "per_layer" not in name)
        for part in ("embed_tokens", "lm_head")
    )
    if drafter == "eagle3":
        build_eagle3(other, hidden=48, vocab=VOCAB)
        return target, other, Reference(other)
    build_decoder("llama", tmp_path / "like", vocab_size=VOCAB, num_hidden_layers=5)
    build_mtp(tmp_path / "like", other, "speculators")
    reference = MtpReference(tmp_path / "like", other, "speculators")
    reference.embedding, reference.head = table * 48**0.5, head
    return target, other, reference


def states_of(pair: Pair, text: list[int], prompt: MediaPrompt) -> torch.Tensor:
    """What the network is given of all rows of a text but the last."""
    cache = cache_of(pair.target)
    cache.open(0, text)
    with cache.tail([(0, text[:-1])]) as tail:
        rows = tail.rows()
        rows.media = media_rows([prompt.media], [0], rows.starts)
        found = pair.target.states(rows, cache)
        at = [0 if tap == FINAL else 1 + pair.target.tapped.index(tap) for tap in pair.net.taps]
        return torch.cat([found[i].clone() for i in at], 1)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(("drafter", "kind"), [("eagle3", "dense31b"), ("mtp", "e2b")])
def test_drafts_after_a_picture(drafter: str, kind: str, native: bool, tmp_path: Path) -> None:
    target, other, reference = made(drafter, kind, tmp_path)
    plain = reference.embedding
    pair = Pair(target, other, reference, NativeRunner(1, exact=True) if native else EagerRunner())
    reader = reader_of(
        EngineConfig(target=str(target), image_tokens=70), target, pair.target, Tokenizer.load(target)
    )
    assert reader is not None
    engine, compared, texts = pair.engine(), 0, []
    for seed in (0, 0, 1):  # the same picture again, then another one with the same ids
        prompt = reader.prompt("see <|image|> and", Talk([], [MediaItem("image", picture(90, 60, seed))]))
        engine.add("x", prompt, params(12))
        (request,) = engine.state.requests.values()
        text, asked = request.sequence, list[tuple[list[int], list[int]]]()
        while engine.has_work:
            before = list(text.tokens)
            asked += [(before, delta.proposed) for delta in engine.step() if delta.proposed]
        assert (request.stats.cached_prompt_tokens >= 48) == (len(texts) == 1)
        texts.append(text.tokens[len(prompt) :])
        (item,) = prompt.media
        reference.embedding = torch.cat((plain, item.vectors))
        for before, proposed in asked:
            named = list(before)
            named[item.start : item.end] = range(VOCAB, VOCAB + len(item.vectors))
            assert proposed == reference.draft(named, states_of(pair, before, prompt), len(proposed))[0]
            compared += 1
    assert texts[0] == texts[1] != texts[2]
    assert compared > 12
