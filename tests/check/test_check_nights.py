"""`paceline check --state`: a comparison over several nights ends where one without a break ends."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.check import identity, loading, proof
from paceline.check.cases import make_case
from paceline.check.identity import Effort, Score
from paceline.check.proof import Plan
from paceline.check.state_file import StateFile
from paceline.check.subject import Subject
from paceline.cli.check import command
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import UsageError
from testing import Setup, TinyAssistant, TinyTarget, make_engine, prompts

EFFORT = Effort(tokens=600, length=14, cases=5)


def subject(count: int = 6) -> Subject:
    target = TinyTarget()
    drafters = {"mtp": MTPDrafter(TinyAssistant(target)), "ngram": NgramDrafter()}
    engine = make_engine(
        Setup(pages=300), target=target, drafters=drafters, default_drafter="mtp", prefix_cache=True
    )
    return Subject(engine, tuple(tuple(p) for p in prompts(count, longest=20)))


def night(file: StateFile, effort: Effort, stop_at: int = 10**9) -> Score:
    """One run, which is interrupted once so many tokens are compared."""
    it = subject()

    def report(tokens: int) -> None:
        if tokens >= stop_at:
            raise KeyboardInterrupt

    score = file.read(it, effort)
    with suppress(KeyboardInterrupt):
        identity.compare(it, effort, 0.0, report, score, lambda now: file.write(it, effort, now))
    return score


def test_nights_that_are_interrupted_add_up_to_one_run(tmp_path: Path) -> None:
    whole = identity.compare(subject(), EFFORT, 0.0)
    file = StateFile(tmp_path / "state.json")
    assert night(file, EFFORT, 200).tokens < 300
    first = file.read(subject(), EFFORT)
    assert 0 < first.chapters < whole.chapters
    night(file, EFFORT, 400)
    assert file.read(subject(), EFFORT).chapters > first.chapters
    last = night(file, EFFORT)
    changed = {"preemptions", "reused"}  # what a prefix cache of one long run still holds
    assert {k: v for k, v in asdict(last).items() if k not in changed} == {
        k: v for k, v in asdict(whole).items() if k not in changed
    }
    assert identity.finding(subject(), last).outcome == "holds"
    assert night(file, EFFORT).tokens == last.tokens  # nothing is left to do
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    night(file, Effort(tokens=1, length=14, cases=5))
    with pytest.raises(UsageError, match=r"prompts was .* name another file"):
        file.read(subject(5), EFFORT)
    with pytest.raises(UsageError, match="tokens of an answer was 14, is 20"):
        file.read(subject(), Effort(length=20, cases=5))
    for text in ("{", "[]", '{"score": {}, "of": {}}'):
        file.path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="is no state of a check"):
            file.read(subject(), EFFORT)


def test_prompts_begin_elsewhere_after_two_rounds() -> None:
    it = subject()
    rounds = [[make_case(it, 6 * turn + i, 6).prompt for i in range(6)] for turn in range(5)]
    assert rounds[0] == rounds[1] == list(it.prompts)
    assert rounds[2] == rounds[3] != rounds[4]
    assert len({prompt for one in rounds for prompt in one}) > 6


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", lambda *_: subject())
    monkeypatch.setattr(proof, "QUICK", Plan(EFFORT, samples=0, length=16, texts=2))


@pytest.mark.usefixtures("tiny")
def test_the_command_goes_on_from_its_state_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    asked = ["demo", "--quick", "--state", str(state), "-v"]
    write = StateFile.write

    def interrupted(self: StateFile, *rest: Any) -> None:
        write(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(StateFile, "write", interrupted)
    broken = CliRunner().invoke(command, asked)
    assert broken.exit_code == 130
    assert f"it goes on from {state}" in broken.output
    before = json.loads(state.read_text())["score"]
    monkeypatch.setattr(StateFile, "write", write)
    done = CliRunner().invoke(command, [*asked, "--tokens", str(before["tokens"] + 1)])
    assert done.exit_code == 0, done.output
    after = json.loads(state.read_text())["score"]
    assert after["chapters"] == before["chapters"] + 1
    assert f"tokens compared: {after['tokens']:,}" in done.output
    assert "token identity 100%" in done.output


def test_a_lossy_rule_keeps_no_state(tmp_path: Path) -> None:
    asked = ["demo", "--verify", "typical", "--state", str(tmp_path / "s")]
    assert "leave it out" in str(CliRunner().invoke(command, asked).exception)
