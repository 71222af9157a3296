"""EAGLE-3 drafts what its published source drafts, whatever became of the texts before; misfits are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from eagle3_files import Reference, build_eagle3
from paceline import LLM
from paceline.assembly import build_engine, choose_drafter
from paceline.check.identity import Effort
from paceline.check.proof import Plan, prove
from paceline.check.subject import Subject
from paceline.config import EngineConfig
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.drafters.base import Kept
from paceline.drafters.states import StateDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.engine.forced import ForcedAcceptance
from paceline.engine.picker import StepPicker
from paceline.engine.state import EngineState
from paceline.errors import ConfigError, LoadError, PairError, UsageError, WeightsError
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.hub import find_assistant
from paceline.models.inspection import inspect
from paceline.models.registry import load_eagle3, load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner, Stop
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
        self.reference = Reference(drafter, weights.get("embed_tokens.weight"), weights.get("lm_head.weight"))
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


PARTLY = ForcedAcceptance(
    (0.6,) * DEPTH
)  # keeps some tokens of most drafts, though they are not the target's


def partly(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(2)):
        engine.add(str(i), text, params(40))
    return pair.right(engine)


def preempted(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(3, 40)):
        engine.add(str(i), text, params(30))
    compared = pair.right(engine)
    assert engine.state.preemptions
    return compared


def prefix_hit(pair: Pair) -> int:
    """A prompt that was written before with the drafter, then one that was written without it."""
    first, second = texts(2, 40)
    engine = pair.engine()
    engine.run({"a": (first, params(4)), "b": (second, params(4, drafter="none"))})
    engine.add("a", [*first, 5, 6], params(8))
    engine.add("b", [*second, 5, 6], params(8))
    told = {r.request_id: r.stats for r in engine.state.requests.values()}
    compared = pair.right(engine)
    assert told["a"].cached_prompt_tokens == 32
    assert told["b"].cached_prompt_tokens == 0  # it is computed again, for the drafter's sake
    assert told["a"].drafted
    assert told["b"].drafted
    return compared


def cancelled_neighbour(pair: Pair) -> int:
    engine = pair.engine(forced=PARTLY)
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params(24))
    for _ in range(9):
        engine.step()
    engine.cancel("1")
    engine.add("3", texts(4)[3], params(24))
    return pair.right(engine)


SCENES = {"partly": partly, "preempted": preempted, "prefix": prefix_hit, "cancelled": cancelled_neighbour}


def play(scene: str, target: Path, drafter: Path, runner: Runner | None = None) -> None:
    pair = Pair(target, drafter, runner, pages=11 if scene == "preempted" else 64)
    assert SCENES[scene](pair) > 6
    assert pair.drafter.cache.open_sequences == 0
    assert not pair.drafter._texts
    assert not pair.drafter._lacking


@pytest.mark.parametrize("scene", SCENES)
def test_drafts_are_those_of_a_clean_start(scene: str, llama: Path, tmp_path: Path, runner: Runner) -> None:
    play(scene, llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40), runner)


def a_row_late(patch: pytest.MonkeyPatch) -> None:
    tell = EngineState.tell

    def late(self: EngineState, work: Any, keep: Any, states: Any, starts: Any) -> None:
        tell(self, work, keep, tuple(torch.roll(part, 1, 0) for part in states), starts)

    patch.setattr(EngineState, "tell", late)


def refused_rows_are_told(patch: pytest.MonkeyPatch) -> None:
    tell = EngineState.tell

    def all_of_them(self: EngineState, work: Any, keep: Any, states: Any, starts: Any) -> None:
        every = [b - a if k else 0 for a, b, k in zip(starts, starts[1:], keep, strict=False)]
        tell(self, work, every, states, starts)

    patch.setattr(EngineState, "tell", all_of_them)


def a_prefix_hit_without_states(patch: pytest.MonkeyPatch) -> None:
    """The target takes its whole prefix, and the drafter what it is told as if that began where its own ends."""
    begin, on_commit = StateDrafter.begin, StateDrafter.on_commit

    def all_known(self: StateDrafter, sequence: Any) -> int:
        begin(self, sequence)
        return len(sequence.tokens)

    def renumbered(self: StateDrafter, kept: list[Kept]) -> None:
        for rows in kept:
            text = self._texts[rows.sequence.id]
            if text.told < rows.first:  # as if they had been told
                text.states.append(torch.zeros(rows.first - text.told, self.net.width))  # type: ignore[attr-defined]
                text.told = rows.first
        on_commit(self, kept)

    patch.setattr(StateDrafter, "begin", all_known)
    patch.setattr(StateDrafter, "on_commit", renumbered)


BUGS = [(a_row_late, "partly"), (refused_rows_are_told, "partly"), (a_prefix_hit_without_states, "prefix")]


@pytest.mark.parametrize(("bug", "scene"), BUGS)
def test_a_planted_bug_is_seen(
    bug: Any, scene: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        play(scene, llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40))


def test_each_step_is_within_1e_4(llama: Path, tmp_path: Path, runner: Runner) -> None:
    pair = Pair(llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, fc_norm=True), runner)
    (text,) = texts(1)
    cache, own = cache_of(pair.target), cache_of(pair.net)
    cache.open(0, text)
    own.open(0, text)
    with cache.tail([(0, text[:-1])]) as tail, own.tail([(0, text[1:])]) as mine:
        _, *after = pair.target.states(tail.rows(), cache)
        states = torch.cat([part.clone() for part in after], 1)
        hidden, normed = pair.net.absorb(mine.rows(), states, own)
        mine.commit([len(text) - 1])
    tokens, expected = pair.reference.draft(text, states, DEPTH)
    logits = pair.net.logits(normed[-1:].clone())
    hidden = hidden[-1:].clone()
    for step in range(DEPTH):
        if step:
            with own.tail([(0, tokens[:step])]) as mine:
                logits, hidden = pair.net.step(mine.rows(skip=[step - 1]), hidden.clone(), own)
        assert float((logits[0] - expected[step]).abs().max()) < 1e-4 * float(expected[step].abs().max())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding_without_room_for_the_drafter(
    temperature: float, llama: Path, tmp_path: Path
) -> None:
    pair = Pair(llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB), own=5)
    each = {str(i): (text, params(12, temperature=temperature, seed=i)) for i, text in enumerate(texts(3))}
    plain = pair.engine(drafters={}, default_drafter="none").run(each)
    told = pair.engine().run(each)
    assert {k: v[0].token_ids for k, v in told.items()} == {k: v[0].token_ids for k, v in plain.items()}
    assert any("drafter memory" in v[0].stats.reasons for v in told.values())
    assert any(v[0].stats.drafted for v in told.values())
    assert pair.drafter.cache.open_sequences == 0


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str
)
def test_lossless(name: str, settings: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """On a small Llama and a Gemma with the native kernels, where there are some: batches, preemption, prefix hits."""
    target, hidden = llama, HIDDEN
    if name == "gemma":
        target = tmp_path / "gemma"
        build_target("e2b", target)
        hidden = load_target(target).hidden_size
    drafter = build_eagle3(tmp_path / "drafter", hidden=hidden, vocab=VOCAB, draft_vocab=40)
    made = native.NativeRunner(1) if native.available() else EagerRunner()
    pair = Pair(target, drafter, made, pages=11)
    each = {str(i): (text, params(30, seed=i, **settings)) for i, text in enumerate(texts(3, 40))}
    plain = pair.engine(drafters={}, default_drafter="none").run(each)
    engine = pair.engine()
    for _ in range(2):
        told = engine.run(each)
        assert {k: v[0].token_ids for k, v in told.items()} == {k: v[0].token_ids for k, v in plain.items()}
        assert sum(v[0].stats.drafted for v in told.values()) > 20
    assert engine.state.preemptions


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def retensor(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[LoadError], str]] = {
    "unknown flag": ({"parallel_drafting": True}, {}, ConfigError, "eagle3: parallel_drafting=True is not known"),
    "no layer": ({"transformer_layer_config": None}, {}, ConfigError, "has no transformer_layer_config"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, {}, ConfigError, "exclude each other"),
    "odd flag": ({"norm_output": "yes"}, {}, ConfigError, "norm_output='yes' is not supported: it is either true"),
    "taps are words": ({"eagle_aux_hidden_state_layer_ids": ["a"]}, {}, ConfigError, "not layer numbers"),
    "taps fall": ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, {}, ConfigError, "do not rise"),
    "a tap too far": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, PairError, "9], and the target has 4 layers"),
    "another target": ({"target_hidden_size": 64}, {}, PairError, "hidden size 64 against 48"),
    "missing norm": ({"fc_norm": True}, {}, WeightsError, "3 missing"),
    "ids for offsets": ({}, {"d2t": lambda d: d + torch.arange(30)}, WeightsError, "token id minus row number"),
    "d2t out of range": ({}, {"d2t": lambda d: d + VOCAB}, WeightsError, "does not lead to 30 tokens below"),
    "a token twice": ({}, {"d2t": lambda d: -torch.arange(30)}, WeightsError, "does not lead to 30 tokens"),
    "masks differ": ({}, {"t2d": lambda t: ~t}, WeightsError, "t2d and d2t name different tokens"),
    "head of another size": ({"draft_vocab_size": 29}, {}, WeightsError, "has shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, tensors, error, said = BAD[case]
    build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=30)
    edit(tmp_path, **changes)
    retensor(tmp_path, **tensors)
    with pytest.raises(error, match=re.escape(said)) as caught:
        load_eagle3(tmp_path, load_target(llama))
    assert "\n" not in str(caught.value)
    if error is not WeightsError or "norm" in case or "head" in case:  # seen without reading a weight
        assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


def test_another_vocabulary_and_a_pickle_are_refused(llama: Path, tmp_path: Path) -> None:
    build_eagle3(tmp_path / "a", hidden=HIDDEN, vocab=VOCAB + 8)
    with pytest.raises(PairError, match=f"vocabulary {VOCAB + 8} against {VOCAB}"):
        load_eagle3(tmp_path / "a", load_target(llama))
    build_eagle3(tmp_path / "b", hidden=HIDDEN, vocab=VOCAB)
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "b" / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="only pickled weights"):
        load_eagle3(tmp_path / "b", load_target(llama))


def test_it_is_found_beside_and_inside_the_target(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    shutil.copytree(llama, target)
    assert find_assistant(target, {"model_type": "llama"})[0] is None
    beside = build_eagle3(tmp_path / "mine-eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(target, {"model_type": "llama"})[0] == beside
    inside = build_eagle3(target / "eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(target, {"model_type": "llama"})[0] == inside
    file = tmp_path / "small.gguf"
    file.touch()
    of_file = build_eagle3(tmp_path / "small-eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(file, {"model_type": "llama"})[0] == of_file
    assert choose_drafter(EngineConfig(target=str(target)), target)[0] == "eagle3+ngram"
    with pytest.raises(UsageError, match="is a drafter of another kind"):
        choose_drafter(EngineConfig(target=str(target), drafter="mtp"), target)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_it_runs_as_a_user_loads_it(quantize: Any, llama: Path, tmp_path: Path) -> None:
    drafter = build_eagle3(tmp_path, hidden=HIDDEN, width=64, vocab=VOCAB, draft_vocab=32)
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(llama), drafter="none", **settings).generate(["0123abc"], each)[0]
    llm = LLM(str(llama), drafter=str(drafter), quantize_drafter=quantize, **settings)
    told = llm.generate(["0123abc"], each)[0]
    assert told.token_ids == plain.token_ids
    assert told.stats.drafters.get("eagle3")


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("stop", [None, Stop(16, (0.3, 0.4, 0.5, 1.0), ((0.2, 0.8),) * 12, price=0.08)])
def test_one_call_equals_its_steps(
    stop: Stop | None, settings: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native round moves on by a position with each token, and ends where the confidence does, as the steps do."""
    make, whole, rounds = StepPicker.__init__, native.Plan.draft_round, [0]
    if stop is not None:
        monkeypatch.setattr(
            StepPicker, "__init__", lambda self, r, stops, v: make(self, r, [stop] * len(stops), v)
        )

    def counted(self: native.Plan, *args: Any) -> Any:
        out = whole(self, *args)
        rounds[0] += out is not None
        return out

    def drafts() -> list[list[int]]:
        pair = Pair(
            llama, build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40), native.NativeRunner(1)
        )
        engine = pair.engine(forced=PARTLY)
        for i, text in enumerate(texts(3)):
            engine.add(str(i), text, params(24, seed=i, **settings))
        out = []
        while engine.has_work:
            out += [delta.proposed for delta in engine.step()]
        return out

    monkeypatch.setattr(native.Plan, "draft_round", counted)
    together = drafts()
    assert rounds[0] > 3
    monkeypatch.setattr(native.Plan, "draft_round", lambda self, *args: None)
    assert drafts() == together
    lengths = {len(draft) for draft in together}
    assert DEPTH in lengths
    assert stop is None or len(lengths) > 3


def test_the_proofs_hold(llama: Path, tmp_path: Path) -> None:
    """Bits, tokens and drafts, of what `paceline check TARGET --drafter FOLDER` loads."""
    drafter = build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40)
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "cache_memory": 2**22}
    engine = build_engine(EngineConfig(target=str(llama), drafter=str(drafter), **settings))
    plan = Plan(Effort(tokens=300, length=14, cases=9), samples=0, length=24, texts=2)
    told = prove(Subject(engine, tuple(map(tuple, texts(6)))), plan, {}, lambda name, share: None)
    assert told.holds, told.to_text()
    clean = next(found for found in told.findings if found.name == "drafts of a clean start")
    assert clean.counts["eagle3: drafts"] > 20
    assert clean.counts["eagle3: different"] == 0
