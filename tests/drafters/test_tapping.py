"""Every drafter that reads hidden states: it drafts what its published source drafts, whatever became of the texts
before, and changes no text. A planted bug of the telling is seen.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from dflash2_files import DFlash2Reference, build_dflash2
from dflash_files import DFlashReference, build_dflash
from dspark_files import DSparkReference, build_dspark
from eagle3_files import build_eagle3, eagle3_reference
from heads_files import HeadsReference, build_meta
from mtp_files import MtpReference, TheirModules, build_mtp
from paceline.assembly import build_engine
from paceline.check.identity import Effort
from paceline.check.proof import Plan, prove
from paceline.check.subject import Subject
from paceline.config import EngineConfig
from paceline.control.base import DraftPlan, PlannedRow
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason
from paceline.convert.from_meta import convert_meta
from paceline.core import Sequence
from paceline.drafters.base import DraftContext, Kept
from paceline.drafters.contract import GreedyPicker, check_drafter
from paceline.drafters.states import IDLE, PIECES
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from peagle_files import PEagleReference, build_peagle
from tapping import BUGS, DEPTH, SCENES, Pair, Reference, params, play, texts

Made = tuple[Path, Path, Reference]  # a target, its drafter, what that one should draft


def eagle3(target: Path, folder: Path) -> Made:
    hidden = load_target(target).hidden_size
    drafter = build_eagle3(folder, hidden=hidden, vocab=VOCAB, draft_vocab=40)
    return target, drafter, eagle3_reference(target, drafter)


def mtp(target: Path, folder: Path) -> Made:
    made = build_mtp(target, folder)
    return made, made, MtpReference(target, made)


def mtp_of_three(target: Path, folder: Path) -> Made:
    made = build_mtp(target, folder, modules=3)
    return made, made, MtpReference(target, made, modules=3)


def of_deepseek(target: Path, folder: Path, family: str = "deepseek", modules: int = 1) -> Made:
    build_decoder(family, folder / "target")
    made = build_mtp(folder / "target", folder / "made", modules=modules)
    return made, made, TheirModules(made, modules)


def of_glm4(target: Path, folder: Path) -> Made:
    return of_deepseek(target, folder, "glm4-norms", 2)


def dflash(target: Path, folder: Path) -> Made:
    hidden = load_target(target).hidden_size
    drafter = build_dflash(folder, hidden=hidden, vocab=VOCAB, draft_vocab=40)
    return target, drafter, DFlashReference(target, drafter)


def dspark(target: Path, folder: Path, **variant: Any) -> Made:
    hidden = load_target(target).hidden_size
    drafter = build_dspark(folder, hidden=hidden, vocab=VOCAB, **{"draft_vocab": 40} | variant)
    return target, drafter, DSparkReference(target, drafter)


def dflash2(target: Path, folder: Path) -> Made:
    drafter = build_dflash2(folder, hidden=load_target(target).hidden_size, vocab=VOCAB)
    return target, drafter, DFlash2Reference(target, drafter)


def peagle(target: Path, folder: Path) -> Made:
    drafter = build_peagle(folder, hidden=load_target(target).hidden_size, vocab=VOCAB, draft_vocab=40)
    return target, drafter, PEagleReference(drafter)


def dspark_rnn(target: Path, folder: Path) -> Made:
    return dspark(target, folder, markov="rnn", style="deepseek", draft_vocab=None)


def heads(target: Path, folder: Path) -> Made:
    meta, made = build_meta(folder / "meta"), folder / "made"
    convert_meta(meta, made)
    shutil.copy(target / "tokenizer.json", made)
    return made, made, HeadsReference(meta)


KITS: dict[str, Callable[[Path, Path], Made]] = {
    "eagle3": eagle3, "mtp": mtp, "3 modules": mtp_of_three, "dflash": dflash, "deepseek": of_deepseek,
    "glm4": of_glm4,
    "heads": heads, "dspark": dspark, "dspark rnn": dspark_rnn, "dflash2": dflash2, "peagle": peagle,
}  # fmt: skip


@pytest.fixture(scope="module", params=KITS)
def made(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return KITS[request.param](llama, tmp_path_factory.mktemp("kit") / "drafter")


@pytest.mark.parametrize("scene", SCENES)
def test_drafts_are_those_of_a_clean_start(scene: str, made: Made, runner: Runner) -> None:
    if isinstance(runner, EagerRunner) and scene in ("partly", "cancelled", "seldom"):
        pytest.skip("the two other scenes hold all of plain torch's forwards")
    play(scene, *made, runner)


@pytest.mark.parametrize(("bug", "scene"), BUGS)
def test_a_planted_bug_is_seen(bug: Any, scene: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        play(scene, *made)


class Scores(GreedyPicker):
    def __init__(self) -> None:
        super().__init__(1)
        self.logits: list[torch.Tensor] = []

    def pick(
        self, rows: Any, step: int, logits: torch.Tensor, ids: torch.Tensor | None = None, sure: Any = None
    ) -> list[int]:
        self.logits.append(logits[0].clone())
        return super().pick(rows, step, logits, ids, sure)


def test_each_step_is_within_1e_4(made: Made, runner: Runner) -> None:
    pair = Pair(*made, runner)
    (text,) = texts(1)
    states = pair.states(text)
    sequence = Sequence(0, text, len(text), params(), 0)
    picker, depth = Scores(), min(DEPTH, pair.drafter.max_tokens)
    assert pair.drafter.begin(sequence) == 0
    for first, end in ((0, 11), (11, len(text) - 1)):
        pair.drafter.on_commit([Kept(sequence, first, [states[first:end]])])
    pair.drafter.draft(DraftContext([sequence], [depth], [0], None, [False], pair.cache, picker))
    tokens, expected = pair.reference.draft(text, states, depth)
    assert picker.tokens == [tokens]
    for logits, right in zip(picker.logits, expected, strict=True):
        assert float((logits - right).abs().max()) < 1e-4 * float(right.abs().max())


def test_rows_that_wait_are_computed_by_pieces_and_their_memory_is_used_again(made: Made) -> None:
    pair = Pair(*made)
    first, second = texts(2, 90)
    for text in (first, second):
        states, sequence = pair.states(text), Sequence(0, text, 5, params(), 0)
        assert pair.drafter.begin(sequence) == 0
        waiting = pair.drafter._texts[0].waiting
        assert not len(waiting)
        for row in range(len(text) - 1):
            pair.drafter.on_commit([Kept(sequence, row, [states[row : row + 1]])])
            assert len(waiting) <= IDLE
        done = pair.drafter.cache.committed(0)
        assert done >= len(text) - 1 - IDLE
        assert done % PIECES[-1] == 0
        picker, depth = Scores(), min(DEPTH, pair.drafter.max_tokens)
        pair.drafter.draft(DraftContext([sequence], [depth], [0], None, [False], pair.cache, picker))
        assert picker.tokens == [pair.reference.draft(text, states, depth)[0]]
        pair.drafter.forget(0)
        assert pair.drafter._spare == [waiting]


def test_identifiers_are_repeated_as_without_it(made: Made) -> None:
    """Hashes, uuids and names of models: tokens that no drafter can guess change nothing either."""
    target, drafter, _ = made
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "profile_dir": "none",
        "cache_memory": 2**23,
        "draft_tokens": 4,
    }
    engine = build_engine(EngineConfig(target=str(target), drafter=str(drafter), **settings))
    name = engine.info["drafter"].partition("+")[0]
    assert engine.tokenizer is not None
    rng, each = random.Random(5), dict[str, Any]()
    for i in range(4):
        named = " ".join(f"{rng.getrandbits(64):016x}" for _ in range(3))
        ids = engine.tokenizer.encode(named)[:90]
        each[str(i)] = ids + ids[:20], params(40, temperature=0.8 * (i % 2), seed=i)
    plain = engine.run({k: (ids, replace(p, drafter="none")) for k, (ids, p) in each.items()})
    for kind in (name, f"{name}+ngram"):
        got = engine.run({k: (ids, replace(p, drafter=kind)) for k, (ids, p) in each.items()})
        assert {k: v[0].token_ids for k, v in got.items()} == {k: v[0].token_ids for k, v in plain.items()}
        assert sum(v[0].stats.drafted for v in got.values()) > 40


class GivesUp(FixedPolicy):
    """Gives every network up in its tenth step."""

    steps = 0

    def plan(self, rows: Any, free_proposals: Any, prefill_rows: int = 0) -> DraftPlan:
        self.steps += 1
        if self.steps != 10:
            return super().plan(
                [replace(row, draft_tokens=self.k) for row in rows], free_proposals, prefill_rows
            )
        return DraftPlan(tuple([PlannedRow(None, 0, NoDraftReason.GIVEN_UP) for _ in rows]))


def test_a_network_that_is_given_up_changes_no_text(made: Made) -> None:
    pair = Pair(*made)
    each = {str(i): (text, params(24, temperature=0.8, seed=i)) for i, text in enumerate(texts(3))}
    plain = pair.engine(drafters={}, default_drafter="none").run(each)
    got = pair.engine(policy=GivesUp(DEPTH), draft_tokens="auto").run(each)
    assert {k: v[0].token_ids for k, v in got.items()} == {k: v[0].token_ids for k, v in plain.items()}
    stats = [v[0].stats for v in got.values()]
    assert sum(one.drafted for one in stats) > DEPTH
    assert all(one.reasons[NoDraftReason.GIVEN_UP.value] > 5 for one in stats)
    assert pair.drafter.cache.open_sequences == 0


def test_the_text_is_that_of_plain_decoding_without_room_for_the_drafter(made: Made) -> None:
    pair = Pair(*made, own=5)
    each = {str(i): (text, params(12, temperature=0.8, seed=i)) for i, text in enumerate(texts(3))}
    plain = pair.engine(drafters={}, default_drafter="none").run(each)
    got = pair.engine().run(each)
    assert {k: v[0].token_ids for k, v in got.items()} == {k: v[0].token_ids for k, v in plain.items()}
    assert any("drafter memory" in v[0].stats.reasons for v in got.values())
    assert any(v[0].stats.drafted for v in got.values())
    assert pair.drafter.cache.open_sequences == 0


@pytest.mark.parametrize("kit", [*KITS, "gemma"])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}], ids=str
)
def test_lossless(kit: str, settings: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """With the native kernels, where there are some: batches, preemption, prefix hits."""
    target = llama
    if kit == "gemma":
        target, kit = tmp_path / "gemma", "eagle3"
        build_target("e2b", target)
    made = native.NativeRunner(1) if native.available() else EagerRunner()
    pair = Pair(*KITS[kit](target, tmp_path / "drafter"), made, pages=11)
    each = {str(i): (text, params(30, seed=i, **settings)) for i, text in enumerate(texts(3, 40))}
    plain = pair.engine(drafters={}, default_drafter="none").run(each)
    engine = pair.engine()
    for _ in range(2):
        got = engine.run(each)
        assert {k: v[0].token_ids for k, v in got.items()} == {k: v[0].token_ids for k, v in plain.items()}
        assert sum(v[0].stats.drafted for v in got.values()) > 20
    assert engine.state.preemptions


def test_the_contract(made: Made) -> None:
    pair = Pair(*made)
    check_drafter(lambda target, cache: pair.drafter, pair.target, pair.cache)
    assert pair.drafter.cache.open_sequences == 0


def test_the_proofs_hold(made: Made) -> None:
    """Bits, tokens and drafts, of what `paceline check TARGET --drafter FOLDER` loads."""
    target, drafter, _ = made
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "cache_memory": 2**22}
    engine = build_engine(EngineConfig(target=str(target), drafter=str(drafter), **settings))
    name = engine.info["drafter"].partition("+")[0]
    plan = Plan(Effort(tokens=300, length=14, cases=9), samples=0, length=24, texts=2)
    got = prove(Subject(engine, tuple(map(tuple, texts(6)))), plan, {}, lambda name, share: None)
    assert got.holds, got.to_text()
    clean = next(found for found in got.findings if found.name == "drafts of a clean start")
    assert clean.counts[f"{name}: drafts"] > 20
    assert clean.counts[f"{name}: different"] == 0
