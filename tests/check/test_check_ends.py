"""`paceline check` that does not come to its end: the certificate says why, and keeps what was compared before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.check import forward, identity, loading, proof
from paceline.check.identity import Effort
from paceline.check.proof import Plan
from paceline.check.subject import Subject
from paceline.cli import main
from paceline.cli.check import command
from paceline.core import Verdict
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine import step as stepping
from paceline.engine import verify as verifying
from paceline.engine.plan import StepPlan
from paceline.engine.verify import verify
from paceline.errors import CapacityError, UsageError
from testing import Setup, TinyAssistant, TinyTarget, make_engine, prompts

PLAN = Plan(Effort(tokens=1, length=14, cases=5), samples=16, length=16, texts=2)
IDENTITY = "token identity"
Shown = tuple[int, Any, str]  # exit code, certificate, output


class Fails:
    """Stands where the target looks at a draft; raises on every look that `when` is true of, but the first `after`."""

    def __init__(self, error: BaseException, after: int, when: Callable[[Any], bool]) -> None:
        self.error, self.after, self.when, self.looks = error, after, when, 0

    def __call__(self, state: Any, plan: StepPlan, *rest: Any) -> Any:
        texts = [request.sequence for request in plan.requests]
        self.looks += self.when(texts)
        if self.looks > self.after and self.when(texts):
            raise self.error
        return verify(state, plan, *rest)


def drafting(texts: Any) -> bool:
    return any(text.params.drafter == "mtp" for text in texts)


def always(texts: Any) -> bool:
    return True


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Shown]:
    def run(error: BaseException, after: int, when: Callable[[Any], bool] = drafting) -> Shown:
        target = TinyTarget()
        drafters = {"mtp": MTPDrafter(TinyAssistant(target)), "ngram": NgramDrafter()}
        engine = make_engine(
            Setup(pages=300), target=target, drafters=drafters, default_drafter="mtp", prefix_cache=True
        )
        subject = Subject(engine, tuple(tuple(p) for p in prompts(6, longest=20)))
        monkeypatch.setattr(loading, "load", lambda *_: subject)
        monkeypatch.setattr(proof, "QUICK", PLAN)
        monkeypatch.setattr(stepping, "verify", Fails(error, after, when))
        out = tmp_path / "certificate.json"
        done = CliRunner().invoke(command, ["demo", "--quick", "--json", str(out)])
        assert not engine.has_work
        said = json.loads(out.read_text())[0] if out.exists() else {"error": done.exception}
        return done.exit_code, said, done.output

    return run


def last(shown: Shown) -> Any:
    """The finding at which the check ended; it is no promise that was kept."""
    _, said, text = shown
    assert not said["holds"]
    shown_whole = any(f["name"] == IDENTITY and f["outcome"] == "holds" for f in said["findings"])
    refuted = any(f["outcome"] == "refuted" for f in said["findings"])
    assert said["contract"].startswith("none") == (refuted or not shown_whole)
    assert "Traceback" not in text
    return said["findings"][-1]


def test_a_step_that_raises_refutes_and_says_where(check: Callable[..., Shown]) -> None:
    shown = check(RuntimeError("kernel 7 says no"), 12)
    code, said, text = shown
    found = last(shown)
    assert (code, found["name"], found["outcome"]) == (1, IDENTITY, "refuted")
    assert found["counts"]["tokens compared"] > 0
    crash = found["crash"]
    assert crash["error"] == "RuntimeError: kernel 7 says no"
    assert crash["place"].startswith("paceline/engine/step.py")
    assert "kernel 7 says no" in crash["trace"]
    assert {"drafter", "batch", "breaks alone, too", "temperature", "seed", "prompt"} <= set(crash["where"])
    assert crash["where"]["breaks alone, too"] == "yes"
    assert crash["where"]["drafter"].startswith("mtp drafting")  # and not the other drafter of the batch
    assert [f["outcome"] for f in said["findings"][:-1]] == ["holds"]
    assert "DOES NOT HOLD: REFUTED" in text
    assert "next: decode with --drafter none" in text


def test_what_breaks_only_in_a_batch_names_the_batch(check: Callable[..., Shown]) -> None:
    found = last(check(RuntimeError("too wide"), 0, lambda texts: len(texts) > 2))
    assert found["crash"]["where"]["breaks alone, too"] == "no text of it"
    assert "mtp drafting" in found["crash"]["where"]["drafter"]
    assert "ngram drafting" in found["crash"]["where"]["drafter"]


def test_plain_decoding_that_raises_is_told_as_such(check: Callable[..., Shown]) -> None:
    shown = check(ZeroDivisionError("no rows"), 20, always)
    found = last(shown)
    assert found["crash"]["where"]["drafter"] == "none"
    assert "plain decoding itself fails" in shown[2]


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_a_rule_that_raises_keeps_the_findings_before(rule: str, check: Callable[..., Shown]) -> None:
    shown = check(RuntimeError("no distribution"), 0, lambda texts: texts[0].params.verify == rule)
    found = last(shown)
    assert (found["name"], found["outcome"]) == (f"distribution of {rule}", "refuted")
    assert rule in found["crash"]["where"]["drafter"]
    names = [f["name"] for f in shown[1]["findings"]]
    assert names[:3] == ["bit-exact forward", IDENTITY, "drafts of a clean start"]


def test_too_little_memory_refutes_nothing(check: Callable[..., Shown]) -> None:
    shown = check(CapacityError("the cache is full"), 12)
    found = last(shown)
    assert (shown[0], found["outcome"]) == (1, "not shown")
    assert "lower --max-batch" in shown[2]


def test_a_users_own_error_is_no_certificate(check: Callable[..., Shown]) -> None:
    _, said, _ = check(UsageError("not like this"), 12)
    assert isinstance(said["error"], UsageError)
    assert said["error"].exit_code == 2


def test_a_target_that_raises_before_any_text(
    monkeypatch: pytest.MonkeyPatch, check: Callable[..., Shown]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(TinyTarget, "forward", broken)
    shown = check(RuntimeError("unused"), 0)
    found = last(shown)
    assert (shown[0], found["name"], found["outcome"]) == (1, "bit-exact forward", "refuted")
    assert "chunks of 1" in found["crash"]["where"]["batch"]


@pytest.mark.parametrize("after", [0, 12])
def test_an_interrupt_keeps_what_was_compared(after: int, check: Callable[..., Shown]) -> None:
    shown = check(KeyboardInterrupt(), after)
    found = last(shown)
    assert (shown[0], shown[1]["ended"]) == (130, "interrupted")
    assert (found["name"], found["outcome"]) == (IDENTITY, "not shown")
    assert (found["counts"]["tokens compared"] > 0) == (after > 0)
    assert "DOES NOT HOLD: INCOMPLETE (interrupted)" in shown[2]
    assert "incomplete: only what was compared so far is counted" in shown[2]


def test_an_interrupt_in_a_distribution_keeps_all_that_was_shown(check: Callable[..., Shown]) -> None:
    shown = check(KeyboardInterrupt(), 0, lambda texts: texts[0].params.verify == "block")
    assert last(shown)["name"] == "distribution of block"
    assert shown[0] == 130


def test_an_interrupt_after_a_difference_is_still_a_refutation(
    monkeypatch: pytest.MonkeyPatch, check: Callable[..., Shown]
) -> None:
    monkeypatch.setattr(
        verifying, "verify_match", lambda tokens, draft, *_: Verdict(len(draft), tokens[len(draft)])
    )
    shown = check(KeyboardInterrupt(), 0, lambda texts: texts[0].params.verify == "reject")
    assert shown[0] == 1
    assert "DOES NOT HOLD: REFUTED" in shown[2]
    assert shown[1]["ended"] == "interrupted"


def test_an_interrupt_while_the_text_that_breaks_is_looked_for(check: Callable[..., Shown]) -> None:
    class Twice(Exception):
        """The first look breaks, the next is interrupted."""

    errors = iter([Twice("broken")])

    def when(work: Any) -> bool:
        if not drafting(work):
            return False
        for error in errors:
            raise error
        raise KeyboardInterrupt

    shown = check(Twice(), 0, when)
    assert last(shown)["crash"]["error"] == "Twice: broken"
    assert shown[0] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seconds", "0"], "not in the range"),
        (["--seconds", "-1"], "not in the range"),
        (["--seconds", "nan"], "no number of seconds"),
        (["--tokens", "0"], "not in the range"),
        (["--tokens", "many"], "not a valid integer"),
        (["--json", "{folder}"], "it is no file"),
        (["--json", "{folder}/none/x.json"], "its folder does not exist"),
        (["--drafter", "nobody"], "known: auto, none"),
        (["--max-model-len", "100"], "at least --max-model-len 160"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_way_out(
    args: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["paceline", "check", "demo", *(a.replace("{folder}", str(tmp_path)) for a in args)]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr()
    assert stop.value.code == 2
    assert words in out.err
    assert "Traceback" not in out.err
    assert "paceline check:" not in out.out
    assert not list(tmp_path.iterdir())


def test_a_target_that_does_not_exist_says_what_one_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "check", "nosuch"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "'nosuch' is no target: give demo" in capsys.readouterr().err


def test_one_text_at_a_time_is_checked_as_far_as_it_goes() -> None:
    target = TinyTarget()
    drafters = {"mtp": MTPDrafter(TinyAssistant(target))}
    engine = make_engine(
        Setup(pages=300, max_batch=1),
        target=target,
        drafters=drafters,
        default_drafter="mtp",
        prefix_cache=True,
    )
    subject = Subject(engine, tuple(tuple(p) for p in prompts(6, longest=20)))
    assert forward.measure(subject, length=20).logits == 0
    found = identity.finding(subject, identity.compare(subject, Effort(tokens=200, length=14, cases=9), 0.0))
    assert found.outcome == "holds", found.words


def test_a_certificate_names_the_model_without_the_path_to_it() -> None:
    from paceline.check.proof import _named

    assert _named("/home/ann/models/coder-q4.gguf") == "coder-q4.gguf"
    assert _named("/c/hub/models--org--name/snapshots/abc") == "org/name"
    assert _named("/venv/paceline/demo/target") == "demo/target"
    assert _named("in memory") == "in memory"
