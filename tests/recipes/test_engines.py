"""recipes/engines without its engines: a runner that is a few lines of Python stands for one."""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from paceline.ops import native

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "engines"
RUNNER = """
import sys, json
sys.path.insert(0, {folder!r})
from exchange import Answer, Channel, setup
wanted, channel = setup(), Channel()
print("noise of an engine")
def answer(questions):
    for q in questions:
        if q.id == "talk-9":
            sys.exit("out of luck")
        wrong = wanted.mode != "plain" and q.id.startswith("code")
        yield Answer(q.id, [1, 2, 4 if wrong else 3][: q.max_tokens], 0.5)
channel.ready("fake", "1.0", "none")
channel.serve(answer)
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("engines", "questions", "draft", "run", "judge", "row_invariance", "sampled", "page")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = {name: __import__(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return made


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        work=tmp_path,
        tokens=8,
        threads=1,
        again=False,
        drafts=[2, 4],
        parallel=[1, 2],
        temperatures=[0.0],
        only=None,
        kinds=None,
        speeds=False,
    )


def ask_all(recipe: dict[str, ModuleType], given: argparse.Namespace, ids: list[str]) -> None:
    run, engines = recipe["run"], recipe["engines"]
    runner = given.work / "runner.py"
    runner.write_text(RUNNER.format(folder=str(FOLDER / "runners")), encoding="utf-8")
    fake = engines.Engine("fake", str(runner), "gguf", (), (engines.Mode("drafted"),), True, "")
    files = recipe["draft"].Files(*map(Path, "tfdgq"))
    asked = [(recipe["questions"].Asked(i, "code", "text"), [5, 6]) for i in ids]
    for cell in run.cells(fake, given, "tiny"):
        run.ask(cell, fake, files, given, asked)


def test_questions_are_two_hundred_of_six_kinds_and_the_same_each_time(recipe: dict[str, ModuleType]) -> None:
    questions = recipe["questions"]
    made = questions.questions()
    assert len({q.id for q in made}) == len({q.text for q in made}) == 200
    assert made == questions.questions()
    assert {q.kind for q in questions.questions(30)} == set(questions.KINDS)
    assert len(set(questions.identifiers(0, 2000))) == 2000


def test_cells_are_filled_and_go_on_where_they_were_stopped(
    recipe: dict[str, ModuleType], given: argparse.Namespace
) -> None:
    ask_all(recipe, given, ["code-1", "talk-1"])
    paths = sorted((given.work / "results").glob("*.jsonl"))
    assert len(paths) == 3 + 2 * 2  # plain, plain again, plain in a batch; two lengths alone and in a batch
    first = {p.name: p.read_text(encoding="utf-8") for p in paths}
    ask_all(recipe, given, ["code-1", "talk-1", "talk-2"])
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert path.read_text(encoding="utf-8").startswith(first[path.name])  # nothing is asked twice
        assert [json.loads(line)["id"] for line in lines[1:]] == ["code-1", "talk-1", "talk-2"]


def test_an_engine_that_dies_is_a_cell_with_its_last_line(
    recipe: dict[str, ModuleType], given: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_all(recipe, given, ["code-1", "talk-9"])
    assert "out of luck" in capsys.readouterr().out
    run, judge = recipe["run"], recipe["judge"]
    path = next((given.work / "results").glob("*plain*k0_b1_t0.0.jsonl"))
    half = judge.read(path)
    assert (list(half.texts), half.died) == (["code-1"], "exit status 1: out of luck")
    before = path.read_text(encoding="utf-8")
    ask_all(recipe, given, ["code-1", "talk-9", "talk-1"])
    assert path.read_text(encoding="utf-8") == before  # not asked again unless that is wanted
    given.again = True
    ask_all(recipe, given, ["code-1", "talk-1"])
    assert list(judge.read(path).texts) == ["code-1", "talk-1"]
    given.again = False
    broken = recipe["engines"].Engine("none", "no_such_runner.py", "gguf", (), (), False, "")
    files = recipe["draft"].Files(*map(Path, "tfdgq"))
    cell = next(recipe["run"].cells(broken, given, "tiny"))
    run.ask(cell, broken, files, given, [(recipe["questions"].Asked("a", "code", ""), [1])])
    (line,) = (given.work / "results" / cell.file_name).read_text(encoding="utf-8").splitlines()
    assert "exit status 2" in json.loads(line)["failed"]


def test_a_few_questions_of_each_cell_come_first(recipe: dict[str, ModuleType]) -> None:
    asked = [(recipe["questions"].Asked(str(i), "code", ""), [1]) for i in range(40)]
    assert [len(part) for part in recipe["run"].portions(asked)] == [8, 32, 40]
    assert [len(part) for part in recipe["run"].portions(asked[:5])] == [5]


def test_an_engine_that_needs_more_memory_than_there_is_is_left_out_by_name(
    recipe: dict[str, ModuleType], given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe["run"], "free_memory", lambda: 1 << 29)
    ask_all(recipe, given, ["code-1"])
    for path in (given.work / "results").glob("*.jsonl"):
        assert json.loads(path.read_text(encoding="utf-8"))["failed"].startswith(
            "left out: it needs about 1.0 GiB"
        )


def test_speeds_are_cells_of_their_own(recipe: dict[str, ModuleType], given: argparse.Namespace) -> None:
    ask_all(recipe, given, ["code-1"])
    before = len(list((given.work / "results").glob("*.jsonl")))
    given.speeds = True
    ask_all(recipe, given, ["code-1"])
    fast = list((given.work / "results").glob("*_speeds.jsonl"))
    assert len(fast) == before - 1  # plain decoding is asked once
    assert len({recipe["judge"].read(path).key for path in fast}) == 1


def test_identifiers_are_counted_where_plain_decoding_has_them(recipe: dict[str, ModuleType]) -> None:
    judge, questions = recipe["judge"], recipe["questions"]
    wanted = questions.identifiers(0, 20)
    assert judge.identifiers_of("copy-00") == wanted
    assert judge.identifiers_of("edit-03") == questions.identifiers(10_007, 1)
    assert judge.identifiers_of("talk-03") == []
    assert [q.id for q in questions.questions(3, ["copy", "edit"])] == ["copy-00", "edit-00", "copy-01"]

    class Words:
        def words(self, ids: list[int]) -> str:
            return " ".join(wanted[i] for i in ids)

    cell = recipe["run"].Cell("e", "plain", "m", 0, 1, 0.0)
    plain = judge.Results(cell, {}, {"copy-00": [0, 1, 2]}, 1.0)
    drafted = judge.Results(cell, {}, {"copy-00": [0, 2]}, 1.0)
    counted = judge.identifiers(plain, drafted, Words())
    assert counted == {"identifiers": 3, "identifiers_lost": 1}


def test_the_reference_computes_in_float64_a_layer_at_a_time(recipe: dict[str, ModuleType]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    whole = copy.deepcopy(model).double()
    ids = torch.tensor([[1, 5, 9, 2, 7]])
    made = recipe["judge"].in_float64(model)
    with torch.inference_mode():
        got, want = made(ids, logits_to_keep=2).logits, whole(ids, logits_to_keep=2).logits
    assert got.dtype == torch.float64
    assert (got - want).abs().max() < 1e-12
    assert {p.dtype for p in made.parameters()} == {torch.float32}


def test_a_text_that_was_read_is_not_read_again(recipe: dict[str, ModuleType], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    judge = recipe["judge"]
    asked: list[int] = []

    class Reference(judge.Reference):  # type: ignore[misc,name-defined]
        def prompt(self, question: str) -> list[int]:
            return [0, 1]

        def model(self, ids: Any, logits_to_keep: int) -> Any:
            asked.append(ids.shape[1])
            logits = -(ids[0, -logits_to_keep:, None] - torch.arange(8.0)).abs()[None].double()
            return argparse.Namespace(logits=logits)

    files, memo = recipe["draft"].Files(*map(Path, "tfdgq")), tmp_path / "memo.json"
    reference = Reference(files, judge.Memo(memo))
    assert reference.gaps("code-00", [1, 2, 5]) == [0.0, 1.0, 3.0]  # each token below its predecessor
    assert reference.gap("code-00", [1, 2], [2, 7]) == 5.0
    assert reference.gap("code-00", [1], [4, 1]) == 3.0
    assert asked == [5]
    assert reference.gap("code-00", [3], [3, 4]) == 1.0
    assert asked == [5, 3]
    assert Reference(files, judge.Memo(memo)).gap("code-00", [3], [4, 3]) == 1.0
    assert asked == [5, 3]


class FakeReference:
    """Token 4 lies `worst` nats below the best, everything else is the best."""

    ends = (9,)
    worst = 2.0
    is_small = True
    asked: ClassVar[list[str]] = []

    def gaps(self, question: str, text: list[int]) -> list[float]:
        self.asked.append(question)
        return [0.0, 0.25, 0.125]

    def gap(self, question: str, common: list[int], pair: list[int]) -> float:
        assert common == [1, 2]
        return self.worst if 4 in pair else 0.0

    def words(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_differences_are_told_as_near_ties_or_errors_by_the_reach(
    recipe: dict[str, ModuleType], given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_all(recipe, given, ["code-1", "talk-1"])
    judge = recipe["judge"]
    there = [judge.read(p) for p in (given.work / "results").glob("*.jsonl")]
    (plain,) = (r for r in there if r.is_baseline)
    (again,) = (r for r in there if r.cell.repeat)
    drafted = next(r for r in there if r.cell.mode == "drafted")
    assert judge.judge(plain, again, FakeReference(), 0.1)["differing"] == 0
    error = judge.judge(plain, drafted, FakeReference(), 0.1)
    assert (error["differing"], error["near_ties"], error["errors"]) == (1, 0, 1)
    assert error["worst"]["gap"] == 2.0
    assert error["worst"]["drafted"] == "1 2 4"
    for reach in (0.4, 9.0):  # 2 nats are an error, however coarse an engine is
        assert judge.judge(plain, drafted, FakeReference(), reach)["near_ties"] == 0
    monkeypatch.setattr(FakeReference, "worst", 0.9)
    tie = judge.judge(plain, drafted, FakeReference(), 0.46)
    assert (tie["near_ties"], tie["errors"]) == (1, 0)
    assert judge.judge(plain, drafted, FakeReference(), 0.44)["errors"] == 1
    ended = replace(drafted, texts={"code-1": [1, 2]})
    assert judge.judge(plain, ended, FakeReference(), 0.1)["near_ties"] == 1  # its end is a token, too
    written = replace(plain, texts={name: [*text, 9] for name, text in plain.texts.items()})
    assert written.without((9,)).texts == plain.texts
    assert judge.reach_of(plain, [again], FakeReference()) is None  # nothing differs, so nothing is read
    assert judge.reach_of(plain, [again, drafted], FakeReference()) == 0.25
    assert FakeReference.asked == ["code-1", "talk-1"]  # the one that differs first
    assert judge.otherwise(plain, drafted) == ""
    torch = replace(drafted, header={**drafted.header, "settings": "plain torch"})
    assert judge.otherwise(plain, torch).startswith(
        "plain decoding was asked with settings none, this with plain torch"
    )
    sampled = replace(plain, cell=replace(plain.cell, temperature=1.0))
    assert judge.judge(sampled, drafted, FakeReference(), 0.1)["without_gap"] == 1


def test_samples_needed_are_those_that_the_test_asks_for(recipe: dict[str, ModuleType]) -> None:
    sampled = recipe["sampled"]
    count = sampled.needed(0.02, 1)
    assert 50_000 < count < 100_000
    assert sampled.needed(0.04, 1) == pytest.approx(count / 4, rel=0.01)
    assert sampled.needed(0.02, 6) > count  # more tests, a stricter level for each
    rng = random.Random(1)
    some = [[0, *(rng.randrange(30) for _ in range(5))] for _ in range(3000)]
    (first, *_) = sampled.fits(some, some, 1)
    assert first.freedom == sampled.CELLS
    assert first.detectable == pytest.approx(0.02 * (count / 3000) ** 0.5, rel=0.01)


SAMPLER = """
import random, sys
sys.path.insert(0, {folder!r})
from exchange import Answer, Channel, setup
wanted, channel = setup(), Channel()
def answer(questions):
    for q in questions:
        rng, bend = random.Random(q.seed), wanted.mode == "bent"
        yield Answer(q.id, [7, *(min(rng.randrange(4), 2 if bend and i == 3 else 3) for i in range(5))], 0.1)
