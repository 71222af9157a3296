"""Random requests, with a drafter and without: what differs is shrunk to the smallest request, and written as a test.

`scripts/fuzz.py` runs it for as long as is wanted, tests/fuzz/test_fuzzing.py for a moment. A case is plain data: which
family of models, which drafter, prompts, parameters, and how much room the cache has. hypothesis draws and shrinks it.
"""

from __future__ import annotations

import hashlib
import pprint
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from checkpoints import VOCAB
from decoders import DECODERS, build_decoder
from paceline.core import Completion, SamplingParams
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from testing import OracleDrafter, RandomDrafter, ScriptedDrafter, Setup, make_engine, run

DRAFTERS = (
    "random",
    "scripted",
    "oracle",
    "model",
    "ngram",
    "lookahead",
)  # the first ones need no prompt of their own
ROOMY = 64  # pages of the cache
LONGEST = 40  # tokens of a prompt, and of an answer


@dataclass(frozen=True)
class Case:
    """What is asked for. `params` of each prompt; `pages`: of the cache, few of them let texts give way."""

    family: str
    drafter: str
    draft_tokens: int
    prompts: list[list[int]]
    params: list[dict[str, Any]]
    pages: int = ROOMY
    prefix_cache: bool = False
    prefill_chunk: int = 9


class Differs(AssertionError):
    """A text with a drafter is not the one without, or the engine broke over it."""


@dataclass
class Worlds:
    """The models of the families, made below `folder` when they are asked for. `tokens`: compared so far, by family."""

    folder: Path
    tokens: dict[str, int] = field(default_factory=dict)
    _models: dict[tuple[str, int], GraphTarget] = field(default_factory=dict)

    def model(self, family: str, seed: int = 0) -> GraphTarget:
        if (family, seed) not in self._models:
            folder = self.folder / f"{family}-{seed}"
            build_decoder(family, folder, seed=seed)
            runner: Runner = native.NativeRunner(1) if native.available() else EagerRunner()
            target = load_target(folder, runner=runner)
            target.runner.prepare([target.hidden_graph, target.logits_graph])
            self._models[family, seed] = target
        return self._models[family, seed]

    def compare(self, case: Case) -> None:
        """Raises Differs."""
        each = [SamplingParams(**one) for one in case.params]
        plain = [self._write(case, [p], [one], None)[0] for p, one in zip(case.prompts, each, strict=True)]
        whole = [p + one.token_ids for p, one in zip(case.prompts, plain, strict=True)]
        drafted = self._write(case, case.prompts, each, self._drafter(case, whole))
        for i, (mine, other) in enumerate(zip(plain, drafted, strict=True)):
            if told(mine) != told(other):
                raise Differs(f"text {i}: {told(mine)} without a drafter, {told(other)} with {case.drafter}")
            self.tokens[case.family] = self.tokens.get(case.family, 0) + len(mine.token_ids)

    def _write(
        self, case: Case, prompts: Seq[list[int]], each: Seq[SamplingParams], drafter: Drafter | None
    ) -> list[Completion]:
        target = self.model(case.family)
        setup = Setup(
            k=case.draft_tokens, pages=case.pages if drafter else ROOMY, prefill_chunk=case.prefill_chunk,
            step_tokens=24, prefix_cache=case.prefix_cache and drafter is not None,
        )  # fmt: skip
        engine = make_engine(setup, drafter, target=target, cache=cache_of(target, setup.pages))
        if setup.prefix_cache:
            run(engine, prompts[:1], SamplingParams(max_tokens=2))
        try:
            return run(engine, [list(p) for p in prompts], each)
        except UsageError:
            raise
        except Exception as error:
            raise Differs(f"the engine raised {type(error).__name__}: {error}") from error

    def _drafter(self, case: Case, texts: list[list[int]]) -> Drafter:
        match case.drafter:
            case "ngram":
                return NgramDrafter()
            case "lookahead":
                return LookaheadDrafter()
            case "random":
                return RandomDrafter()
            case "scripted":
                return ScriptedDrafter(texts, lambda j: j % 3 == 2)
            case "oracle":
                return OracleDrafter(texts)
        model = self.model("llama", seed=1)
        return ModelDrafter(model, cache_of(model, 4 * ROOMY), VOCAB)


