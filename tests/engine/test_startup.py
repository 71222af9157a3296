"""What start-up knows of a pair and of the machine: read, measured, kept, and refused where it does not hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core import Draft, Rows, SamplingParams
from paceline.drafters.base import DraftContext
from paceline.drafters.mtp import MTPDrafter
from paceline.engine import profiles
from paceline.engine.acceptance import BINS, MTP, Kind
from paceline.engine.calibration import FILE_NAME, Known, known_of, read_calibration
from paceline.engine.controller import AutoController
from paceline.engine.costs import Profile
from paceline.engine.engine import EngineParts
from paceline.engine.records import RowRecord
from paceline.engine.rounds import DraftCost, Round
from paceline.engine.selftest import ENOUGH, complaint, summarise
from paceline.engine.stopwatch import CONTEXT, GROWN, Stopwatch, measure_steps, steepness
from paceline.kv.cache import KVCache
from paceline.llm import LLM
from paceline.models.gemma4 import GemmaTarget
from paceline.models.hub import bundled

KEY = {"machine": "a", "target": "b"}
PROFILE = Profile((1, 5, 32), (1.0, 1.5, 4.0))
GOOD: dict[str, Any] = {"version": 1, "acceptance": [0.7, 0.6], "bins": [[1, 2]] * BINS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair without its calibration."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "assistant"):
        shutil.copytree(bundled("target").with_name(name), folder / name)
    (folder / "assistant" / FILE_NAME).unlink(missing_ok=True)
    return folder


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept profile that does not depend on what else this machine does, and time enough for a self-test."""
    monkeypatch.setattr("paceline.engine.startup.LIMIT", 60.0)
    monkeypatch.setattr("paceline.engine.startup.steepness", lambda parts, limit: None)


def load(pair: Path, said: list[str], **options: Any) -> LLM:
    known = {"draft_tokens": "auto", "max_model_len": 256, "threads": 1} | options
    return LLM(str(pair / "target"), say=said.append, **known)


def mtp_of(llm: LLM) -> Kind:
    controller = llm.engine.state.controller
    assert isinstance(controller, AutoController)
    return next(kind for kind in controller.budget.kinds if kind.name == "mtp")


def with_calibration(pair: Path, place: Path, text: str) -> Path:
    """The pair with a calibration file of this text."""
    shutil.copytree(pair, place, dirs_exist_ok=True)
    (place / "assistant" / FILE_NAME).write_text(text)
    return place


# The calibration file


def test_the_drafters_own_calibration_is_what_the_controller_starts_from(
    pair: Path, tmp_path: Path, said: list[str]
) -> None:
    llm = load(with_calibration(pair, tmp_path, json.dumps(GOOD)), said, draft_tokens=4)
    kind = mtp_of(llm)
    assert kind.known
    assert kind.prior == (0.7, 0.6)
    controller = llm.engine.state.controller
    assert isinstance(controller, AutoController)
    assert controller.budget.bins["mtp"] == ((1.0, 2.0),) * BINS
    assert FILE_NAME in llm.info["acceptance"]
    assert len(said) == 1


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        '{"version": 2, "acceptance": [0.5]}',
        '{"version": 1, "acceptance": []}',
        '{"version": 1, "acceptance": [1.5]}',
        '{"version": 1, "acceptance": [NaN]}',
        '{"version": 1, "acceptance": "high"}',
        '{"version": 1, "acceptance": [0.5], "bins": [[1, 2]]}',
        json.dumps(GOOD | {"bins": [[3, 2]] * BINS}),
        json.dumps(GOOD | {"bins": [[1, 2, 3]] * BINS}),
        "[" * 5000,
    ],
)
def test_a_bad_calibration_is_one_line_and_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    known, problem = read_calibration(tmp_path)
    assert known is None
    assert FILE_NAME in problem
    assert "\n" not in problem


