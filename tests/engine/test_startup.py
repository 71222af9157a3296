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

from paceline.control.adaptive import KnownPair, Learnt
from paceline.control.base import heat_of, temperature_of
from paceline.control.confidence import BINS
from paceline.control.cost_model import CostTable, DraftCost
from paceline.core import Draft, ForwardBatch, SamplingParams
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import DraftContext
from paceline.engine.engine import EngineParts
from paceline.hub.resolve import bundled
from paceline.kv.cache import KVCache
from paceline.llm import LLM
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.startup import UNKNOWN, profile_store
from paceline.startup.calibration_file import (
    FILE_NAME,
    Known,
    complaint,
    known_of,
    learnt_of,
    read_calibration,
)
from paceline.startup.profiling import NEEDED, OFTEN, measure_steps

KEY = {"machine": "a", "target": "b"}
TABLE = CostTable((1, 5, 32), (1.0, 1.5, 4.0), {"mtp": DraftCost(0.1, 0.2, 0.3)})
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
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices that are measured alike, whatever else the machine does."""
    monkeypatch.setattr("paceline.startup.measure_steps", lambda parts, limit: TABLE)


def load(pair: Path, said: list[str], **options: Any) -> LLM:
    known = {"draft_tokens": "auto", "max_model_len": 256, "threads": 1} | options
    return LLM(str(pair / "target"), say=said.append, **known)


def with_calibration(pair: Path, place: Path, text: str) -> Path:
    """The pair with a calibration file of this text."""
    shutil.copytree(pair, place, dirs_exist_ok=True)
    (place / "assistant" / FILE_NAME).write_text(text)
    return place


# The calibration file


def test_the_drafters_own_calibration_is_what_the_policy_starts_from(
    pair: Path, tmp_path: Path, said: list[str]
) -> None:
    llm = load(with_calibration(pair, tmp_path, json.dumps(GOOD)), said, draft_tokens=4)
    assert llm.info["acceptance"] == f"0.70 0.60 by position, {FILE_NAME}"
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
        json.dumps(GOOD | {"sampled": GOOD | {"temperature": 0}}),
        json.dumps(GOOD | {"sampled": GOOD | {"temperature": "hot"}}),
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
    assert llm.info["acceptance"] == UNKNOWN
    assert sum(FILE_NAME in line for line in said) == 1
    assert llm.generate("def f(", SamplingParams(max_tokens=4))[0].finish_reason != "error"


def test_counts_of_a_file_do_not_drown_what_is_learnt_live() -> None:
    known = known_of(GOOD | {"bins": [[3e9, 4e9]] * BINS})
    assert known.bins == ((24.0, 32.0),) * BINS


def test_a_file_may_tell_greedy_and_sampled_text_apart() -> None:
    known = known_of(GOOD | {"sampled": {"acceptance": [0.5], "bins": [[1, 4]] * BINS}})
    pairs = known.pairs("mtp")
    assert pairs["mtp", False].acceptance == (0.7, 0.6)
    assert pairs["mtp", True].acceptance == (0.5,)
    assert pairs["mtp", True].bins == ((1.0, 4.0),) * BINS
    assert known_of(GOOD).pairs("mtp")["mtp", True].acceptance == pytest.approx((0.56, 0.48))
    assert [pairs["mtp", sampled].heat for sampled in (False, True)] == [0, heat_of(1.0)]
    at = known_of(GOOD | {"sampled": {"acceptance": [0.5], "temperature": 0.6}})
    assert at.pairs("mtp")["mtp", True].heat == heat_of(0.6)
    assert known_of(at.to_json()) == at


def test_the_bundled_assistant_brings_its_calibration() -> None:
    known, problem = read_calibration(bundled("assistant"))
    assert problem == ""
    assert known is not None
    assert 0.4 < known.acceptance[0] < 0.9
    assert len(known.bins) == BINS
    assert known.sampled is not None
    assert known.sampled.temperature == 0.8


# What texts have shown


def test_what_drafts_have_shown_takes_the_place_of_what_was_known() -> None:
    before = Known((0.5,), (), Known((0.4,), (), None, 0.3), 1.0)
    shown = KnownPair((0.9, 0.8), ((1.0, 2.0),) * BINS)
    hot = KnownPair((0.6,), (), heat_of(0.8))

    def after(pairs: dict[tuple[str, bool], KnownPair], known: Known | None) -> Known | None:
        return learnt_of(Learnt(TABLE, pairs, {}), "model", known)

    both = after({("model", False): shown, ("model", True): hot}, before)
    assert both == Known((0.9, 0.8), shown.bins, Known((0.6,), (), None, temperature_of(hot.heat)))
    assert heat_of(both.sampled.temperature if both.sampled else 0.0) == hot.heat
    assert after({("model", False): shown}, before) == Known((0.9, 0.8), shown.bins, before.sampled)
    assert after({("mtp", False): shown}, before) == before
    assert after({}, None) is None
    only_hot = after({("model", True): hot}, None)
    assert only_hot is not None
    assert only_hot.acceptance == (0.6,)


@pytest.mark.usefixtures("steady")
def test_an_unknown_pair_is_found_out_by_drafting_and_kept_at_the_end(
    pair: Path, said: list[str], tmp_path: Path
) -> None:
    options = {"profile_dir": str(tmp_path)}
    with load(pair, said, **options) as llm:
        assert llm.info["acceptance"] == UNKNOWN
        many_drafts(llm)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    assert kept["drafted"] >= 12
    second = load(pair, said, **options)
    assert "drafts of earlier texts" in second.info["acceptance"]
    assert 0.3 < float(second.info["acceptance"].split()[0]) < 1.0
    second.close()
    assert json.loads(path.read_text()) == kept  # nothing was written since
    again = load(pair, said, remeasure=True, **options)
    assert again.info["acceptance"] == UNKNOWN
    assert again.info["cost_profile"].startswith("measured")
    assert len(said) == 3  # nothing was complained of


def test_only_a_pair_that_hardly_fits_is_complained_of() -> None:
    assert complaint(Known((0.3,)), "mtp") is None
    for name in ("model", "heads"):  # `paceline train` makes none of these
        assert "give a smaller model of the target's own family" in (complaint(Known((0.1,)), name) or "")
    for name in ("mtp", "eagle3", "dflash", "dflash2", "dspark"):
        assert "paceline train" in (complaint(Known((0.1,)), name) or "")


# The kept profile


@pytest.mark.usefixtures("steady")
def test_what_was_measured_is_kept_for_the_next_start(
    pair: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"profile_dir": str(tmp_path / "new"), "drafter": "ngram"}
    first = load(pair, said, **options)
    (path,) = (tmp_path / "new").iterdir()
    assert str(path) in first.info["cost_profile"]
    assert load(pair, said, **options).info["cost_profile"].startswith("kept")
    monkeypatch.setattr("paceline.startup.measure_steps", lambda parts, limit: replace(TABLE, trusted=False))
    again = load(pair, said, remeasure=True, **options)
    assert again.info["cost_profile"].startswith("measured")
    assert "not trusted" in again.info["cost_profile"]
    assert load(pair, said, **options).info["cost_profile"].startswith("measured")


@pytest.mark.parametrize("options", [{"profile_dir": None}, {"profile_dir": "none"}])
def test_nothing_is_kept_unless_asked(pair: Path, said: list[str], options: dict[str, Any]) -> None:
    assert "no profile_dir" in load(pair, said, drafter="ngram", **options).info["cost_profile"]
    assert not Path("none").exists()


@pytest.mark.usefixtures("steady")
def test_a_changed_target_is_measured_again(pair: Path, said: list[str], tmp_path: Path) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    options = {"profile_dir": str(tmp_path / "kept"), "drafter": "ngram"}
    load(tmp_path / "pair", said, **options)
    name = sorted((tmp_path / "pair" / "target").glob("*.safetensors"))[-1]
    weights = {k: v * 1.01 if v.is_floating_point() else v for k, v in load_file(name).items()}
    save_file(weights, name, {"format": "pt"})
    llm = load(tmp_path / "pair", said, **options)
    assert llm.info["cost_profile"].startswith("measured")
    assert len(said) == 2  # in silence
    assert load(tmp_path / "pair", said, **options).info["cost_profile"].startswith("kept")


def test_a_folder_that_cannot_be_written_only_costs_the_next_start(
    pair: Path, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    llm = load(pair, said, profile_dir=str(tmp_path / "file" / "inside"), drafter="ngram")
    assert "cannot be written" in llm.info["cost_profile"]
    assert len(said) == 1


def test_profiles_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    kept = profile_store.Kept(replace(TABLE, trusted=False), Known((0.5, 0.4), ((1.0, 2.0),) * BINS), 40)
    assert profile_store.save(kept, KEY, path) == ""
    assert profile_store.load(path, KEY) == kept
    assert profile_store.load(tmp_path / "none.json", KEY) is None
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_profile_of_another_machine_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    profile_store.save(profile_store.Kept(TABLE), KEY, path)
    assert profile_store.load(path, KEY) is not None
    assert profile_store.load(path, KEY | {"machine": "mine"}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 4},
        {"rows": [5, 1, 32]},
        {"rows": [1]},
        {"rows": [1, "two", 32]},
        {"seconds": [1, 2, -3]},
        {"seconds": [1, 2, float("nan")]},
        {"seconds": "fast"},
        {"drafts": [1, 2, 3]},
        {"drafts": {"mtp": [1, 2]}},
        {"drafts": {"mtp": [1, 2, -3]}},
        {"key": 3},
        {"trusted": None, "drafted": "many"},
        {"known": {"acceptance": [7]}},
    ],
)
def test_a_damaged_or_older_profile_is_measured_again_in_silence(
    pair: Path, said: list[str], tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "x.json"
    profile_store.save(profile_store.Kept(TABLE), KEY, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert profile_store.load(path, KEY) is None
    path.write_text(path.read_text()[:40])
    assert profile_store.load(path, KEY) is None


@pytest.mark.usefixtures("steady")
def test_a_profile_of_an_older_layout_says_nothing(pair: Path, said: list[str], tmp_path: Path) -> None:
    options = {"profile_dir": str(tmp_path), "drafter": "ngram"}
    load(pair, said, **options)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 4}))
    assert load(pair, said, **options).info["cost_profile"].startswith("measured")
    assert len(said) == 2
    assert load(pair, said, **options).info["cost_profile"].startswith("kept")


# The alarm


def many_drafts(llm: LLM) -> None:
    texts = [f"def function_{i}(value):\n    return" for i in range(6)]
    params = SamplingParams(max_tokens=96, ignore_eos=True, drafter="mtp", draft_tokens=2)
    llm.generate(texts, params)


# What steps and draft rounds cost


class Clock:
    """Every clock of the process, so that steps take what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.rows: list[int] = []
        costs, draft, forward = TABLE.dense(100), MTPDrafter.draft, GemmaTarget.forward
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

        def drafting(own: MTPDrafter, context: DraftContext) -> Draft:
            self.now += 3e-3 * max(context.limits) + 1e-3 * sum(context.limits)
            return draft(own, context)

        def looking(own: GemmaTarget, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
            self.now += costs[rows.count - 1]
            self.rows.append(rows.count)
            return forward(own, rows, cache)

        monkeypatch.setattr(MTPDrafter, "draft", drafting)
        monkeypatch.setattr(GemmaTarget, "forward", looking)


def mtp_parts(pair: Path, said: list[str], **options: Any) -> EngineParts:
    return replace(load(pair, said, draft_tokens=4, **options).engine._parts, default_drafter="mtp")


def test_profiling_times_steps_and_rounds_in_their_rhythm(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4)
    clock = Clock(monkeypatch)
    found = measure_steps(parts, limit=150.0)
    assert found is not None
    assert found.trusted
    assert found.rows == (1, 2, 3, 5, 9, 10, 17, 34)
    table = TABLE.dense(34)
    assert found.seconds == pytest.approx([table[n - 1] for n in found.rows])
    assert found.drafts["mtp"] == pytest.approx((0.0, 3e-3, 1e-3))
    assert parts.cache.open_sequences == 0
    assert clock.rows.count(1) >= OFTEN
    plain = measure_steps(replace(parts, default_drafter="none"), limit=100.0)
    assert plain is not None
    assert plain.rows == (1, 2, 3, 5, 9, 17, 34)
    assert plain.drafts == {}


def test_a_slow_target_is_timed_as_far_as_there_is_time_and_not_trusted(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plain step takes a second: there are fifteen, of which warming up takes eight and three steps four each."""
    parts = mtp_parts(pair, said, max_batch=4)
    clock = Clock(monkeypatch)
    found = measure_steps(parts, limit=0.0)
    assert found is not None
    assert found.rows == (1, 2, 5)
    assert not found.trusted
    assert clock.now < 25.0
    assert clock.rows.count(5) < NEEDED * OFTEN


def test_prices_of_a_busy_machine_are_not_trusted(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mtp_parts(pair, said, max_batch=4)
    clock, forward = Clock(monkeypatch), GemmaTarget.forward

    def disturbed(own: GemmaTarget, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        clock.now += 3.0 * (len(clock.rows) % 2)
        return forward(own, rows, cache)

    monkeypatch.setattr(GemmaTarget, "forward", disturbed)
    found = measure_steps(parts, limit=150.0)
    assert found is not None
    assert not found.trusted


def test_a_drafter_that_fails_has_no_price(
    pair: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: MTPDrafter, context: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(MTPDrafter, "draft", broken)
    found = measure_steps(mtp_parts(pair, said), limit=0.5)
    assert found is not None
    assert found.drafts == {}


def test_without_room_for_two_steps_nothing_is_known(pair: Path, said: list[str], tmp_path: Path) -> None:
    assert measure_steps(mtp_parts(pair, said, max_model_len=10), limit=1.0) is None
    short = load(pair, said, max_model_len=10, profile_dir=str(tmp_path / "none"))
    assert "not measured" in short.info["cost_profile"]
    assert not (tmp_path / "none").exists()


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
