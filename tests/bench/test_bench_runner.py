"""The benchmark's own arithmetic on an engine whose speed is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench import report, workloads
from paceline.bench.plot import Chart, svg
from paceline.bench.runner import NONE, Bench, Cell, Run, Setting, measure, run_once
from paceline.bench.stats import quantile, spread
from paceline.bench.table import lines, to_json, verdict
from paceline.bench.workloads import Bounds, Prompt, prompts
from paceline.core import Delta, SamplingParams, Stats
from paceline.errors import UsageError

CODE = Cell("code", 2, 0.0)


class FakeEngine:
    """Emits 1 + min(draft_tokens, 2) tokens a step for every text."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}  # request -> [left, per step]
        self.limits: dict[str, int] = {}
        self.begun: list[tuple[str, int | str | None]] = []
        self.interrupt_after = 10**9

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None:
        drafted = 2 if params.draft_tokens == "auto" else min(int(params.draft_tokens or 0), 2)
        self.open[request_id] = [params.max_tokens, 1 + drafted]
        self.begun.append((params.drafter or "", params.draft_tokens))

    def cancel(self, request_id: str) -> None:
        self.open.pop(request_id, None)

    def step(self) -> list[Delta]:
        self.interrupt_after -= 1
        if self.interrupt_after < 0:
            raise KeyboardInterrupt
        out = []
        for name, (left, many) in list(self.open.items()):
            n = min(left, many)
            self.open[name][0] -= n
            delta = Delta(name, 0, "", list(range(left, left - n, -1)), ["target"] * n)
            if left == n:
                delta.finish_reason = "length"
                delta.stats = Stats(steps=5, drafted_by_position=[5, 5], accepted_by_position=[4, 2])
                del self.open[name]
            out.append(delta)
        return out


def bench(engine: FakeEngine, **changes: object) -> Bench:
    settings = (NONE, Setting("mtp", "auto"), Setting("mtp", 1), Setting("mtp", 4))
    made = Bench(engine, lambda name, n: [Prompt([1, 2])] * n, (CODE,), settings, tokens=8, rounds=3)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_setting_runs_between_two_baselines_in_every_round() -> None:
    runs, ended = measure(bench(FakeEngine()))
    assert ended == ""
    first, second = ["mtp auto", "mtp 1", "mtp 4"], ["mtp 1", "mtp 4", "mtp auto"]
    assert [r.setting.label for r in runs[1:7:2]] == first
    assert [r.setting.label for r in runs[8:14:2]] == second
    assert {r.setting.label for r in [*runs[0:7:2], *runs[7:14:2]]} == {"none"}
    assert [r.place for r in runs[:8]] == [0, 1, 2, 3, 4, 5, 6, 0]
    assert {r.tokens for r in runs} == {16}
    assert len({r.digest for r in runs}) == 1
    assert all(len(r.first_token) == 2 and r.gaps for r in runs)
    table = lines(runs)
    assert [line.setting.label for line in table] == ["none", "mtp auto", "mtp 1", "mtp 4"]
    assert all(line.ratio and line.ratio.count == 3 for line in table[1:])
    assert all(line.same_text for line in table[1:])
    assert table[1].acceptance == [0.8, 0.4]
    assert table[1].tokens_per_step == pytest.approx(1.6)


def test_an_interrupt_keeps_what_is_measured_and_leaves_the_engine_empty() -> None:
    engine = FakeEngine()
    engine.interrupt_after = 60
    runs, ended = measure(bench(engine))
    assert ended == "interrupted"
    assert 0 < len(runs) < 21
    assert not engine.open
    assert measure(bench(FakeEngine(), seconds=0.0))[1].startswith("stopped after")


def made(setting: Setting, speed: float, place: int = 0, digest: str = "a") -> Run:
    return Run(
        CODE,
        setting,
        0,
        place,
        decode_tokens=int(speed),
        decode_seconds=1.0,
        tokens=1,
        steps=1,
        digest=digest,
    )


