"""The benchmark's own arithmetic on an engine whose speed is known."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from paceline.bench import report, runner, workloads
from paceline.bench.meters import EnergyMeter
from paceline.bench.plot import Chart, svg
from paceline.bench.runner import (
    COLD,
    MOST_ROUNDS,
    NONE,
    TURN,
    Bench,
    Cell,
    Run,
    Setting,
    length,
    measure,
    run_beside,
    unsure,
)
from paceline.bench.stats import quantile, spread
from paceline.bench.table import lines, to_json, verdict
from paceline.bench.workloads import Bounds, Prompt, prompts
from paceline.core import Delta, SamplingParams, Stats
from paceline.errors import UsageError

CODE = Cell("code", 2, 0.0)
BOTH = length(8, 0) + length(8, 1)  # tokens of two texts


class FakeEngine:
    """Emits 1 + min(draft_tokens, 2) tokens a step for every text. Steps of all engines are written into one `log`."""

    def __init__(self, log: list[tuple[FakeEngine, int]] | None = None) -> None:
        self.open: dict[str, list[int]] = {}  # request -> [left, per step]
        self.log = [] if log is None else log
        self.interrupt_after = 10**9
        self.shift = 0  # of what it writes

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None:
        drafted = 2 if params.draft_tokens == "auto" else min(int(params.draft_tokens or 0), 2)
        self.open[request_id] = [params.max_tokens, 1 + drafted]

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
            ids = [left - i + self.shift for i in range(n)]
            delta = Delta(name, 0, "", ids, ["target"] * n)
            if left == n:
                delta.finish_reason = "length"
                delta.stats = Stats(steps=5, drafted_by_position=[5, 5], accepted_by_position=[4, 2])
                del self.open[name]
            out.append(delta)
        self.log.append((self, sum(len(delta.token_ids) for delta in out)))
        return out


def bench(engine: FakeEngine, **changes: object) -> Bench:
    settings = (NONE, Setting("mtp", "auto"), Setting("mtp", 1), Setting("mtp", 4))
    plain = FakeEngine(engine.log)
    made = Bench(engine, plain, lambda name, n: [Prompt([1, 2])] * n, (CODE,), settings, tokens=8, rounds=3)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_setting_runs_beside_a_baseline_in_every_round() -> None:
    runs, ended = measure(bench(FakeEngine()))
    assert ended == ""
    labels = [run.setting.label for run in runs]
    assert set(labels[1::2]) == {"none"}
    assert labels[0:8:2] == ["none", "mtp auto", "mtp 1", "mtp 4"]
    assert labels[8:16:2] == ["mtp auto", "mtp 1", "mtp 4", "none"]
    assert {run.tokens for run in runs} == {BOTH}
    assert len({run.digest for run in runs}) == 1
    assert all(len(run.first_token) == 2 and run.gaps for run in runs)
    table = lines(runs)
    assert [line.setting.label for line in table] == ["none", "mtp auto", "mtp 1", "mtp 4"]
    assert all(line.ratio and line.ratio.count == 3 for line in table)
    assert all(line.same_text for line in table)
    assert table[1].acceptance == [0.8, 0.4]
    assert table[1].tokens_per_step == pytest.approx(BOTH / 10)


def test_a_setting_and_its_baseline_take_turns() -> None:
    engine = FakeEngine()
    run, plain = run_beside(bench(engine, tokens=400), CODE, Setting("mtp", 4), 0)
    written, ahead, last = {True: 0, False: 0}, 0, None
    turns = {True: 0, False: 0}
    for who, tokens in engine.log[1:]:  # the first step reads the prompts
        turns[who is engine] += who is not last
        written[who is engine] += tokens
        ahead = max(ahead, abs(written[True] - written[False]))
        last = who
    assert turns[True] == turns[False] > 3  # who begins returns to cold caches as often as the other
    assert ahead <= TURN * CODE.batch + 2 * 3  # a step of two texts, three tokens each
    assert run.tokens == plain.tokens == 400 + length(400, 1)


def test_speed_is_that_of_as_many_tokens_at_a_full_batch() -> None:
    class Uneven(FakeEngine):
        def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None:
            super().add(request_id, prompt_ids, params, salt)
            if request_id.endswith("-0"):
                self.open[request_id][1] = 4  # this text is drafted well

    run, plain = run_beside(bench(Uneven(), tokens=100), CODE, Setting("mtp", 1), 1)
    # but for the first tokens of each turn, which in the second are all until one text is done
    assert TURN < length(100, 1) < TURN + COLD
    assert plain.decode_tokens == 2 * (TURN - COLD)
    assert 0 <= run.decode_tokens - plain.decode_tokens < 4 + 2  # as many, to a step
    assert run.tokens == plain.tokens == 100 + length(100, 1)


def test_a_text_that_is_done_makes_place_for_the_next_and_prompts_are_not_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Reading(FakeEngine):
        """A step in which the prompts of new texts are read takes ten times as long, the others go on."""

        def __init__(self, log: list[tuple[FakeEngine, int]] | None = None) -> None:
            super().__init__(log)
            self.at_once, self.fresh = 0, set[str]()

        def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None:
            super().add(request_id, prompt_ids, params, salt)
            self.fresh.add(request_id)

        def step(self) -> list[Delta]:
            clock[0] += 10.0 if self.fresh else 1.0
            if not any(name.startswith("read") for name in self.open):
                self.at_once = max(self.at_once, len(self.open))
            for name in self.fresh:
                self.open[name][1] = 1  # its first token
            deltas = super().step()
            for name in self.fresh & self.open.keys():
                self.open[name][1] = 2 if self is engine else 1
            self.fresh.clear()
            return deltas

    cell = Cell("code", 3, 0.0)
    engine, beside = Reading(), Reading()
    run, plain = run_beside(bench(engine, plain=beside, tokens=41, least=150.0), cell, Setting("mtp", 1), 0)
    assert run.seconds + plain.seconds >= 300.0
    texts = len(run.first_token)
    assert texts == len(plain.first_token) > 2 * cell.batch
    assert run.tokens == plain.tokens == sum(length(41, i) for i in range(texts))
    assert engine.at_once == beside.at_once == cell.batch
    assert set(run.first_token) == set(plain.first_token) == {10.0}  # since each text began
    assert plain.speed == pytest.approx(3.0)  # the steps in which prompts were read are not in it
    assert 5.5 < run.speed <= 6.0  # the last token of some comes alone
    assert 0.4 * run.tokens < run.decode_tokens < run.tokens
    assert abs(run.decode_tokens - plain.decode_tokens) <= 6
    assert run.same_text
    assert not engine.open
    assert not beside.open


def test_a_run_goes_on_with_further_texts_until_it_has_lasted() -> None:
    class Slow(FakeEngine):
        def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None:
            super().add(request_id, prompt_ids, params, salt)
            if not request_id.startswith("read"):
                names.append(request_id)
                seeds.add(params.seed)

        def step(self) -> list[Delta]:
            time.sleep(0.002)
            return super().step()

    names: list[str] = []
    seeds: set[int | None] = set()
    once, _ = run_beside(bench(Slow()), CODE, NONE, 0)
    names.clear()
    run, plain = run_beside(bench(Slow(), least=10 * once.seconds), CODE, NONE, 0)
    assert run.seconds + plain.seconds >= 20 * once.seconds
    assert run.tokens == plain.tokens == sum(length(8, i) for i in range(len(names)))
    assert len(names) > 2 * 5
    assert len(set(names)) == len(names)
    assert len(seeds) == len(names)
    assert len(run.first_token) == len(names)
    assert 0 < run.decode_tokens < run.tokens
    assert run.same_text
    assert run.ratio > 0
    assert sum(run.drafted_by_position) == 10 * len(names)


def test_texts_have_all_lengths_between_half_of_the_longest_and_that() -> None:
    lengths = [length(100, i) for i in range(64)]
    assert lengths[0] == max(lengths) == 100
    assert len(set(lengths)) > 40
    assert 50 <= min(lengths) <= 52
    assert sum(lengths) / 64 == pytest.approx(75, abs=1)
    assert length(2, 1) == 2


def test_what_is_not_known_well_enough_gets_further_rounds() -> None:
    def runs(ratios: list[float], draft_tokens: int) -> list[Run]:
        setting = Setting("mtp", draft_tokens)
        return [
            Run(CODE, setting, i, decode_tokens=round(1000 * ratio), decode_seconds=1.0, plain_speed=1000.0)
            for i, ratio in enumerate(ratios)
        ]

    seen = [*runs([1.0, 1.01, 0.99] * 4, 1), *runs([1.0, 1.2, 0.8] * 4, 2), *runs([3.0], 4)]
    assert [setting.label for _, setting in unsure(seen, 0.02)] == ["mtp 2", "mtp 4"]
    assert unsure(seen, float("inf")) == []
    some = measure(bench(FakeEngine(), rounds=2))[0]
    assert len(some) == 2 * 2 * 4
    never = measure(bench(FakeEngine(), rounds=2, within=1e-12))[0]
    assert len(some) < len(never) <= MOST_ROUNDS * len(some)
    assert {run.round for run in never} == set(range(MOST_ROUNDS * 2))
    assert {run.round for run in measure(bench(FakeEngine(), rounds=2, within=1e9))[0]} == {0, 1}


def test_another_text_than_the_baseline_is_seen() -> None:
    engine = FakeEngine()
    engine.shift = 1
    runs, _ = measure(bench(engine, rounds=1))
    assert not any(run.same_text for run in runs[::2])
    said = verdict(lines(runs)).say()
    assert "paceline check" in said[-1]


def test_one_that_waits_for_the_other_does_not_hang() -> None:
    class Waiting(FakeEngine):
        def step(self) -> list[Delta]:
            return super().step() if not beside.plain.has_work else []  # no room beside the other one

    engine = Waiting()
    beside = bench(engine)
    run, plain = run_beside(beside, CODE, NONE, 0)
    assert run.tokens == plain.tokens == BOTH


def test_energy_is_that_of_its_own_turns(tmp_path: Path) -> None:
    file = tmp_path / "energy_uj"
    file.write_text("0")

    class Burning(FakeEngine):
        def step(self) -> list[Delta]:
            file.write_text(str(int(file.read_text()) + 3_000_000))
            return super().step()

    engine = Burning()
    run, plain = run_beside(bench(engine, energy=EnergyMeter("RAPL package", (file,))), CODE, NONE, 0)
    assert run.joules == pytest.approx(3.0 * 8)
    assert plain.joules == 0.0


def test_an_interrupt_keeps_what_is_measured_and_leaves_the_engine_empty() -> None:
    engine = FakeEngine()
    engine.interrupt_after = 60
    beside = bench(engine)
    runs, ended = measure(beside)
    assert ended == "interrupted"
    assert 0 < len(runs) < 24
    assert not engine.open
    assert not beside.plain.has_work
    assert measure(bench(FakeEngine(), seconds=0.0))[1].startswith("the time of 0 s was up")


def made(setting: Setting, speed: float, plain: float = 100.0, same: bool = True) -> Run:
    return Run(
        CODE, setting, 0, decode_tokens=int(speed), decode_seconds=1.0, plain_speed=plain, tokens=1, steps=1,
        same_text=same,
    )  # fmt: skip


def test_verdict_compares_auto_with_none_and_with_the_best_fixed_length() -> None:
    auto, one, four = Setting("mtp", "auto"), Setting("mtp", 1), Setting("mtp", 4)
    found = verdict(lines([made(auto, 190), made(NONE, 100, 0.0), made(one, 150), made(four, 400, 200.0)]))
    assert found.worst_auto == (1.9, CODE)
    assert found.worst_against_fixed == (pytest.approx(0.95), CODE, "mtp 4")
    assert found.noise is None
    assert found.say()[0] == (
        "Typically speculation makes this model 1.90 times as fast here (mtp auto; 1.90 to 1.90), and every text stays "
        "the same."
    )
    other = verdict(lines([made(auto, 90, same=False)]))
    assert (
        other.say()[0]
        == "Typically speculation makes this model 0.90 times as fast here (mtp auto; 0.90 to 0.90)."
    )
    assert "no faster and no slower" in verdict(lines([made(auto, 101)])).say()[0]
    assert "speculation" in verdict(lines([made(one, 150), made(four, 250)])).say()[0]  # no auto among them
    assert "paceline check" in other.say()[-1]


def test_a_ratio_is_that_of_a_run_and_its_own_baseline() -> None:
    auto = Setting("mtp", "auto")
    table = lines([made(auto, 150), made(NONE, 100, 0.0), made(auto, 300, 100.0), made(NONE, 100, 0.0)])
    assert table[0].ratio == spread([1.5, 3.0])
    assert table[1].ratio is None  # a baseline has none, nor has one whose text was too short
    assert lines([made(auto, 0)])[0].ratio is None


def test_the_baseline_against_itself_shows_the_noise() -> None:
    runs = [made(NONE, 75), made(NONE, 100, 0.0), made(Setting("mtp", "auto"), 150), made(NONE, 100, 0.0)]
    found = verdict(lines(runs))
    assert found.noise == (pytest.approx(0.75), CODE)
    assert any("none against itself" in line and "0.75" in line for line in found.say())
    assert found.worst_auto == (1.5, CODE)
    assert [report.cells(line)[5][:4] for line in lines(runs)] == ["0.75", "1.50"]


def test_where_auto_is_surely_slower_is_said_and_where_noise_may_be_all_is_not() -> None:
    auto, prose = Setting("mtp", "auto"), replace(CODE, workload="prose")
    slow = [made(auto, speed) for speed in (88, 90, 90, 91, 93, 94)]
    unknown = [replace(made(auto, speed), cell=prose) for speed in (70, 96, 97, 99, 120, 130)]
    found = verdict(lines([*slow, *unknown, made(NONE, 97)]))
    assert found.auto is not None
    assert (found.auto.cells, found.auto.fast) == (2, 1)
    assert found.auto.surely_slow == [(pytest.approx(0.905), CODE)]
    assert (found.itself.cells, found.itself.fast, found.itself.surely_slow) == (
        1,
        0,
        [],
    )  # a single round says nothing
    said = found.say()
    assert any("auto: at 0.98 of none or more in 1 of 2 cells" in line for line in said)
    assert any("auto: surely below" in line and "code" in line and "prose" not in line for line in said)
    assert any("none against itself: at 0.98 of none or more in 0 of 1 cells" in line for line in said)
    assert not any("surely" in line for line in verdict(lines(unknown)).say())


def test_report_is_complete_and_self_contained() -> None:
    runs, _ = measure(bench(FakeEngine()))
    table = lines(runs)
    html = report.page(table, verdict(table).say(), {"torch": "x"}, {1: 1e-3, 2: 2e-3})
    drawn = [chart for chart in report.charts(table, {1: 1e-3, 2: 2e-3}) if not chart.single]
    assert html.count("<svg") == len(drawn) > 0
    assert "What the words mean" in html
    assert "J/token</th>" not in html  # nobody measured it
    assert "http" not in html
    assert "<script" not in html
    data = json.loads(json.dumps(to_json(runs, {"provenance": {}})))
    assert len(data["runs"]) == 24
    for run, got in zip(
        runs, data["runs"], strict=True
    ):  # thousands of them in a run: how they are distributed
        assert (got["gaps"]["0.0"], got["gaps"]["1.0"]) == (min(run.gaps), max(run.gaps))
        assert list(got["gaps"].values()) == sorted(got["gaps"].values())
    assert report.terminal_table(table).row_count == 4
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(report.terminal_table(table, 80))
    text = narrow.export_text()
    assert max(map(len, text.rstrip().splitlines())) <= 80
    assert "…" not in text
    assert all(f"{line.speed:.1f}" in text for line in table)
    assert "not measured" in svg(Chart("t", "x", "y", {}))


def test_axes_end_at_round_numbers_and_one_x_is_no_line() -> None:
    drawn = svg(Chart("t", "x", "y", {"a": [(1, 0.39), (2, 1.56)]}))
    assert all(f">{tick}<" in drawn for tick in ("0", "0.4", "0.8", "1.2", "1.6"))
    assert ">1</text>" in svg(Chart("kept", "x", "y", {"a": [(1, 0.5), (2, 0.3)]}, top=1.0))
    assert Chart("t", "x", "y", {"a": [(4, 1.0)], "b": [(4, 2.0)]}).single
    assert not Chart("t", "x", "y", {"a": [(4, 1.0), (7, 2.0)]}).single


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
        run_beside(bench(engine), CODE, NONE, 0)
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


def test_a_tokenizer_that_makes_one_token_of_everything_gives_long_prompts() -> None:
    class One:
        def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
            return [7]

    (prompt,) = prompts("long", One(), Bounds(9, 40), 1)
    assert prompt.tokens == [7] * 40
