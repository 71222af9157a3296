"""One model's chats: what is asked -> a prompt of tokens, and the tokens of an answer -> what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.chat.answer import ChatAnswer
from paceline.chat.asked import Asked, Message, Tool
from paceline.chat.constraint import Grammars, Make, compiled, lead_of, needed
from paceline.chat.messages import plain, text_of, unfinished
from paceline.chat.repairs import rendered
from paceline.core import Constraint, SamplingParams
from paceline.errors import UsageError
from paceline.media.prompts import opened, prompt_of
from paceline.text.chat import ChatTemplate, TemplateUnusable
from paceline.text.formats.base import SWITCHES, ChatFormat
from paceline.text.formats.choose import format_of
from paceline.text.formats.hermes import HERMES, JsonCalls
from paceline.text.formats.needs import suited, suited_tools
from paceline.text.formats.probe import PLAIN
from paceline.text.marked import Answer
from paceline.text.phases import BoundedThinking
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.media.reader import MediaReader

# (messages, tools, the template's variables, of which `add_generation_prompt` is true if it is not there) -> prompt
Render = Callable[[list[Message], list[Tool] | None, dict[str, Any]], str]
_HIDDEN = "tools: the model's chat template does not show them: describe them in a message"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`inside`: it has opened a thought. `changes`: what of the messages was changed, or is not shown."""

    text: str
    ids: list[int]
    inside: bool
    changes: list[str]
    media: bool = False  # it holds pictures or sound, or text that looks like a placeholder of them


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer that is about to be written."""

    asked: Asked
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Chats:
    """`takes_parts`: the template goes through content in parts. `reader`: of pictures and sound."""

    tokenizer: Tokenizer
    render: Render
    format: ChatFormat = PLAIN
    takes_parts: bool = False
    reader: MediaReader | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, reader: MediaReader | None = None) -> Chats:
        render, takes_parts = make_render(tokenizer)
        return cls(tokenizer, render, format_of(tokenizer), takes_parts, reader)

    def plain(self, messages: Any) -> list[Message]:
        """Messages of OpenAI's form, or one near to it, as `Asked` has them. Raises UsageError."""
        return plain(messages, self.takes_parts, self.tokenizer.template)

    def prompt(self, asked: Asked, salt: str = "", *, served: bool = False, measured: bool = False,
               check: Callable[[str], None] | None = None) -> Prompt:  # fmt: skip
        """The prompt. Raises UsageError, of which PromptError is for what is wrong with media.

        `served`: it comes from a client, for whom no file is opened. `measured`: no tower runs, so it can be counted but
        not run. `check` is shown the text before it is encoded, which may take seconds, and raises what it likes.
        """
        tools, variables = asked.shown_tools, _variables(asked)

        def render(messages: list[Message]) -> str:
            return self.render(messages, tools or None, variables)

        talk = opened(asked.messages, self.reader, served=served)
        talk.items = [replace(item, budget=item.budget or asked.budget) for item in talk.items]
        whole = partial(unfinished, render) if asked.continues else render
        text, changes = rendered(whole, talk.messages, strict=asked.strict)
        if tools and not self.format.tools_shown:
            changes.append(_HIDDEN)
        if check is not None:
            check(text)
        if measured and self.reader is not None:
            ids = self.reader.measured(text, talk)
        else:
            ids = prompt_of(text, talk, self.tokenizer, self.reader, salt)
        begun = text_of(asked.messages[-1]["content"]) if asked.continues else None
        return Prompt(text, ids, self.format.opened_by(text, begun), changes, bool(talk.items or talk.marks))

    def constraint(
        self, grammars: Grammars, asked: Asked, prompt: Prompt
    ) -> Callable[[], Make | None] | None:
        """What compiles the constraint: it takes a while, and raises UsageError. None: there is none to compile."""
        work = None
        if needed(asked):
            work = partial(compiled, grammars, asked, lead_of(asked, self.format, prompt.text, prompt.inside))
        if asked.most_thought is None or (self.bounds_thoughts and self._thought_marks is None):
            return work
        if self._thought_marks is None:
            raise UsageError(
                "this model's thoughts have no tokens around them, so they cannot be bounded: leave it out"
            )
        bound = partial(
            BoundedThinking,
            marks=self._thought_marks,
            inside=prompt.inside,
            most=asked.most_thought,
            vocab_size=self.tokenizer.vocab_size,
        )
        return partial(_bounded, work, bound)

    @property
    def bounds_thoughts(self) -> bool:
        """Whether `Asked.most_thought` can hold. Where a model has no thoughts at all it does by itself."""
        return self.format.thoughts is None or self._thought_marks is not None

    @property
    def _thought_marks(self) -> tuple[int, int] | None:
        """The tokens around a thought, if they are two."""
        thoughts = self.format.thoughts
        ids = [self.tokenizer.token_id(m) for m in ((thoughts.opening, thoughts.closing) if thoughts else ())]
        return None if len(ids) != 2 or ids[0] is None or ids[1] is None else (ids[0], ids[1])

    def stops(self, asked: Asked) -> tuple[int, ...]:
        """Tokens that end the answer: the format's, and the end of a call where one is to be the only."""
        ends, calls = list(self.format.ends), self.format.calls
        if (
            calls is not None
            and asked.one_call
            and asked.shown_tools
            and calls.joint is not None
            and calls.closing
        ):
            ends.append(calls.closing)
        ids = (self.tokenizer.token_id(end) for end in ends)
        return tuple(i for i in ids if i is not None)

    def turn(
        self, asked: Asked, prompt: Prompt, params: SamplingParams, grammars: Callable[[], Grammars]
    ) -> Turn:
        """The parameters with the constraint and the ends that are asked for. Raises UsageError."""
        constraint = params.constraint
        if needed(asked) or asked.most_thought is not None:
            if constraint is not None:
                raise UsageError("constraint: response_format and forced calls make their own: leave it out")
            work = self.constraint(grammars(), asked, prompt)
            constraint = None if work is None else work()
        ends = (*params.stop_token_ids, *self.stops(asked))
        return Turn(asked, prompt, replace(params, constraint=constraint, stop_token_ids=ends))

    def answer(
        self, asked: Asked, inside: bool, params: SamplingParams, name: str, most: int = 128
    ) -> ChatAnswer:
        """What takes one text apart. `name`: what ids of its calls are made of; `most` calls are told."""
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in asked.shown_tools
        }
        own = self.format
        calls = HERMES if schemas and own.calls is None else own.calls
        if isinstance(calls, JsonCalls) and needed(asked):  # a grammar holds calls between their marks only
            calls = replace(calls, forgotten=False)
        chat = replace(own, calls=calls)
        events = Answer(self.tokenizer, params, chat, inside, schemas or None)
        return ChatAnswer(events, name, 1 if asked.one_call else most, own.needs.short_ids)


