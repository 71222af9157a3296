"""Networks that read hidden states, on targets of every family that has no file of its own here: drafts are those of the
published source, and no text changes. A short convolution, latents, windows and experts go back with what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from checkpoints import VOCAB
from decoders import build_decoder
from dflash2_files import DFlash2Reference, build_dflash2
from dflash_files import DFlashReference, build_dflash
from dspark_files import DSparkReference, build_dspark
from eagle3_files import build_eagle3, eagle3_reference
from paceline.engine.engine import Engine
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from tapping import Pair, Reference, params, play, texts

KITS: Mapping[str, tuple[Callable[..., Path], Callable[[Path, Path], Reference]]] = {
    "eagle3": (build_eagle3, lambda target, folder: eagle3_reference(target, folder)),
    "dflash": (build_dflash, DFlashReference),
    "dflash2": (build_dflash2, DFlash2Reference),
    "dspark": (build_dspark, DSparkReference),
}
# each with the kit whose drafts are looked at: one that is published for it, if there is any; those that scale their
# embeddings with one that brings its own
FAMILIES = {
    "lfm2": "dspark", "lfm2-moe": "dflash", "mixtral": "eagle3", "qwen2-moe": "dspark", "seed-oss": "dflash",
    "exaone4": "dspark", "ernie4_5": "dflash", "ernie4_5-moe": "eagle3", "glm4-flash": "dspark",
    "muse-glimmer": "dflash2", "granite4": "eagle3", "granite4-h": "eagle3", "nemotron-h": "eagle3",
    "nemotron-h-moe": "dspark", "gemma2": "eagle3", "cohere2": "dspark",
}  # fmt: skip


UNASKED: Any = None  # where no draft is compared


def runner() -> Runner:
    return native.NativeRunner(1) if native.available() else EagerRunner()


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    build_decoder(request.param, folder)
    return folder


def built(kit: str, target: Path, folder: Path) -> Path:
    """A drafter of that kind for the target."""
    part = {} if kit == "dflash2" else {"draft_vocab": 40}  # whose head has all tokens
    return KITS[kit][0](folder, hidden=load_target(target).hidden_size, vocab=VOCAB, **part)


def test_no_text_changes(target: Path, tmp_path: Path) -> None:
    """Greedy and at 0.8, side by side; once more by the last network, with pages of the first time."""
    each = {
        str(i): (text, params(16, seed=i, temperature=0.8 * (i % 2))) for i, text in enumerate(texts(2, 40))
    }
    for kit in KITS:
        pair = Pair(target, built(kit, target, tmp_path / kit), UNASKED, runner(), pages=20)
        plain = tokens_of(pair.engine(drafters={}, default_drafter="none"), each)
        engine = pair.engine()
        assert tokens_of(engine, each, refused=20) == plain
    assert tokens_of(engine, each, refused=20, cached=32) == plain


def tokens_of(engine: Engine, each: Any, refused: int = 0, cached: int = 0) -> list[list[int]]:
    """The texts, of which so many drafts were refused at least, so that rows go back, and prompts known before."""
    done = [one for (one,) in engine.run(each).values()]
    assert sum(one.stats.drafted - one.stats.accepted for one in done) >= refused
    assert all(one.stats.cached_prompt_tokens >= cached for one in done)
    return [one.token_ids for one in done]


def test_drafts_are_those_of_the_published_source(target: Path, tmp_path: Path) -> None:
    kit = FAMILIES[target.name]
    drafter = built(kit, target, tmp_path / "drafter")
    play("partly", target, drafter, KITS[kit][1](target, drafter), runner())