def test_a_bad_calibration_does_not_stop_the_engine(pair: Path, tmp_path: Path, said: list[str]) -> None:
    llm = load(with_calibration(pair, tmp_path, "{"), said, draft_tokens=4)
    assert not mtp_of(llm).known
    assert sum(FILE_NAME in line for line in said) == 1
    assert llm.generate("def f(", SamplingParams(max_tokens=4))[0].finish_reason != "error"


def test_counts_of_a_file_do_not_drown_what_is_learnt_live() -> None:
    known = known_of(GOOD | {"bins": [[3e9, 4e9]] * BINS})
    assert known.bins == ((24.0, 32.0),) * BINS


def test_a_file_may_tell_greedy_and_sampled_text_apart(pair: Path, tmp_path: Path, said: list[str]) -> None:
    text = json.dumps(GOOD | {"sampled": {"acceptance": [0.5], "bins": [[1, 4]] * BINS}})
    llm = load(with_calibration(pair, tmp_path, text), said, draft_tokens=4)
    kind, controller = mtp_of(llm), llm.engine.state.controller
    assert (kind.accept(0), kind.accept(0, sampled=True)) == (0.7, 0.5)
    assert isinstance(controller, AutoController)
    assert controller.budget.bins[kind.law(sampled=True)] == ((1.0, 4.0),) * BINS


def test_the_bundled_assistant_brings_its_calibration() -> None:
    known, problem = read_calibration(bundled("assistant"))
    assert problem == ""
    assert known is not None
    assert 0.4 < known.acceptance[0] < 0.9
    assert len(known.bins) == BINS


# The self-test


def test_without_a_file_a_self_test_finds_out(pair: Path, said: list[str]) -> None:
    llm = load(pair, said)
    kind = mtp_of(llm)
    assert kind.known
    assert kind.prior[0] > 0.45
    assert "self-test of" in llm.info["acceptance"]
    assert llm.engine.state.cache.open_sequences == 0
    assert len(said) == 1


