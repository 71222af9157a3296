"""Where a model's chat template is found: one of several, one for tools, one by its name; and what is no template."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from cli.test_cli import call
from families import FAMILIES
from paceline import LLM
from paceline.chat.asked import Asked
from paceline.chat.road import Chats
from paceline.convert.quantized import save_quantized
from paceline.convert.to_folder import write_folder
from paceline.convert.to_gguf import write_gguf
from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate, TemplateUnusable
from paceline.text.formats.choose import format_of
from paceline.text.known_templates import KNOWN
from paceline.text.tokenizer import Tokenizer
from text.tiny_tokenizers import gemma_style

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FOR_TOOLS = FAMILIES["families/hermes_3"].template("families/hermes_3")  # of a repository that has two
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
U = [{"role": "user", "content": "hi"}]


def model(folder: Path) -> Path:
    """A copy of the demo target without a template."""
    shutil.copytree(Path(str(files("paceline") / "demo" / "target")), folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "chat_template"}))
    return folder


def listed(folder: Path) -> Path:
    """Both templates in tokenizer_config.json, as transformers wrote them for long."""
    path = model(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": FOR_TOOLS}]
    path.write_text(json.dumps(config | {"chat_template": both}))
    return folder


def in_files(folder: Path) -> Path:
    """As transformers writes them now."""
    (model(folder) / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    return folder


def check(tokenizer: Tokenizer) -> None:
    """Requests with tools get the template for tools, others the default; calls are read as that one writes them."""
    chats = Chats.of(tokenizer)
    assert (tokenizer.template, tokenizer.tool_template) == (PLAIN, FOR_TOOLS)
    assert chats.prompt(Asked(messages=U)).text == "<user>hi"
    shown = chats.prompt(Asked(messages=U, tools=[TOOL]))
    assert "You are a function calling AI model" in shown.text
    assert shown.changes == []
    assert chats.format.name == "hermes"
    ChatTemplate.close_all(tokenizer)


@pytest.mark.parametrize("make", [listed, in_files])
def test_a_template_for_tools_is_taken_where_there_are_tools(make: Any, tmp_path: Path) -> None:
    """REPORTS4, C7: the model never saw the tools."""
    check(Tokenizer.load(make(tmp_path / "m")))


def test_converting_and_quantizing_keep_both(tmp_path: Path) -> None:
    folder = in_files(tmp_path / "m")
    write_gguf(folder, tmp_path / "m.gguf", "q8_0")
    check(Tokenizer.load(tmp_path / "m.gguf"))
    write_folder(tmp_path / "m.gguf", tmp_path / "back", "f16")
    check(Tokenizer.load(tmp_path / "back"))
    save_quantized(folder, tmp_path / "int8", "int8")
    check(Tokenizer.load(tmp_path / "int8"))


def test_the_only_one_of_a_list_is_the_default() -> None:
    from paceline.text.tokenizer import _named_templates

    assert _named_templates([{"name": "chat", "template": "x"}])["default"] == "x"
    assert (
        _named_templates([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]).get("default")
        is None
    )
    assert _named_templates([{"name": 1}, None, {"template": "x"}]) == {}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_is_its_template(name: str) -> None:
    """REPORTS4, C13: llama.cpp's files name some."""
    tokenizer = Tokenizer(gemma_style(), {"bos_token": "<bos>"}, template=f" {name}\n")
    text = Chats.of(tokenizer).prompt(Asked(messages=[*U, {"role": "assistant", "content": "fine"}, *U])).text

    def turn(role: str, content: str) -> str:
        end = (
            ""
            if not content
            else {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>\n"}[name]
        )
        role = "model" if (role, name) == ("assistant", "gemma") else role
        head = {"chatml": "<|im_start|>{}\n", "llama3": "<|start_header_id|>{}<|end_header_id|>\n\n"}
        return head.get(name, "<start_of_turn>{}\n").format(role) + content + end

    turns = (("user", "hi"), ("assistant", "fine"), ("user", "hi"), ("assistant", ""))
    begin = "" if name == "chatml" else "<bos>"
    assert text == begin + "".join(turn(*one) for one in turns)
    ChatTemplate.close_all(tokenizer)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ if .System }}<|im_start|>{{ .System }}{{ end }}{{ .Prompt }}",
            "it is a Go template of Ollama's, no Jinja",
        ),
        ("{% for m in messages %}{{ m.content", "cannot be read"),
        (None, "no chat template"),
    ],
    ids=["Go", "broken", "none"],
)
def test_what_is_no_template_is_said_with_what_to_do(
    template: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model(tmp_path / "m")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(folder)
    assert format_of(tokenizer).name == "plain"
    with pytest.raises(TemplateUnusable, match=said) as refused:
        Chats.of(tokenizer).prompt(Asked(messages=U))
    assert isinstance(refused.value, UsageError)
    assert "give a prompt instead of messages" in str(refused.value)
    assert call(monkeypatch, "run", str(folder), "def f(", "--chat", "-n", "2", "--drafter", "none") == 2
    assert "--no-chat goes on with the text as it is" in capsys.readouterr().err
    assert call(monkeypatch, "run", str(folder), "def f(", "--no-chat", "-n", "2", "--drafter", "none") == 0


def test_a_template_of_ones_own_at_every_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """REPORTS4, D3: `--chat-template FILE`, above all for GGUF files without one."""
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]", encoding="utf-8-sig"
    )
    with LLM("demo", drafter="none", max_model_len=64, chat_template=file) as llm:
        (done,) = llm.chat(U, max_tokens=2)
        assert llm.tokenizer.decode(done.prompt_token_ids, skip_special=False) == "[user]hi[answer]"
        assert llm.info["chat"]
    with LLM("demo", drafter="none", max_model_len=64, chat_template="chatml") as llm:
        assert llm.tokenizer.template == KNOWN["chatml"]
    out, source = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": U, "max_tokens": 2}))
    more = ("--drafter", "none", "--chat-template", str(file))
    assert call(monkeypatch, "generate", str(source), "-o", str(out), *more) == 0
    assert json.loads(out.read_text())["tokens"] == 2
    assert call(monkeypatch, "run", "demo", "hi", "--json", "-n", "2", *more) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompt_tokens"] == len(done.prompt_token_ids)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{{ .Prompt }}", "Go template"),
    ],
    ids=["missing", "empty", "bytes", "Go"],
)
def test_a_template_file_that_is_none_is_one_line(
    content: bytes | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    assert call(monkeypatch, "run", "demo", "hi", "--chat-template", str(file), "-n", "2") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error