def test_verdict_compares_auto_with_none_and_with_the_best_fixed_length() -> None:
    auto, one, four = Setting("mtp", "auto"), Setting("mtp", 1), Setting("mtp", 4)
    runs = [made(NONE, 100), made(auto, 190, 1), made(NONE, 100, 2), made(one, 150, 3), made(four, 200, 3)]
    found = verdict(lines(runs))
    assert found.worst_auto == (1.9, CODE)
    assert found.worst_against_fixed == (pytest.approx(0.95), CODE, "mtp 4")
    assert "helps" in found.say()[0]
    other = verdict(lines([made(NONE, 100), made(auto, 90, 1, digest="b")]))
    assert "does not help" in other.say()[0]
    assert "paceline check" in other.say()[-1]


def test_a_setting_is_held_against_its_neighbours_only() -> None:
    auto = Setting("mtp", "auto")
    runs = [made(NONE, 100), made(auto, 150, 1), made(NONE, 200, 2), made(NONE, 800, 4)]
    assert [line.ratio.median for line in lines(runs) if line.ratio] == [1.0, 1.0]
    assert lines(runs[:2])[1].ratio == spread([1.5])  # interrupted: one neighbour is enough
    assert lines([made(auto, 150, 1)])[0].ratio is None


def test_report_is_complete_and_self_contained() -> None:
    runs, _ = measure(bench(FakeEngine()))
    table = lines(runs)
    html = report.page(table, verdict(table).say(), {"torch": "x"}, {1: 1e-3, 2: 2e-3})
    assert html.count("<svg") == 4
    assert "http" not in html
    assert "<script" not in html
    data = json.loads(json.dumps(to_json(runs, {"provenance": {}})))
    assert len(data["runs"]) == 21
    assert report.terminal_table(table).row_count == 4
    assert "not measured" in svg(Chart("t", "x", "y", {}))


def test_a_report_that_cannot_be_written_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    with pytest.raises(UsageError, match="choose another place"):
        report.write(tmp_path / "report", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    report.write(tmp_path / "new.html", "text")
    assert (tmp_path / "new.html").read_text() == "text"


def test_spread_and_quantiles() -> None:
    s = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (s.median, s.low, s.high, s.count) == (3.0, 2.0, 4.0, 5)
    assert s.ci_low <= 3.0 <= s.ci_high
    assert quantile([1.0], 0.9) == 1.0


class Letters:
    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        return [*([0] if add_bos is not False else []), *(1 + ord(c) % 90 for c in text)]


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_workloads_fit_the_context_and_repeat_exactly(name: str) -> None:
    bounds = Bounds(91, 300, frozenset({0}))
    first, again = (prompts(name, Letters(), bounds, 6) for _ in range(2))
    assert [(p.tokens, p.reference) for p in first] == [(p.tokens, p.reference) for p in again]
    assert len(first) == 6
    assert all(2 <= len(p.tokens) <= 300 for p in first)
    assert all(0 <= t < 91 for p in first for t in p.tokens)
    assert (name in ("edit", "dictated")) == (first[0].reference is not None)


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(UsageError, match="code, prose"):
        prompts("poetry", Letters(), Bounds(10, 10), 1)


def test_a_failed_text_is_not_measured() -> None:
    class Failing(FakeEngine):
        def step(self) -> list[Delta]:
            return [Delta(name, 0, "", [], [], finish_reason="error", error="NaN") for name in self.open]

    engine = Failing()
    with pytest.raises(RuntimeError, match="NaN"):
        run_once(bench(engine), CODE, NONE, 0)
    assert not engine.open


def test_a_dictated_answer_is_the_only_one_allowed() -> None:
    made = prompts("dictated", Letters(), Bounds(91, 300), 1)[0].constraint
    assert made is not None
    rule = made()
    first = rule.masks([])[0]
    assert first is not None
    assert first.sum() == 1
    rule.commit([int(first.argmax())])
    one, two = rule.masks([5])
    assert one is not None
    assert two is not None
    assert (one.sum(), two.sum()) == (1, 1)


def test_the_baseline_against_itself_shows_the_noise() -> None:
    auto = Setting("mtp", "auto")
    runs = [made(NONE, 100), made(auto, 150, 1), made(NONE, 120, 2), made(auto, 150, 3), made(NONE, 140, 4)]
    table = lines(runs)
    assert [line.against_itself for line in table] == [1.0, None]
    noisy = verdict(lines([*runs[:2], made(NONE, 90, 2), *runs[3:]]))
    assert noisy.noise == (pytest.approx(0.75), CODE)
    assert any("none against itself" in line and "0.75" in line for line in noisy.say())
    assert verdict(lines(runs[:3])).noise is None