def _bounded(
    work: Callable[[], Make | None] | None, bound: Callable[[Constraint | None], Constraint]
) -> Make:
    """A maker of constraints that bound a thought, beside what `work` compiles."""
    make = None if work is None else work()
    return lambda: bound(None if make is None else make())


def _variables(asked: Asked) -> dict[str, Any]:
    """Variables of the template: what the client has set, and what says whether to think."""
    out = dict(asked.variables)
    if asked.effort in ("low", "medium", "high"):  # gpt-oss has such a switch
        out.setdefault("reasoning_effort", asked.effort)
    if asked.thinking is not None:
        out = {**dict.fromkeys(SWITCHES, asked.thinking), **out, "enable_thinking": asked.thinking}
    if asked.continues or not asked.opens_turn:
        out["add_generation_prompt"] = False
    return out


def make_render(tokenizer: Tokenizer) -> tuple[Render, bool]:
    """How messages become a prompt, and whether content may stay in parts; without a template they are refused."""
    try:
        template = ChatTemplate.of(tokenizer)
    except TemplateUnusable as error:
        reason = str(error)

        def refusing(messages: Any, tools: Any, options: Any) -> str:
            raise TemplateUnusable(reason)

        return refusing, False

    def render(messages: list[Message], tools: list[Tool] | None, options: Mapping[str, Any]) -> str:
        variables = dict(options)
        opens = bool(variables.pop("add_generation_prompt", True))
        needs = format_of(tokenizer).needs
        return ChatTemplate.of(tokenizer, bool(tools)).render(
            suited(messages, needs),
            tools=suited_tools(tools, needs),
            add_generation_prompt=opens,
            options=variables,
        )

    return render, template.takes_parts
