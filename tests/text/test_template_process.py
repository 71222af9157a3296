"""Chat templates run where they can be killed: no time, no memory of ours, and the next chat works."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.template_process import MEMORY
from paceline.text.tokenizer import Tokenizer
from text.tiny_tokenizers import CONFIG, gemma_style

HI = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ATTACKS = {
    "to_bytes": "{{ (1).to_bytes(2000000000, 'big')|length }}",
    "encode": "{{ ('x'.encode() * 2000000000)|length }}",
    "join of long texts": "{% set t = 'a' * 90000 %}{{ ''.join([t] * 90000)|length }}",
    "join of a generator": "{% set t = 'a' * 90000 %}{{ (range(90000)|map('replace', 0, t))|join|length }}",
    "translate": "{{ ('a' * 90000).translate({97: 'b' * 90000})|length }}",
    "tojson": "{{ [messages]|tojson(indent=2000000000)|length }}",
    "tojson of constants": "{{ [1, [2]]|tojson(indent=2000000000)|length }}",
    "string": "{% set t = 'a' * 90000 %}{{ ([t] * 90000)|string|length }}",
    "nested format": "{{ '{0:{1}}'.format('x', 2000000000)|length }}",
    "format of a map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 2000000000})|length }}",
    "sum": "{% set n = namespace(l=[[0] * 90000] * 90000) %}{{ n.l|sum(start=[])|length }}",
    "bytes join": "{% set b = 'x'.encode() * 90000 %}{{ b.join([b] * 90000)|length }}",
    "power by turns": "{% set n = namespace(x=3.0) %}{% for i in range(90000) %}{% set n.x = n.x|round(3) %}{% endfor %}",
    "pprint": "{% set t = 'a' * 90000 %}{{ ([t] * 90000)|pprint|length }}",
    "urlize": "{{ ('http://a ' * 90000)|urlize|length }}",
    "unique of texts": "{% set t = 'a' * 90000 %}{{ range(90000)|map('string')|map('center', 90000)|list|length }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_neither_time_nor_memory(name: str) -> None:
    """Refused or harmless, within the limits, and the template's process answers again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = "{% if messages[0].content == 'attack' %}" + ATTACKS[name] + "{% else %}fine{% endif %}"
    begin = time.monotonic()
    try:
        template = ChatTemplate(source, {}, timeout=3.0)
    except UsageError:
        return
    try:
        try:
            answer = template.render([{"role": "user", "content": "attack"}])
        except UsageError as error:
            answer = str(error)
        assert len(answer) < 1000, "a length, or what the template did wrong"
        assert time.monotonic() - begin < 60, "a start on a busy machine, and the limit"
        assert template.render(HI) == "fine"
    finally:
        template.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize("source", ["{{ 1 }}" * 500_000, "a" * 8_000_000], ids=["blocks", "text"])
def test_a_template_of_megabytes_is_not_read(source: str) -> None:
    with pytest.raises(UsageError, match="more than the 262144 that are read: give a prompt instead"):
        ChatTemplate(source, {}, timeout=3.0)


def test_what_never_ends_is_killed_and_the_next_chat_works() -> None:
    template = ChatTemplate("fine", {}, timeout=1.0)
    process = template._helper._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.render(HI) == "fine", "a process that died is started again"
    again = template._helper._process
    assert again is not None
    assert again.pid != process.pid
    again.send_signal(signal.SIGSTOP)  # it does not answer any more
    with pytest.raises(UsageError, match="takes too long or too much memory"):
        template.render(HI)
    assert again.returncode is not None, "it was killed"
    assert template.render(HI) == "fine"
    template.close()


def test_the_process_is_kept_and_shared() -> None:
    tokenizer = Tokenizer(gemma_style(), CONFIG, template=PLAIN)
    template = ChatTemplate.of(tokenizer)
    assert ChatTemplate.of(tokenizer) is template
    process = template._helper._process
    assert process is not None
    assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (MEMORY, MEMORY)
    for _ in range(3):
        assert template.render(HI) == "user: hi"
        assert template._helper._process is process
    tokenizer.template = "other"
    assert ChatTemplate.of(tokenizer).render(HI) == "other"
    pid = process
    del template, tokenizer, process
    pid.wait(10)


def test_it_takes_no_modules_from_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of somebody else's may hold a json.py."""
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("{{ messages[0].content }}!", {}).render([{"role": "user", "content": "a"}]) == "a!"


def test_it_ends_with_ours() -> None:
    script = (
        "from paceline.text.chat import ChatTemplate\n"
        "t = ChatTemplate('x', {})\n"
        "print(t._helper._process.pid, flush=True)\n"
        "import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    pid, end = int(done.stdout), time.monotonic() + 10
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError("the process is still there")


def test_long_chats_and_odd_characters_pass() -> None:
    template = ChatTemplate(PLAIN, {})
    for text in ("x" * 3_000_000, "日本\u2028\x85\r\n\0 \ud800", "😀" * 100_000):
        assert template.render([{"role": "user", "content": text}]) == f"user: {text}"
    with pytest.raises(UsageError, match="no JSON"):
        template.render([{"role": "user", "content": object()}])
    template.close()


LOOPS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "takes"),
    [(PLAIN, False), (LOOPS, True), (BOTH, True), ("{{ messages[0].content|tojson }}", False),
     ("{{ messages[0].content.strip() }}", False), ("{{ raise_exception('no') }}", False)],
)  # fmt: skip
def test_templates_that_go_through_parts_are_known(source: str, takes: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.takes_parts == takes
    template.close()


def test_the_server_hands_parts_on_to_them() -> None:
    from paceline.chat.messages import plain, unfinished
    from paceline.chat.road import make_render
    from paceline.server.asking import given_of
    from paceline.server.schema import Message

    parts: Any = [{"type": "text", "text": " a"}, {"type": "input_text", "text": "b "}]
    messages = [given_of(Message.model_validate({"role": "user", "content": parts}))]
    for source, wanted in ((BOTH, "[ a][b ]"), (PLAIN, "user:  ab ")):
        tokenizer = Tokenizer(gemma_style(), CONFIG, template=source)
        render, takes = make_render(tokenizer)
        assert render(plain(messages, takes), None, {}) == wanted
        cut = unfinished(lambda m, render=render: render(m, None, {}), plain(messages, takes))
        assert cut == wanted.removesuffix("]")
