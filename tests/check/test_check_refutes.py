"""`paceline check` on the bundled pair: it holds as shipped, and refutes each bug that is planted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from paceline.check import forward, loading, proof
from paceline.check.identity import Effort
from paceline.check.proof import Plan
from paceline.check.subject import Subject
from paceline.cli.check import command, workload
from planted import DRAFTS, TEXT

IDENTITY, CLEAN = "token identity", "drafts of a clean start"


@pytest.fixture(scope="module")
def demo() -> Subject:
    options = {"max_model_len": 512, "draft_tokens": 4, "max_batch": 8, "threads": 1}
    whole = loading.load("demo", ("mtp",), lambda line: None, options, workload)
    short, long = whole.prompts[:3], max(whole.prompts, key=len)
    return Subject(whole.engine, (short[0], long[:240], short[1], long[:236], short[2]))


def certificate(
    demo: Subject, plan: Plan, patch: pytest.MonkeyPatch, folder: Path, *options: str
) -> tuple[int, Any, str]:
    """(exit code, JSON, text) of the real command on an engine that is loaded already."""
    patch.setattr(loading, "load", lambda *_: demo)
    patch.setattr(proof, "QUICK", plan)
    out = folder / "certificate.json"
    done = CliRunner().invoke(command, ["demo", "--quick", "--json", str(out), *options])
    assert out.exists(), done.output
    return done.exit_code, json.loads(out.read_text())[0], done.output


def tiny(**changes: Any) -> Plan:
    plan = {"effort": Effort(tokens=900, length=40, cases=9), "samples": 0, "length": 8, "texts": 2}
    return Plan(**(plan | changes))


def test_it_holds_as_shipped(demo: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, said, text = certificate(demo, tiny(samples=60), monkeypatch, tmp_path)
    assert code == 0, text
    assert said["holds"]
    assert {f["outcome"] for f in said["findings"]} == {"holds"}
    assert "HOLDS" in text
    assert "texts: " not in text
    assert re.search(
        r"changes nothing here: [\d,]+ tokens were compared, and every one was the same\.$", text.strip()
    )


def test_all_that_was_counted_is_shown_on_request(
    demo: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, _, text = certificate(
        demo, tiny(effort=Effort(tokens=1, length=8, cases=1)), monkeypatch, tmp_path, "-v"
    )
    assert "tokens compared: " in text


def test_the_lossy_rule_is_measured_and_never_certified(
    demo: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = ("--verify", "typical", "--typical-epsilon", "0.01")
    code, said, text = certificate(demo, tiny(samples=200), monkeypatch, tmp_path, *asked)
    assert code == 1, text
    (finding,) = said["findings"]
    assert (finding["name"], finding["outcome"]) == ("distribution of typical", "refuted")
    away, noise = (float(x) for x in re.findall(r"\d\.\d{3}", finding["words"]))
    assert away > 2 * noise, finding
    assert text.strip().endswith("This rule is lossy: leave --verify away, and the text is the model's own.")
    refused = CliRunner().invoke(command, ["demo", "--quick", "--typical-delta", "0.5"])
    assert "give --verify typical, too" in str(refused.exception)


@pytest.fixture
def rows_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rows have the same bits was shown once; the planted bugs are elsewhere."""
    row = torch.zeros(1, 1)
    monkeypatch.setattr(forward, "measure", lambda *_, out, **__: out.add(row, row, ""))


@pytest.mark.usefixtures("rows_known")
@pytest.mark.parametrize("name", TEXT)
def test_a_bug_that_changes_texts(
    demo: Subject, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    TEXT[name](monkeypatch)
    effort = Effort(tokens=3600, length=40, cases=9)  # at most: it ends with the first difference
    assert_refuted(certificate(demo, tiny(effort=effort), monkeypatch, tmp_path), IDENTITY)


@pytest.mark.usefixtures("rows_known")
@pytest.mark.parametrize("name", DRAFTS)
def test_a_bug_that_spoils_drafts(
    demo: Subject, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    DRAFTS[name](monkeypatch)
    effort = Effort(tokens=1, length=8, cases=1)
    assert_refuted(certificate(demo, tiny(effort=effort, texts=4), monkeypatch, tmp_path), CLEAN)


def assert_refuted(shown: tuple[int, Any, str], contract: str) -> None:
    code, said, text = shown
    assert code == 1, text
    assert not said["holds"]
    assert contract in said["contract"]
    (finding,) = [f for f in said["findings"] if f["name"] == contract]
    assert finding["outcome"] == "refuted"
    assert finding["divergence"]["kind"] == "bug"
    assert "first divergence" in text
    assert "DOES NOT HOLD" in text