def test_a_self_test_that_would_take_too_long_is_left_out_and_says_so(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Profile((1, 9), (0.5, 1.0))
    monkeypatch.setattr("paceline.engine.startup.measure_steps", lambda parts, kind, limit: slow)
    llm = load(pair, said)
    assert not mtp_of(llm).known
    assert "self-test would take" in llm.info["acceptance"]


def test_few_drafts_tell_nothing() -> None:
    assert summarise([RowRecord(0, "mtp", 4, 2, [0.5] * 4, None)] * (ENOUGH - 1), MTP) is None


def test_acceptance_is_counted_by_position_given_all_before() -> None:
    rows = [RowRecord(0, "mtp", 4, kept, [0.9] * 4, None) for kept in (0, 1, 4, 4)] * 100
    tested = summarise(rows, MTP)
    assert tested is not None
    assert tested.known.acceptance == pytest.approx((0.75, 0.667, 1.0, 1.0), abs=0.02)
    assert known_of(tested.known.to_json()).acceptance == tested.known.acceptance


def test_only_a_pair_that_hardly_fits_is_complained_of() -> None:
    assert complaint(Known((0.3,)), MTP) is None
    line = complaint(Known((0.1,)), MTP)
    assert line is not None
    assert "paceline train" in line


# The kept profile


def test_what_was_measured_is_kept_for_the_next_start(
    pair: Path, said: list[str], tmp_path: Path, same_machine: None
) -> None:
    first = load(pair, said, profile_dir=str(tmp_path / "new"))
    (kept,) = (tmp_path / "new").iterdir()
    assert str(kept) in first.info["cost_profile"]
    second = load(pair, said, profile_dir=str(tmp_path / "new"))
    assert second.info["cost_profile"].startswith("kept")
    assert "earlier self-test" in second.info["acceptance"]
    assert mtp_of(second) == mtp_of(first)
    again = load(pair, said, profile_dir=str(tmp_path / "new"), remeasure=True)
    assert again.info["cost_profile"].startswith("measured")
    assert len(said) == 3  # nothing was complained of


@pytest.mark.parametrize("options", [{"profile_dir": None}, {"profile_dir": "none"}])
def test_nothing_is_kept_unless_asked(pair: Path, said: list[str], options: dict[str, Any]) -> None:
    assert "no profile_dir" in load(pair, said, drafter="ngram", **options).info["cost_profile"]
    assert not Path("none").exists()


def test_a_changed_target_is_measured_again(
    pair: Path, said: list[str], tmp_path: Path, same_machine: None
) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    options = {"profile_dir": str(tmp_path / "kept"), "drafter": "ngram"}
    load(tmp_path / "pair", said, **options)
    name = sorted((tmp_path / "pair" / "target").glob("*.safetensors"))[-1]
    weights = {k: v * 1.01 if v.is_floating_point() else v for k, v in load_file(name).items()}
    save_file(weights, name, {"format": "pt"})
    llm = load(tmp_path / "pair", said, **options)
    assert llm.info["cost_profile"].startswith("measured")
    assert sum("its target is another" in line for line in said) == 1
    assert load(tmp_path / "pair", said, **options).info["cost_profile"].startswith("kept")


def test_a_machine_that_has_become_another_one_is_measured_again(
    pair: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steep in (2.0, 5.5, 5.5):
        profile = Profile((1, 9), (1e-3, 1e-3 * steep))
        monkeypatch.setattr("paceline.engine.startup.measure_steps", lambda parts, kind, limit, p=profile: p)
        monkeypatch.setattr("paceline.engine.startup.steepness", lambda parts, limit, s=steep: s)
        llm = load(pair, said, profile_dir=str(tmp_path))
    assert sum("9 rows cost" in line for line in said) == 1
    assert llm.info["cost_profile"].startswith("kept")


def test_a_folder_that_cannot_be_written_only_costs_the_next_start(
    pair: Path, said: list[str], tmp_path: Path, same_machine: None
) -> None:
    (tmp_path / "file").write_text("")
    llm = load(pair, said, profile_dir=str(tmp_path / "file" / "inside"), drafter="ngram")
    assert "cannot be written" in llm.info["cost_profile"]
    assert len(said) == 1


def test_profiles_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    kept = profiles.Kept(PROFILE, Known((0.5, 0.4), ((1.0, 2.0),) * BINS))
    assert profiles.save(kept, KEY, path) == ""
    assert profiles.load(path, KEY) == (kept, "")
    assert profiles.load(tmp_path / "none.json", KEY) == (None, "")
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_profile_of_another_machine_is_ignored_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    profiles.save(profiles.Kept(PROFILE), KEY, path)
    kept, line = profiles.load(path, KEY | {"machine": "mine"})
    assert kept is None
    assert "its machine is another (a; now mine)" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"rows": [5, 1, 32]},
        {"rows": [True, 5, 32]},
        {"rows": [1]},
        {"seconds": [1, 2, -3]},
        {"seconds": "fast"},
        {"rounds": [1, 2, 3]},
        {"chill": None},
        {"chill": {"mtp": "cold"}},
        {"chill": {"mtp": [1, -1]}},
        {"text": None},
        {"text": -1},
        {"reach": [0, 0]},
        {"reach": [0, -1, 0]},
        {"rounds": {"mtp": [1, 2]}},
        {"rounds": {"mtp": [1, 2, -3]}},
        {"key": 3},
        {"known": {"acceptance": [7]}},
    ],
)
def test_a_damaged_profile_is_ignored_with_a_line(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    profiles.save(profiles.Kept(PROFILE), KEY, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    kept, line = profiles.load(path, KEY)
    assert kept is None
    assert "is ignored" in line
    path.write_text(path.read_text()[:40])
    assert "is ignored" in profiles.load(path, KEY)[1]


# The alarm


def many_drafts(llm: LLM) -> None:
    texts = [f"def function_{i}(value):\n    return" for i in range(6)]
    params = SamplingParams(max_tokens=96, ignore_eos=True, drafter="mtp", draft_tokens=2)
    llm.generate(texts, params)


# The price of a draft round


@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
def test_what_a_round_costs_is_measured_and_kept(
    pair: Path, said: list[str], tmp_path: Path, same_machine: None, drafter: str
) -> None:
    options: dict[str, Any] = {"drafter": drafter, "profile_dir": str(tmp_path / "new")}
    first = prices(load(pair, said, **options))
    assert set(first) == {"mtp"}
    base, step, token = first["mtp"]
    assert base + step + token > 0
    assert prices(load(pair, said, **options)) == first
    assert prices(load(pair, said, draft_tokens=4)) == {}
    assert prices(load(pair, said, drafter="ngram")) == {}


def prices(llm: LLM) -> dict[str, tuple[float, float, float]]:
    controller = llm.engine.state.controller
    return dict(controller.budget.costs.rounds) if isinstance(controller, AutoController) else {}


def test_a_round_is_not_priced_where_nothing_can_be_seen(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, same_machine: None
) -> None:
    def broken(self: MTPDrafter, context: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(MTPDrafter, "draft", broken)
    assert prices(load(pair, said)) == {}


class Clock:
    """Every clock of the process, so that steps take what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.chill, self.reach, self.drafted = 0.0, 0.0, 0.0, False
        self.fixed, self.scale, self.text = 2.0, 1.5, 0.0
        self.rows: list[int] = []
        costs, draft, forward = PROFILE.costs(), MTPDrafter.draft, GemmaTarget.forward
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

        def drafting(own: MTPDrafter, context: DraftContext) -> Draft:
            self.now += 3e-3 * max(context.limits) + 1e-3 * sum(context.limits)
            self.drafted = True
            return draft(own, context)

        def looking(own: GemmaTarget, rows: Rows, cache: KVCache) -> torch.Tensor:
            self.now += (
                self.fixed + self.scale * costs.target(rows.count) + (self.chill if self.drafted else 0.0)
            )
            self.now += self.text * (len(rows.starts) - 2)
            self.now += self.reach * sum(int(rows.positions[end - 1]) for end in rows.starts[1:])
            self.drafted = False
            self.rows.append(rows.count)
            return forward(own, rows, cache)

        monkeypatch.setattr(MTPDrafter, "draft", drafting)
        monkeypatch.setattr(GemmaTarget, "forward", looking)


def mtp_parts(pair: Path, said: list[str], **options: Any) -> EngineParts:
    return replace(load(pair, said, draft_tokens=4, **options).engine._parts, default_drafter="mtp")


def test_the_stopwatch_times_steps_rounds_and_what_a_round_does_to_the_step_after_it(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4)
    clock = Clock(monkeypatch)
    clock.chill, clock.text = 3.0, 0.25
    found = measure_steps(parts, MTP, limit=1e6)
    assert found is not None
    assert found.rows == (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 32)
    table = PROFILE.costs()
    assert found.seconds == pytest.approx([2.0 + 1.5 * table.target(n) for n in found.rows])
    assert found.text == pytest.approx(0.25)
    assert found.rounds["mtp"] == pytest.approx((0.0, 3e-3, 1e-3), abs=1e-2)
    assert found.chill == {"mtp": pytest.approx((3.0, 0.0), abs=1e-6)}
    assert parts.cache.open_sequences == 0
    assert not any(parts.cache.prefix.held(kind) for kind in parts.cache.layout.kinds)
    plain = measure_steps(replace(parts, default_drafter="none"), None, limit=1e6)
    assert plain is not None
    assert (plain.rounds, plain.chill) == ({}, {})


def test_the_price_of_a_round_is_told_apart_by_steps_and_tokens(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4)
    Clock(monkeypatch)
    monkeypatch.setattr(
        "paceline.engine.stopwatch.DraftCost.like", lambda seconds: DraftCost((0.0, 0.0, 0.0))
    )
    found = measure_steps(parts, MTP, limit=1e6)
    assert found is not None
    assert found.rounds["mtp"] == pytest.approx((0.0, 3e-3, 1e-3), abs=4e-4)


def test_a_slow_target_is_timed_as_far_as_there_is_time(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4)
    clock = Clock(monkeypatch)
    found = measure_steps(parts, MTP, limit=0.0)
    assert found is not None
    assert found.rows == (1, 5)
    assert len(clock.rows) == 4  # a prompt, one row, five rows, one row
    clock.rows.clear()
    some = measure_steps(parts, MTP, limit=40.0)
    assert some is not None
    assert some.rows == (1, 2, 3, 5, 9)
    assert "mtp" in some.rounds


def test_what_a_long_context_costs_is_told_where_it_is_soon_read(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4, max_model_len=2048)
    clock = Clock(monkeypatch)
    clock.fixed, clock.scale, clock.reach = 1e-3, 1e-4, 1e-6
    found = measure_steps(parts, MTP, limit=1e6)
    assert found is not None
    assert found.reach[:2] == (pytest.approx(1e-6, rel=0.1), pytest.approx(0.0, abs=1e-8))
    assert CONTEXT < found.reach[2] < CONTEXT + GROWN + 32  # texts do not grow from turn to turn
    visits: list[int] = []
    visit = Stopwatch._visit
    monkeypatch.setattr(
        Stopwatch, "_visit", lambda watch, prompt: visits.append(prompt) or visit(watch, prompt)
    )
    hasty = measure_steps(parts, MTP, limit=0.4)
    assert hasty is not None
    assert hasty.reach[0] == pytest.approx(1e-6, rel=0.1)
    assert len(visits) == 3  # a long text between two usual ones, then the time is over
    clock.fixed = 1.0  # now a prompt is not soon read
    slow = measure_steps(parts, MTP, limit=1e6)
    assert slow is not None
    assert slow.reach == (0.0, 0.0, 0.0)


def test_without_room_for_two_steps_nothing_is_known(pair: Path, said: list[str], tmp_path: Path) -> None:
    assert measure_steps(mtp_parts(pair, said, max_model_len=10), MTP, limit=1.0) is None
    assert steepness(mtp_parts(pair, said, max_model_len=10), limit=1.0) is None
    short = load(pair, said, max_model_len=10, profile_dir=str(tmp_path / "none"))
    assert "not measured" in short.info["cost_profile"]
    assert not (tmp_path / "none").exists()
    now = steepness(mtp_parts(pair, said), limit=1.0)
    assert now is not None
    assert now > 1.0


def test_one_slow_moment_is_forgotten_while_nothing_is_drafted() -> None:
    costs = Profile((1, 5), (1e-3, 2e-3), rounds={"mtp": (1e-4, 1e-4, 1e-5)}).costs()
    once = costs.observe_rounds("mtp", [Round(1, 1, 8e-3)])
    assert sum(once.drafting("mtp")) > 3 * sum(costs.drafting("mtp"))
    assert sum(once.idle("mtp", 4000).drafting("mtp")) < 1.2 * sum(costs.drafting("mtp"))
    assert once.idle("model", 10) is once


def test_the_alarm_is_silent_for_the_bundled_pair_and_rings_for_a_spoilt_one(tmp_path: Path) -> None:
    said: list[str] = []
    many_drafts(LLM("demo", draft_tokens=2, max_model_len=256, threads=1, say=said.append))
    assert not [line for line in said if "first draft tokens were kept" in line]
    for name in ("target", "assistant"):
        shutil.copytree(bundled("target").with_name(name), tmp_path / name)
    path = tmp_path / "assistant" / "model.safetensors"
    weights = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.dim() == 2 and "embed" not in name:
            weights[name] = tensor[torch.randperm(len(tensor), generator=generator)].contiguous()
    save_file(weights, path, {"format": "pt"})
    many_drafts(LLM(str(tmp_path / "target"), draft_tokens=2, max_model_len=256, threads=1, say=said.append))
    assert len([line for line in said if "first draft tokens were kept" in line]) == 1
