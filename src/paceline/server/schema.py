"""What clients may send, fields of other servers' dialects among them (server/foreign.py says what those mean).

A field that is not here is kept as an extra one, and unknown.py tells the client that it was ignored. Fields that
change nothing and come with every request of some client say "accepted and ignored". docs/server-reference.md lists all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from paceline.core import MAX_DRAFT_TOKENS, MOST_WORDS, SamplingParams, VerifyRule
from paceline.options import INFINITE, Number, Whole, rows_of

T = TypeVar("T")
Many = Annotated[
    list[T], Field(fail_fast=True)
]  # of which one wrong item is enough: clients may send a hundred thousand
Token = Annotated[int, Field(ge=0, lt=2**31)]
_NOT_EMPTY = Field(json_schema_extra={"minItems": 1})  # said here; refused in better words where it is read
Ids = Annotated[Many[Token], _NOT_EMPTY]


def _whole(value: Any, depth: int = 2) -> Any:
    """5.0 is an integer in JSON, whatever Python thinks; also in lists, and in lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and depth and not {float, list}.isdisjoint(map(type, value)):
        return [_whole(item, depth - 1) for item in value]
    return value


_ROWS = {row.name: row for row in rows_of(SamplingParams, "request")}
_MOST_TOKENS = 2**31 - 1


def of_table(name: str, description: str | None = None, low: int | None = None) -> Any:
    """A field for an option of `SamplingParams`, with the bounds of its row. `low`: what else may be asked for."""
    kind = _ROWS[name].kind
    bounds: dict[str, Any] = {}
    if isinstance(kind, Whole | Number):
        most = _MOST_TOKENS if kind.high == INFINITE else kind.high
        bounds = {"ge": kind.low if low is None else low, "le": most}
    return Field(None, description=description, **bounds)


def _numbers_only(value: Any) -> Any:
    """One wrong value of an object is enough, too."""
    for name, number in value.items() if isinstance(value, dict) else ():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"the value of {name[:40]!r} should be a number")
    return value


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        return {name: _whole(value) for name, value in data.items()} if isinstance(data, dict) else data


class Speculation(Part):
    """How this request is drafted. Under `match` (the default rule) nothing here changes the text.

    No other server has this field, so an unknown name in it is a slip and refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    drafter: str | None = Field(None, max_length=64, description="none, or one of the loaded kinds")
    draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | Literal["auto"] | None = None
    verify: VerifyRule | None = None
    typical_epsilon: float | None = of_table("typical_epsilon", "of the lossy rule typical")
    typical_delta: float | None = of_table("typical_delta")
    trace: bool = Field(False, description="stream what was proposed and where each token came from")


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="accepted and ignored")


class JsonSchema(Part):
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


def _described(name: str, kind: str) -> dict[str, Any]:
    """JSON schema: the format is `name`, and the field of that name is there."""
    field = {"type": kind, "minLength": 1} if kind == "string" else {"type": kind}
    return {"properties": {"type": {"const": name}, name: field}, "required": [name]}


class ResponseFormat(Part):
    """`grammar` (llguidance's Lark, or GBNF) and `regex` are ours. A type with a field of its name needs that field."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object"]}}},
                _described("json_schema", "object"),
                _described("grammar", "string"),
                _described("regex", "string"),
                {"properties": {"schema": {"type": "object"}}, "required": ["schema"]},
                {"properties": {"value": {"type": ["object", "string"]}}, "required": ["value"]},
                {"properties": {"pattern": {"type": "string", "minLength": 1}}, "required": ["pattern"]},
            ]
        }
    )
    type: Literal["text", "json_object", "json_schema", "grammar", "regex", "json"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    regex: str | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="llama.cpp's place of a JSON schema"
    )
    value: dict[str, Any] | str | None = Field(
        None, description="that of text-generation-inference, also of a regex"
    )
    pattern: str | None = Field(None, description="the same as regex")
    name: str | None = Field(None, description="accepted and ignored")
    strict: bool | None = Field(None, description="accepted and ignored")
    _said: str | None = PrivateAttr(None)

    @property
    def said(self) -> str | None:
        """The field that the client said this in, if it was another one."""
        return self._said

    @classmethod
    def of_field(cls, field: str, kind: str, **fields: Any) -> ResponseFormat:
        made = cls.model_validate({"type": kind, **fields})
        made._said = field
        return made