channel.ready("fake", "1.0", "none")
channel.serve(answer)
"""


def test_sampled_texts_of_another_law_are_found_where_they_differ(
    recipe: dict[str, ModuleType], given: argparse.Namespace
) -> None:
    sampled, engines = recipe["sampled"], recipe["engines"]
    runner = given.work / "sampler.py"
    runner.write_text(SAMPLER.format(folder=str(FOLDER / "runners")), encoding="utf-8")
    modes = (engines.Mode("right"), engines.Mode("bent"))
    fake = engines.Engine("fake", str(runner), "gguf", (), modes, True, "")
    files = recipe["draft"].Files(*map(Path, "tfdgq"))
    vars(given).update(
        modes=["right", "bent"], drafts=3, temperature=1.0, model="tiny", samples=600, ids=[1, 2]
    )
    right, bent = sampled.rows(fake, files, given)
    assert not any(fit["p_value"] < fit["alpha"] for fit in right["fits"])
    assert [fit["p_value"] < fit["alpha"] for fit in bent["fits"]] == [False, False, False, True, False]
    before = {p: p.read_text() for p in (given.work / "sampled").iterdir()}
    given.samples = 650
    sampled.draw(sampled.Cell("fake", "bent", "tiny", 3, 16, 1.0), fake, files, given)
    path = next(p for p in before if "bent" in p.name)
    assert path.read_text().startswith(before[path])
    assert len(sampled.texts_of(path)) == 650
    said = {
        "temperature": 1.0,
        "places": 5,
        "cells": 19,
        "alpha": 1e-4,
        "needed": 70_000,
        "rows": [right, bent],
    }
    (given.work / "sampled.json").write_text(json.dumps(said), encoding="utf-8")
    text = "\n".join(recipe["page"].sampled(given.work))
    assert text.count("no difference seen") == 9
    assert text.count("differs") == 1


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_rows_keep_their_bits_beside_others_and_the_price_is_shown(
    recipe: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe["row_invariance"]
    monkeypatch.setattr(made, "MEMORY", 1 << 16)
    lines = [line for kind in ("float32", "bfloat16") for line in made.measure(kind, (96, 64), 1, 1)]
    assert [line.rows for line in lines] == [*made.ROWS] * 2
    assert all(line.ours_changed == 0 for line in lines)
    assert all(line.ours_ms > 0 < line.library_ms for line in lines)
    assert not [*recipe["page"].price(tmp_path)]  # it was not run
    said = {"threads": 1, "isa": "avx2", "torch": "2.13", "lines": [asdict(line) for line in lines]}
    (tmp_path / "row_invariance.json").write_text(json.dumps(said), encoding="utf-8")
    text = "\n".join(recipe["page"].price(tmp_path))
    assert "| float32 | 64 to 96 | 256 |" in text
    assert "1 threads,\navx2" in text


def test_the_page_shows_every_cell(recipe: dict[str, ModuleType], tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "engine": "fake", "mode": "drafted", "model": "tiny", "drafts": 4, "parallel": 2, "temperature": 0.0, "repeat": 0,
        "speeds": False,
    }  # fmt: skip
    worst = {"question": "code-1", "at": 2, "gap": 2.0, "plain": "a\nb", "drafted": "a c", "asked": "Write"}
    counts = {
        "asked": 3, "tokens": 1200, "differing": 1, "near_ties": 0, "errors": 1, "reach": 0.125, "version": "1.0",
        "identifiers": 7, "identifiers_lost": 2, "settings": "defaults", "died": "", "seconds": 10.0,
        "plain_seconds": 20.0,
    }  # fmt: skip
    rows = [
        {**row, **counts, "worst": worst},
        {**row, "drafts": 8, "failed": "exit status 1: it | broke"},
        {**row, **counts, "drafts": 16, "died": "killed", "worst": None},
        {**row, **counts, "parallel": 1, "worst": None},
        {**row, **counts, "mode": "plain", "differing": 0, "worst": None},
    ]
    flags = argparse.Namespace(flags=["--questions 3", "--speeds"], machine="two cores", work=tmp_path)
    text = recipe["page"].page({"rows": rows}, flags)
    assert "| fake | drafted, 4 drafts, 2 at once | 3 | 1,200 | 1 | 0 | 1 | 2.000 | 0.125 | 2 of 7 |" in text
    assert "| fake 1.0 | 1 | 3 | 1,200 | 1 | 0 | 1 | 2 of 6 | 0 of 3 |" in text
    assert "did not run: exit status 1: it / broke" in text
    assert "16 drafts, 2 at once; then ended: killed" in text
    assert "plain `a↵b`, drafted `a c`" in text
    assert "ask --questions 3\n$ python recipes/engines/run.py ask --speeds" in text
    assert "tokens/s" not in text  # nothing says that the machine was idle
    fast = recipe["page"].page({"rows": [*rows, {**rows[0], "speeds": True}]}, flags)
    assert "| fake | drafted, 4 drafts, 2 at once | 60.0 | 120.0 | 2.00 | 1 of 3 |" in fast