def cache_of(target: GraphTarget, pages: int) -> KVCache:
    each = dict.fromkeys(target.layout.kinds, pages)
    return KVCache(target.layout, each, max_sequences=8, max_tokens=128, dtype=target.kv_dtype)


def told(one: Completion) -> tuple[Any, ...]:
    scores = [(entry.token, entry.raw, entry.shaped, entry.top) for entry in one.logprobs or ()]
    return one.token_ids, one.finish_reason, one.error, scores


token = st.integers(2, VOCAB - 1)
tokens = st.lists(token, min_size=1, max_size=5, unique=True).map(tuple)
share = st.sampled_from([0.05, 0.3, 0.6, 0.9])
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.7, 1.0, 1.5]), "top_k": st.integers(1, 20), "top_p": share, "min_p": share,
    "typical_p": share, "top_n_sigma": st.sampled_from([0.5, 1.0, 2.0]), "xtc_probability": share,
    "xtc_threshold": st.sampled_from([0.05, 0.2]), "dynatemp_range": share, "temperature_last": st.booleans(),
    "dry_multiplier": st.sampled_from([0.5, 2.0]), "dry_allowed_length": st.integers(0, 3),
    "repetition_penalty": st.sampled_from([0.8, 1.3, 2.0]), "penalty_last_n": st.integers(0, 20),
    "presence_penalty": st.sampled_from([-0.5, 0.7]), "frequency_penalty": st.sampled_from([-0.3, 0.9]),
    "logit_bias": st.dictionaries(token, st.sampled_from([-9.0, 2.5, 9.0]), min_size=1, max_size=4),
    "bad_token_ids": tokens, "allowed_token_ids": tokens, "stop_token_ids": tokens, "min_tokens": st.integers(1, 20),
    "logprobs": st.integers(0, 3), "ignore_eos": st.booleans(), "mirostat": st.just(2),
}  # fmt: skip
ASKED = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, LONGEST), "seed": st.integers(0, 1000)}, optional=PARAMS
)
PROMPT = st.one_of(
    st.lists(token, min_size=1, max_size=LONGEST),
    st.builds(
        lambda part, times: (part * times)[:LONGEST],
        st.lists(token, min_size=1, max_size=9),
        st.integers(2, 6),
    ),
)


@st.composite
def cases(draw: st.DrawFn, families: Seq[str]) -> Case:
    prompts = draw(st.lists(PROMPT, min_size=1, max_size=4))
    return Case(
        family=draw(st.sampled_from(families)),
        drafter=draw(st.sampled_from(DRAFTERS)),
        draft_tokens=draw(st.integers(1, 8)),
        prompts=prompts,
        params=[draw(ASKED) for _ in prompts],
        pages=draw(st.sampled_from([ROOMY, 12, 9])),
        prefix_cache=draw(st.booleans()),
        prefill_chunk=draw(st.integers(1, 24)),
    )


def search(worlds: Worlds, families: Seq[str], examples: int, seed: int) -> tuple[Case, str] | None:
    """The smallest case that differs among so many random ones, and what differs; None: all are equal."""
    found: list[tuple[Case, str]] = []
    how = settings(
        max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet,
    )  # fmt: skip

    @hypothesis.seed(seed)
    @how
    @given(cases(families))
    def one(case: Case) -> None:
        try:
            worlds.compare(case)
        except UsageError:
            hypothesis.reject()  # parameters that no door lets through
        except Differs as error:
            found.append((case, str(error)))
            raise

    try:
        one()
    except Differs:
        return found[-1]  # hypothesis ends with the smallest one
    return None


def as_test(case: Case, what: str) -> str:
    """A test file that asks for nothing but this case."""
    shown = pprint.pformat(case, width=100, sort_dicts=False)
    said = what.replace("\\", "/").replace('"', "'")[:300]
    return (
        f'"""Found by scripts/fuzz.py and shrunk: {said}"""\n\n'
        "from pathlib import Path\n\nfrom fuzzing import Case, Worlds\n\n"
        f"CASE = {shown}\n\n\n"
        "def test_found(tmp_path: Path) -> None:\n    Worlds(tmp_path).compare(CASE)\n"
    )


def write_test(case: Case, what: str, folder: Path) -> Path:
    digest = hashlib.sha256(repr(case).encode()).hexdigest()[:8]
    path = folder / f"test_found_{digest}.py"
    path.write_text(as_test(case, what), encoding="utf-8")
    return path


FAMILIES = tuple(DECODERS)