class StructuredOutputs(Part):
    """vLLM's way to ask for a format: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None


_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio", "audio_url")


class TextPart(Part):
    """Text, or a picture or clip with the names of several APIs: `media` is such a part as it was sent."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = Field(max_length=64)
    text: str | None = None
    media: dict[str, Any] | None = Field(None, description="not for clients to set")

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, data: Any) -> Any:
        """What the model refused to say is text of its turn."""
        if not isinstance(data, dict):
            return data
        if data.get("type") in _MEDIA:
            return {"type": data["type"], "media": data}
        refused = data.get("type") == "refusal" and "text" not in data
        return {"type": "refusal", "text": data.get("refusal")} if refused else {**data, "media": None}

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if value not in ("text", "input_text", "output_text", "refusal", *_MEDIA):
            raise ValueError(
                f"parts of type {str(value)[:40]!r} are not supported: send text, images or audio"
            )
        return value


Content = str | Many[TextPart]


class Prediction(Part):
    type: Literal["content"]
    content: Content


class FunctionCall(Part):
    """OpenAI writes arguments as text, Ollama as they are; broken ones of old turns are carried as text."""

    name: str = Field(max_length=128)
    arguments: str | dict[str, Any] | None = None


class ToolCall(Part):
    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="accepted and ignored")


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Many[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same as reasoning_content")
    reasoning_details: Any = Field(None, description="accepted and ignored")
    cache_control: Any = Field(None, description="accepted and ignored")
    provider_specific_fields: Any = Field(None, description="accepted and ignored")
    refusal: Any = Field(None, description="the content of a turn that has none")
    audio: Any = Field(None, description="accepted and ignored")
    annotations: Any = Field(None, description="accepted and ignored")
    prefix: bool | None = Field(
        None, description="DeepSeek's and Mistral's: a last turn is gone on with by itself"
    )
    partial: bool | None = Field(None, description="Kimi's: the same as prefix")
    function_call: FunctionCall | None = Field(None, description="the older form of tool_calls")


class Function(Part):
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]{0,127}$")
    description: str | None = Field(None, max_length=2**16)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function
    cache_control: Any = Field(None, description="accepted and ignored")


class FunctionName(Part):
    name: str = Field(max_length=128)


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class ToolNames(Part):
    mode: Literal["auto", "required"] = "auto"
    tools: Many[NamedTool] = Field(min_length=1, max_length=1024)


class AllowedTools(Part):
    """Which of the tools may be called; all of them are shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolNames


class TemplateOptions(Part):
    """Variables of the chat template: this one, which all know, and others that the template itself has to know."""

    enable_thinking: bool | None = None


class Reasoning(Part):
    """OpenRouter's way to say `reasoning_effort`."""

    effort: str | None = Field(None, max_length=32)
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="the same as thinking_budget")


class Thinking(Part):
    """`thinking` of DeepSeek, GLM and Kimi, in Anthropic's form."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="the same as thinking_budget")


_AS_MANY_AS_FIT = "-1: as many as fit"


class Named(Part):
    """A request to the model of this name."""

    model: str | None = Field(None, max_length=256, description="left out: the one that is served")


_NEVER = ("bad_token_ids", "suppress_tokens", "banned_tokens")


@dataclass(slots=True)
class _Biases:
    """What llama.cpp's forms of logit_bias say."""

    tokens: dict[str, Any] = field(default_factory=dict)
    texts: list[list[Any]] = field(
        default_factory=list
    )  # of all tokens of a text, each with its bias or false
    never: list[int] = field(default_factory=list)  # tokens that are never written


def _biases(given: dict[str, Any] | list[Any]) -> _Biases | None:
    """None for what is none of the forms."""
    out = _Biases()
    for pair in list(given.items()) if isinstance(given, dict) else given:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], int | str):
            return None
        token, bias = pair
        if isinstance(token, bool):
            return None
        if isinstance(token, str) and isinstance(given, list):
            out.texts.append([token, bias])
        elif bias is False and str(token).isascii() and str(token).isdecimal() and len(str(token)) < 10:
            out.never.append(int(token))
        else:
            out.tokens[str(token)] = 0.0 if bias is False else bias
    return out


class Lora(Part):
    """An adapter as llama.cpp names it."""

    id: Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, Field(max_length=128)]
    scale: float = Field(1.0, ge=-100, le=100)


Adapters = (
    Annotated[str, Field(min_length=1, max_length=128)]
    | Annotated[Many[Lora], Field(max_length=16)]
    | Annotated[dict[str, float], BeforeValidator(_numbers_only), Field(max_length=16)]
)


