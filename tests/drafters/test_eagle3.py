"""EAGLE-3 drafts what its published source drafts, whatever became of the texts before; misfits are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import VOCAB
from decoders import build_decoder
from eagle3_files import Reference, build_eagle3
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.drafters.states import StateDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.registry import load_eagle3, load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner

HIDDEN = 48
DEPTH = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "original": {"original": True, "draft_vocab": 30},
    "before residual": {"norm_before_residual": True, "draft_vocab": 30},
    "before fc": {"norm_before_fc": True, "kind": "qwen3"},
    "3.1": {"fc_norm": True, "norm_output": True, "draft_vocab": 30},
    "target's own": {
        "without": ("embed_tokens.weight", "lm_head.weight"),
        "draft_vocab": 30,
        "original": True,
    },
    "wider": {"width": 64, "taps": (0, 2, 4), "without": ("t2d",)},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "target"
    build_decoder("llama", folder)
    return folder


@pytest.fixture(params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "torch":
        return EagerRunner()
    if not native.available():
        pytest.skip("needs the compiled kernels")
    return native.NativeRunner(1, exact=True)


def cache_of(model: Cached, pages: int = 64, sequences: int = 8) -> KVCache:
    return KVCache(
        model.layout,
        dict.fromkeys(model.layout.kinds, pages),
        max_sequences=sequences,
        max_tokens=256,
        dtype=model.kv_dtype,
    )


class Pair:
    """A target and its drafter, what they drafted in an engine, and what the reference drafts for the same texts."""

    def __init__(self, target: Path, drafter: Path, runner: Runner | None = None, **sizes: int) -> None:
        self.target: GraphTarget = load_target(target, runner=runner)
        weights = {k.removeprefix("model."): v for k, v in load_file(target / "model.safetensors").items()}
        self.reference = Reference(drafter, weights["embed_tokens.weight"], weights.get("lm_head.weight"))
        self.net = load_eagle3(drafter, self.target)
        self.target.runner.prepare([self.target.hidden_graph, self.target.logits_graph])
        self.target.runner.prepare([self.net.absorb_graph, self.net.step_graph, self.net.logits_graph])
        self.drafter = StateDrafter("eagle3", self.net, cache_of(self.net, sizes.get("own", 64)))
        self.cache = cache_of(self.target, sizes.get("pages", 64))

    def engine(self, **changes: Any) -> Engine:
        parts: dict[str, Any] = {
            "target": self.target, "cache": self.cache, "drafters": {"eagle3": self.drafter},
            "default_drafter": "eagle3", "policy": FixedPolicy(DEPTH), "draft_tokens": DEPTH, "step_tokens": 24,
            "prefill_chunk": 9,
        }  # fmt: skip
        return Engine(EngineParts(**parts | changes))

    def expected(self, text: list[int], count: int) -> list[int]:
        """What the published source drafts after `text`."""
        cache = cache_of(self.target)
        cache.open(0, text)
        with cache.tail([(0, text[:-1])]) as tail:
            _, *after = self.target.states(tail.rows(), cache)
            states = torch.cat([part.clone() for part in after], 1)
        return self.reference.draft(text, states, count)[0]

    def right(self, engine: Engine) -> int:
        """Run until all is done; how many drafts there were, each the reference's."""
        compared = 0
        texts = {r.request_id: r.sequence for r in engine.state.requests.values()}
        while engine.has_work:
            before = {name: list(sequence.tokens) for name, sequence in texts.items()}
            for delta in engine.step():
                if delta.proposed:
                    compared += 1
                    assert delta.proposed == self.expected(before[delta.request], len(delta.proposed))
        return compared


def params(count: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def texts(count: int, length: int = 30) -> list[list[int]]:
    g = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length + 3 * i,), generator=g).tolist() for i in range(count)]


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    pair = Pair(llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, **VARIANTS[name]), runner)
    engine = pair.engine()
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params())
    assert pair.right(engine) > 20
    assert pair.drafter.cache.open_sequences == 0
