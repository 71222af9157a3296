"""Chat templates: what transformers renders, and what a hostile one cannot do."""

import threading

import pytest
from transformers import PreTrainedTokenizerFast

from paceline.errors import UsageError
from paceline.text import sandbox
from paceline.text.chat import ChatTemplate, encode_chat
from paceline.text.tokenizer import Tokenizer
from text.tiny_tokenizers import CONFIG, gemma_style

# In the manner of Gemma 4's own: macros, namespaces, typed content, tools, thinking, refusals.
GEMMA = """{%- macro content_of(message) -%}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] | trim }}
        {%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(previous='', turns=0) -%}
{{- bos_token -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<|turn>system\\n<|think|><turn|>\\n' -}}{%- endif -%}
{%- if tools -%}{%- for tool in tools %}{{ '<|tool>' ~ tool['function'] | tojson ~ '<tool|>' }}{% endfor -%}{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == ns.previous -%}{{ raise_exception('Roles must alternate: ' ~ message.role) }}{%- endif -%}
    {%- set ns.previous = message['role'] -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\\n' -}}
    {%- generation -%}{{- content_of(message) -}}{%- endgeneration -%}
    {{- '<turn|>\\n' -}}
    {%- if loop.last and loop.length > 9 %}{% break %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""
CHATS = [
    [{"role": "user", "content": " hi "}],
    [{"role": "system", "content": "be <b>brief</b> & kind"}, {"role": "user", "content": "日本 'quoted' \"x\""}],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}]},
     {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}],
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "Zürich <&>"}}}]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [None, True])
@pytest.mark.parametrize("reply", [True, False])
def test_renders_as_transformers_does(chat, tools, thinking, reply):
    oracle = PreTrainedTokenizerFast(tokenizer_object=gemma_style(), bos_token="<bos>", eos_token="<eos>")
    options = {} if thinking is None else {"enable_thinking": thinking}
    wanted = oracle.apply_chat_template(
        chat, tools=tools, chat_template=GEMMA, tokenize=False, add_generation_prompt=reply, **options
    )
    template = ChatTemplate(GEMMA, {"bos_token": "<bos>"})
    got = template.render(chat, tools=tools, add_generation_prompt=reply, options=options)
    assert got == wanted
    assert got.startswith("<bos>")


def test_encode_chat_has_one_bos():
    tokenizer = Tokenizer(gemma_style(), CONFIG, template=GEMMA)
    ids = encode_chat(tokenizer, CHATS[0])
    assert ids.count(tokenizer.bos_id) == 1
    assert ids == tokenizer.encode(ChatTemplate.of(tokenizer).render(CHATS[0]))
    assert len(encode_chat(tokenizer, CHATS[0], generation_prompt=False)) < len(ids)


def test_messages_are_not_changed_and_threads_do_not_meet():
    template, results = ChatTemplate(GEMMA, {"bos_token": "<bos>"}), {}

    def work(i):
        results[i] = template.render([{"role": "user", "content": f"text {i}"}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"text {i}<turn|>" in results[i] for i in range(8))


def test_what_a_template_refuses_is_said():
    template = ChatTemplate(GEMMA, {"bos_token": ""})
    with pytest.raises(UsageError, match="refuses these messages: Roles must alternate: user"):
        template.render([CHATS[0][0], CHATS[0][0]])
    with pytest.raises(UsageError, match="messages is empty"):
        template.render([])
    with pytest.raises(UsageError, match="has no chat template: give a prompt"):
        ChatTemplate.of(Tokenizer(gemma_style(), CONFIG))
    with pytest.raises(UsageError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


HOSTILE = {
    "prison": ["{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__.__subclasses__() }}",
               "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}", "{% include 'x' %}",
               "{{ messages[0].update({'a': 1}) }}"],
    "time": ["{% for a in range(50000) %}{% for b in range(50000) %}{% endfor %}{% endfor %}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
             "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ 10 ** 100000 }}",
             "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"],
    "space": ["{{ range(1000000)|list }}", "{{ 'x' * 1000000000 }}", "{{ [0] * 1000000000 }}",
              "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
              "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
              "{{ 'x'.ljust(1000000000) }}", "{{ 'x'|center(1000000000) }}", "{{ '%1000000000d' % 3 }}",
              "{{ '%*d' % (1000000000, 3) }}", "{{ '{:1000000000}'.format(3) }}", "{{ '{:{w}}'.format(3, w=10**9) }}",
              "{{ ('a' * 90000).replace('a', 'b' * 90000) }}", "{{ ('a' * 90000)|replace('a', 'b' * 90000) }}",
              "{{ (['a' * 90000] * 90000)|join('x') }}", "{{ 'x'.join(['a' * 90000] * 90000) }}",
              "{% for i in range(90000) %}{{ 'a' * 90000 }}{% endfor %}",
              "{% set x %}{% for i in range(90000) %}{{ 'a' * 90000 }}{% endfor %}{% endset %}"],
}  # fmt: skip


@pytest.mark.parametrize("source", [s for group in HOSTILE.values() for s in group])
def test_a_hostile_template_is_stopped(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(UsageError, match="chat template fails"):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("source", ["{{ ''|attr('__class__') }}", "{{ '{0.__class__}'.format(1) }}"])
def test_what_is_private_prints_nothing(source):
    assert ChatTemplate(source, {}).render(CHATS[0]) == ""


def test_the_clock_stops_what_counts_as_few_steps(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(UsageError, match="runs for more than 0 seconds"):
        ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}", {}).render(CHATS[0])