class Sampling(Named):
    """What both endpoints take."""

    @model_validator(mode="before")
    @classmethod
    def _llama_biases(cls, data: Any) -> Any:
        """llama.cpp's forms of logit_bias: pairs of token or text and bias, and false for what is never written."""
        given = data.get("logit_bias") if isinstance(data, dict) else None
        if not isinstance(given, dict | list) or not given:
            return data
        name = next((name for name in _NEVER if data.get(name) is not None), _NEVER[0])
        made, others = _biases(given), data.get(name) or []
        if made is None or not isinstance(others, list) or (isinstance(given, dict) and not made.never):
            return data
        out = {**data, "logit_bias": made.tokens}
        if made.texts:
            out["biased_texts"] = made.texts
        return out | ({name: [*others, *made.never]} if made.never else {})

    max_tokens: int | None = of_table("max_tokens", _AS_MANY_AS_FIT, low=-1)
    n_predict: int | None = of_table("max_tokens", "the same as max_tokens", low=-1)
    max_new_tokens: int | None = of_table("max_tokens", "the same as max_tokens")
    max_length: int | None = of_table("max_tokens", "of prompt and answer together")
    min_tokens: int | None = of_table("min_tokens")
    min_new_tokens: int | None = of_table("min_tokens", "the same as min_tokens")
    temperature: float | None = of_table("temperature")
    top_p: float | None = of_table("top_p", "0: the most likely token")
    top_k: int | None = of_table("top_k", "0 and -1: off")
    min_p: float | None = of_table("min_p")
    typical_p: float | None = of_table("typical_p")
    top_n_sigma: float | None = of_table("top_n_sigma")
    nsigma: float | None = of_table("top_n_sigma", "the same as top_n_sigma")
    xtc_probability: float | None = of_table("xtc_probability")
    xtc_threshold: float | None = of_table("xtc_threshold")
    dynatemp_range: float | None = of_table("dynatemp_range")
    dynatemp_exponent: float | None = of_table("dynatemp_exponent")
    mirostat: int | None = Field(None, description="0 or 2")
    mirostat_mode: int | None = Field(None, description="the same as mirostat")
    mirostat_tau: float | None = of_table("mirostat_tau")
    mirostat_eta: float | None = of_table("mirostat_eta")
    temperature_last: bool | None = None
    dry_multiplier: float | None = of_table("dry_multiplier")
    dry_base: float | None = of_table("dry_base")
    dry_allowed_length: int | None = of_table("dry_allowed_length")
    dry_penalty_last_n: int | None = of_table("dry_penalty_last_n", "-1: all")
    dry_sequence_breakers: Many[str] | None = Field(None, max_length=64)
    dry_range: int | None = of_table("dry_penalty_last_n", "the same as dry_penalty_last_n")
    repetition_penalty: float | None = of_table("repetition_penalty")
    repeat_penalty: float | None = of_table("repetition_penalty", "the same as repetition_penalty")
    penalty_last_n: int | None = of_table("penalty_last_n", "-1: all")
    repeat_last_n: int | None = of_table("penalty_last_n", "the same as penalty_last_n")
    repetition_penalty_range: int | None = of_table("penalty_last_n", "the same as penalty_last_n")
    presence_penalty: float | None = of_table("presence_penalty")
    frequency_penalty: float | None = of_table("frequency_penalty")
    bad_token_ids: Many[Token] | None = Field(None, max_length=1024)
    suppress_tokens: Many[Token] | None = Field(
        None, max_length=1024, description="the same as bad_token_ids"
    )
    banned_tokens: Many[Token] | None = Field(None, max_length=1024, description="the same as bad_token_ids")
    allowed_token_ids: Many[Token] | None = Field(None, min_length=1, max_length=2**18)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers_only)] | None = None
    biased_texts: Many[Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = Field(
        None, description="not for clients to set: the texts of logit_bias"
    )
    bad_words: Many[str] | None = Field(
        None, max_length=MOST_WORDS, description="vLLM's, as the tokens they are"
    )
    banned_strings: Many[str] | None = Field(
        None, max_length=MOST_WORDS, description="in the text, whatever its tokens"
    )
    include_stop_str_in_output: bool | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[Token] | None = Field(None, max_length=128)
    seed: int | None = of_table("seed", "-1: one is drawn and told")
    n: int | None = of_table("n")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = Field(
        None, description="llama.cpp's: a stream says how far its prompt is read"
    )
    ignore_eos: bool | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="a response_format of vLLM's")
    guided_regex: str | None = None
    guided_choice: Many[str] | None = Field(None, min_length=1, max_length=1024)
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = Field(None, description="a response_format of llama.cpp's")
    grammar: str | None = Field(None, description="a response_format of llama.cpp's: GBNF, or Lark")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="Ollama's")
    regex: str | None = Field(None, description="a response_format of SGLang's")
    ebnf: str | None = Field(None, description="a response_format of SGLang's: GBNF, or Lark")
    choice: Many[str] | None = Field(None, min_length=1, max_length=1024, description="guided_choice")
    lora: Adapters | None = Field(None, description="an adapter's name, llama.cpp's list, or factors by name")
    adapter: Adapters | None = Field(None, description="the same as lora")
    speculation: Speculation | None = None
    cache_salt: str | None = Field(None, max_length=256, description="shares prefixes only with equal salts")
    cache_prompt: bool | None = Field(None, description="false: shares no prefix with another request")
    skip_special_tokens: bool | None = Field(None, description="must be true: special tokens are not shown")
    keep_alive: Any = Field(None, description="has no effect")
    id_slot: Any = Field(None, description="has no effect")
    user: Any = Field(None, description="accepted and ignored")
    metadata: Any = Field(None, description="accepted and ignored")
    store: Any = Field(None, description="accepted and ignored")
    service_tier: Any = Field(None, description="accepted and ignored")
    safety_identifier: Any = Field(None, description="accepted and ignored")
    prompt_cache_key: Any = Field(None, description="accepted and ignored")
    prompt_cache_retention: Any = Field(None, description="accepted and ignored")


