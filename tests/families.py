"""Families of models by their public chat templates: what each is found to write, and answers in its notation.

An answer is what the model's own documentation, vLLM's and llama.cpp's parsers have: thoughts, text, calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "text" / "templates"
F = {
    "type": "object", "required": ["s"],
    "properties": {"s": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
                   "o": {"type": "object", "properties": {"k": {"type": "boolean"}}, "additionalProperties": False}},
    "additionalProperties": False,
}  # fmt: skip
G: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"f": F, "g": G}
ARGUMENTS = {"s": 'a "b" </x>\né🎉', "n": 5, "o": {"k": True}}


def json_call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


STRING = '"a \\"b\\" </x>\\né🎉"'
A = f'{{"s": {STRING}, "n": 5, "o": {{"k": true}}}}'  # ARGUMENTS as a model writes them
RAW = 'a "b" </x>\né🎉'


def hermes(first: str = "<tool_call>\n", last: str = "\n</tool_call>") -> tuple[str, str]:
    one = first + json_call("f", A) + last
    return one, one + "\n" + first + json_call("g", "{}") + last


def llama() -> tuple[str, str]:
    one = json_call("f", A, "parameters")
    return one, f"{one}; {json_call('g', '{}', 'parameters')}"


def listed(first: str, last: str) -> tuple[str, str]:
    one = json_call("f", A)
    return f"{first}[{one}]{last}", f"{first} [{one}, {json_call('g', '{}')}]{last}"


def deepseek(fenced: bool) -> tuple[str, str]:
    def call(name: str, arguments: str) -> str:
        head = f"function<｜tool▁sep｜>{name}\n```json\n" if fenced else f"{name}<｜tool▁sep｜>"
        return f"<｜tool▁call▁begin｜>{head}{arguments}{chr(10) + '```' if fenced else ''}<｜tool▁call▁end｜>"

    def section(text: str) -> str:
        return f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"

    joint = "\n" if fenced else ""
    return section(call("f", A)), section(call("f", A) + joint + call("g", "{}"))


def xml() -> tuple[str, str]:
    one = (
        f"<tool_call>\n<function=f>\n<parameter=s>\n{RAW}\n</parameter>\n<parameter=n>\n5\n</parameter>\n"
        '<parameter=o>\n{"k": true}\n</parameter>\n</function>\n</tool_call>'
    )
    return one, one + "\n<tool_call>\n<function=g>\n</function>\n</tool_call>"


def glm(line: str) -> tuple[str, str]:
    pairs = {"s": RAW, "n": "5", "o": '{"k": true}'}
    inner = "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in pairs.items())
    one = f"<tool_call>f{line}{inner}</tool_call>"
    return one, f"{one}{line}<tool_call>g{line}</tool_call>"


def minimax() -> tuple[str, str]:
    inner = (
        f'<invoke name="f">\n<parameter name="s">{RAW}</parameter>\n<parameter name="n">5</parameter>\n'
        '<parameter name="o">{"k": true}</parameter>\n</invoke>\n'
    )
    tail = "</minimax:tool_call>"
    head = "<minimax:tool_call>\n"
    return head + inner + tail, head + inner + '<invoke name="g">\n</invoke>\n' + tail


def seed() -> tuple[str, str]:
    one = (
        f"<seed:tool_call>\n<function=f>\n<parameter=s>{RAW}</parameter>\n<parameter=n>5</parameter>\n"
        '<parameter=o>{"k": true}</parameter>\n</function>\n</seed:tool_call>'
    )
    return one, one + "\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>"


def dsml(section: str) -> tuple[str, str]:
    pairs = (("s", "true", RAW), ("n", "false", "5"), ("o", "false", '{"k": true}'))
    inner = "".join(
        f'<｜DSML｜parameter name="{k}" string="{text}">{v}</｜DSML｜parameter>\n' for k, text, v in pairs
    )
    one = f'<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n'
    head, tail = f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"
    return head + one + tail, f'{head}{one}<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n{tail}'


def cohere() -> tuple[str, str]:
    def call(name: str, arguments: str, number: int) -> str:
        return f'\n    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'

    def section(text: str) -> str:
        return f"<|START_ACTION|>[{text}\n]<|END_ACTION|>"

    return section(call("f", A, 0)), section(call("f", A, 0) + "," + call("g", "{}", 1))


def lfm2() -> tuple[str, str]:
    one = f'f(s={STRING}, n=5, o={{"k": true}})'
    return f"<|tool_call_start|>[{one}]<|tool_call_end|>", f"<|tool_call_start|>[{one}, g()]<|tool_call_end|>"


def gemma() -> tuple[str, str]:
    one = f'<|tool_call>call:f{{s:<|"|>{RAW}<|"|>,n:5,o:{{k:true}}}}<tool_call|>'
    return one, one + "<|tool_call>call:g{}<tool_call|>"


def harmony() -> tuple[str, str]:
    one = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{A}<|call|>"
    return (
        one,
        one + "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>",
    )


def kimi() -> tuple[str, str]:
    def call(name: str, arguments: str, number: int) -> str:
        head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        return f"{head}{arguments}<|tool_call_end|>"

    def section(text: str) -> str:
        return f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"

    return section(call("f", A, 0)), section(call("f", A, 0) + call("g", "{}", 1))


def atem() -> tuple[str, str]:
    def call(name: str, inner: str) -> str:
        head = f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        return f"{head}{inner}</atem:invoke>\n</atem:function_calls>"

    pairs = {"s": RAW, "n": "5", "o": '{"k": true}'}
    one = call("f", "".join(f'<atem:parameter name="{k}">{v}</atem:parameter>\n' for k, v in pairs.items()))
    return one, one + "<|eom|><|start|>assistant" + call("g", "")


@dataclass(frozen=True)
class Family:
    format: str  # what the template is found to write
    calls: tuple[str, str] | None = None  # one call, and two
    thought: tuple[str, str] | None = None  # before and behind a thought that the model opens
    opened: bool = False  # the template opens the thought
    special: tuple[str, ...] = ()  # marks that are special tokens
    added: tuple[str, ...] = ()  # marks that are tokens without being special
    needs: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False  # also where nobody asks for it
    switches: bool = False
    said: str = ""  # what stands before a plain answer

    def template(self, name: str) -> str:
        return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


THINK = ("<think>\n", "\n</think>\n\n")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
ATEM = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>")
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
SEED = ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
TOLD = {"calls_as_text": ("<tool_call>\n", "\n</tool_call>", "\n")}
F_ = "families/"
FAMILIES = {
    "google_v5": Family("gemma", gemma(), ("<|channel>thought\n", "<channel|>"), special=GEMMA, switches=True),
    F_ + "qwen2_5": Family("hermes", hermes(), added=MARKS[2:]),
    F_ + "qwen3": Family("hermes", hermes(), THINK, added=MARKS, thinks=True, switches=True),
    F_ + "qwen3_instruct_2507": Family("hermes", hermes(), added=MARKS),
    F_ + "hermes_3": Family("hermes", hermes(), added=MARKS[2:], needs={"whole_tools": True}),
    F_ + "granite_3_3": Family(
        "granite", listed("<|tool_call|>", ""), ("<think>", "</think>"), special=("<|tool_call|>",), switches=True,
        needs={"calls_as_text": ("<|tool_call|>", "", None)},
    ),
    F_ + "granite_4": Family("hermes", hermes(), special=MARKS[2:]),
    F_ + "qwen3_coder": Family("qwen-xml", xml(), added=MARKS[2:]),
    F_ + "qwen3_5_think": Family("qwen-xml", xml(), THINK, True, added=MARKS, thinks=True, switches=True),
    F_ + "qwen3_6": Family("qwen-xml", xml(), THINK, True, added=MARKS, thinks=True, switches=True),
    F_ + "qwen3_8": Family("qwen-xml", xml(), THINK, True, added=MARKS, thinks=True, switches=True),
    F_ + "llama3_1": Family(
        "llama3", llama(),
        special=("<|python_tag|>", "<|eom_id|>", "<|eot_id|>"), needs={"single_calls": True},
    ),
    F_ + "mistral_nemo": Family(
        "mistral-list", listed("[TOOL_CALLS]", ""),
        special=("[TOOL_CALLS]",), needs={"short_ids": True},
    ),
    F_ + "mistral_small_3_2": Family(
        "mistral", (f"[TOOL_CALLS]f[ARGS]{A}", f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{A}[TOOL_CALLS]g[ARGS]{{}}"),
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), needs={"short_ids": True},
    ),
    F_ + "ministral_3": Family(
        "mistral", (f"[TOOL_CALLS]f[ARGS]{A}", f"[TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]g[ARGS]{{}}"), ("[THINK]", "[/THINK]"),
        special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), needs={"thoughts_as": "parts"}, thinks=True,
    ),
    F_ + "deepseekv3": Family(
        "deepseek", deepseek(True), THINK, True, added=(*DEEPSEEK, *MARKS[:2]),
        needs={"text_arguments": True}, thinks=True,
    ),
    F_ + "deepseek_r1_distill": Family(
        "deepseek", deepseek(True), THINK, True, added=(*DEEPSEEK, *MARKS[:2]),
        needs={"text_arguments": True, "null_content": True}, thinks=True,
    ),
    F_ + "deepseek_v3_1": Family(
        "deepseek-v3.1", deepseek(False), ("<think>", "</think>"), special=DEEPSEEK, added=MARKS[:2], switches=True),
    F_ + "glm4moe": Family(
        "glm", glm("\n"), ("<think>", "</think>\n"), added=(*MARKS, *TAGS),
        thinks=True, switches=True,
    ),
    F_ + "glm4_7": Family(
        "glm-4.7", glm(""), ("<think>", "</think>"), True,
        added=(*MARKS, *TAGS), thinks=True, switches=True,
    ),
    F_ + "gptoss": Family(
        "harmony", harmony(), ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), special=HARMONY,
        needs={"thoughts_as": "thinking", "single_calls": True, "whole_tools": True}, thinks=True,
        said="<|channel|>final<|message|>",
    ),
    F_ + "muse_glimmer": Family(
        "atem", atem(), (" to=self<|message|>", "<|eom|><|start|>assistant"), special=ATEM,
        needs={"whole_tools": True}, thinks=True, said=" to=user<|message|>",
    ),
    F_ + "kimi_k2": Family("kimi", kimi(), special=KIMI),
    F_ + "minimax_m2": Family("minimax", minimax(), THINK, True, added=MARKS[:2], thinks=True),
    F_ + "nemotron_nano_v2": Family(
        "json", listed("<TOOLCALL>", "</TOOLCALL>"),
        THINK, True, thinks=True,
    ),
    F_ + "command_r7b": Family(
        "cohere", cohere(), COHERE, switches=True, said="<|START_RESPONSE|>", needs={"whole_tools": True},
        special=(*COHERE, "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    F_ + "north": Family(
        "cohere", cohere(), COHERE, True, thinks=True, switches=True, said="<|START_TEXT|>", needs={"whole_tools": True},
        special=(*COHERE, "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    F_ + "seed_oss": Family(
        "seed", seed(), SEED[:2], special=SEED, thinks=True, needs={"whole_tools": True},
    ),
    F_ + "deepseek_v3_2": Family(
        "deepseek-v3.2", dsml("function_calls"), ("<think>", "</think>"), True, special=("｜DSML｜",), added=MARKS[:2],
        switches=True,
    ),
    F_ + "deepseek_v4": Family(
        "deepseek-v4", dsml("tool_calls"), ("<think>", "</think>"), True, special=("｜DSML｜",), added=MARKS[:2],
        switches=True,
    ),
    F_ + "lfm2": Family(
        "lfm2", lfm2(), special=LFM2, needs={"calls_as_text": ("<|tool_call_start|>", "<|tool_call_end|>", None)}),
    F_ + "lfm2_5": Family(
        "lfm2", lfm2(), ("<think>", "</think>"), special=LFM2, added=MARKS[:2], thinks=True,
        needs={"thoughts_as": "thinking"},
    ),
    F_ + "smollm3": Family(
        "think", None, ("<think>\n", "\n</think>\n"), added=MARKS[:2], thinks=True, switches=True, needs=TOLD,
    ),
    F_ + "phi3": Family("plain", needs=TOLD),
    F_ + "gemma2": Family("plain", needs=TOLD),
    F_ + "gemma3": Family("plain", needs=TOLD),
}  # fmt: skip


def tokenizer_of(name: str, marks: bool = True) -> Tokenizer:
    """Byte-level BPE without merges, with a family's marks as tokens if asked for, and its template."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>", "<bos>", *(family.special if marks else ())]
    names = [*special, *(family.added if marks else ())]
    vocab = {token: i for i, token in enumerate([*names, *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in names[len(special) :]])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return Tokenizer(backend, config, eos=[1], template=family.template(name))
