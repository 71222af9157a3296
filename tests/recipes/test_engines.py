"""recipes/engines without its engines: a runner that is a few lines of Python stands for one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "engines"
RUNNER = """
import sys, json
sys.path.insert(0, {folder!r})
from exchange import Answer, Channel, setup
wanted, channel = setup(), Channel()
print("noise of an engine")
def answer(questions):
    for q in questions:
        if q.id == "dies":
            sys.exit("out of luck")
        wrong = wanted.mode != "plain" and q.id.startswith("code")
        yield Answer(q.id, [1, 2, 4 if wrong else 3][: q.max_tokens], 0.5)
channel.ready("fake", "1.0", "none")
channel.serve(answer)
"""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("engines", "questions", "draft", "run", "judge", "page")
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
    )


def ask_all(recipe: dict[str, ModuleType], given: argparse.Namespace, ids: list[str]) -> None:
    run, engines = recipe["run"], recipe["engines"]
    runner = given.work / "runner.py"
    runner.write_text(RUNNER.format(folder=str(FOLDER / "runners")), encoding="utf-8")
    fake = engines.Engine("fake", str(runner), "gguf", (), (engines.Mode("drafted"),), True, "")
    files = recipe["draft"].Files(Path("t"), Path("f"), Path("d"), Path("g"))
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
    ask_all(recipe, given, ["dies"])
    assert "out of luck" in capsys.readouterr().out
    broken = recipe["engines"].Engine("none", "no_such_runner.py", "gguf", (), (), False, "")
    files = recipe["draft"].Files(Path("t"), Path("f"), Path("d"), Path("g"))
    cell = next(recipe["run"].cells(broken, given, "tiny"))
    recipe["run"].ask(cell, broken, files, given, [(recipe["questions"].Asked("a", "code", ""), [1])])
    (line,) = (given.work / "results" / cell.file_name).read_text(encoding="utf-8").splitlines()
    assert "exit status 2" in json.loads(line)["failed"]


class FakeReference:
    """Token 4 lies 2 nats below the best, everything else is the best."""

    def gap(self, question: str, common: list[int], pair: list[int]) -> float:
        assert common == [1, 2]
        return 2.0 if 4 in pair else 0.0

    def words(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_differences_are_told_as_near_ties_or_errors_by_the_reach(
    recipe: dict[str, ModuleType], given: argparse.Namespace
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
    tie = judge.judge(plain, drafted, FakeReference(), 1.5)
    assert (tie["near_ties"], tie["errors"]) == (1, 0)
    ended = replace(drafted, texts={"code-1": [1, 2]})
    assert judge.judge(plain, ended, FakeReference(), 0.1)["without_gap"] == 1


def test_the_page_shows_every_cell(recipe: dict[str, ModuleType], given: argparse.Namespace) -> None:
    row: dict[str, Any] = {
        "engine": "fake", "mode": "drafted", "model": "tiny", "drafts": 4, "parallel": 2, "temperature": 0.0, "repeat": 0,
    }  # fmt: skip
    worst = {"question": "code-1", "at": 2, "gap": 2.0, "plain": "a\nb", "drafted": "a c"}
    counts = {
        "asked": 3,
        "tokens": 1200,
        "differing": 1,
        "near_ties": 0,
        "errors": 1,
        "reach": 0.125,
        "version": "1.0",
    }
    rows = [{**row, **counts, "worst": worst}, {**row, "drafts": 8, "failed": "exit status 1: it | broke"}]
    flags = argparse.Namespace(flags="--questions 3", machine="two cores", plot=False)
    text = recipe["page"].page({"rows": rows}, flags)
    assert "| fake 1.0 | drafted, 4 drafts, 2 at once | 3 | 1,200 | 1 | 0 | 1 | 2.000 | 0.125 |" in text
    assert "did not run: exit status 1: it / broke" in text
    assert "plain `a↵b`, drafted `a c`" in text
    assert "ask --questions 3" in text