def _needs(field: str, other: str) -> dict[str, Any]:
    """JSON schema: `field` is left out or null, or `other` is true."""
    absent = {"properties": {field: {"type": "null"}}}
    return {"anyOf": [absent, {"properties": {other: {"const": True}}, "required": [other]}]}


_FREE_CHOICE: dict[str, Any] = {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}}
_SOME_TOOLS: dict[str, Any] = {
    "properties": {"tools": {"type": "array", "minItems": 1}},
    "required": ["tools"],
}
_LENGTHS: tuple[str, ...] = ("max_tokens", "max_completion_tokens", "n_predict")
_ONE_TEXT: dict[str, Any] = {"properties": {"best_of": {"const": 1}, "n": {"enum": [None, 1]}}}


class ChatRequest(Sampling):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _needs("top_logprobs", "logprobs"),
                _needs("stream_options", "stream"),
                {"anyOf": [_FREE_CHOICE, _SOME_TOOLS]},
                {"properties": {name: {"not": {"const": 0}} for name in _LENGTHS}},
            ]
        }
    )
    messages: Many[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = of_table("max_tokens", _AS_MANY_AS_FIT, low=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    functions: Many[Function] | None = Field(None, description="the older form of tools")
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        None, description="the older form of tool_choice"
    )
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32, description="none: no thinking, else thinking")
    reasoning: Reasoning | None = None
    think: bool | str | None = Field(None, description="Ollama's: whether to think")
    enable_thinking: bool | None = None
    thinking: Thinking | None = Field(None, description="whether to think, and for how many tokens")
    thinking_budget: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="tokens of a thought at most; -1: any"
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="the same as thinking_budget"
    )
    thinking_budget_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="the same as thinking_budget"
    )
    reasoning_budget: int | None = Field(None, ge=-1, le=2**31 - 1, description="the same as thinking_budget")
    chat_template_kwargs: TemplateOptions | None = None
    image_tokens: int | None = Field(None, description="of each picture that names no budget, at most")
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="vLLM's: `max_soft_tokens` is image_tokens"
    )
    continue_final_message: bool | None = Field(
        None,
        description="go on with the last message; so it is by itself for one of the assistant without calls",
    )
    add_generation_prompt: bool | None = Field(None, description="begin the assistant's turn")
    audio: Any = Field(None, description="not supported: must be null")
    modalities: Many[Literal["text"]] | None = None
    verbosity: Any = Field(None, description="accepted and ignored")


class CompletionRequest(Sampling):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _needs("stream_options", "stream"),
                {"anyOf": [{"properties": {"best_of": {"type": "null"}}}, _ONE_TEXT]},
            ]
        }
    )
    prompt: str | Annotated[Many[str], _NOT_EMPTY] | Ids | Annotated[Many[Ids], _NOT_EMPTY]
    max_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="0 writes nothing: useful with echo; -1: as many as fit"
    )
    logprobs: int | None = Field(
        None, ge=0, description="how many likely tokens to show beside the chosen one"
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=_MOST_TOKENS,
        description="vLLM's: keep the prompt's last tokens; -1: as many as fit; 0: all",
    )
    echo: bool | None = None
    images: Many[str] | None = Field(
        None, max_length=64, description="data URLs, for the prompt's placeholders"
    )
    audio: Many[str] | None = Field(None, max_length=64, description="as `images`")

    @field_validator("logprobs", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("give how many likely tokens to show beside the chosen one, 0 or more, or null")
        return value

    best_of: int | None = Field(None, ge=1, description="only as many as n")
    suffix: str | None = Field(None, description="what follows: for models that write between two texts")
