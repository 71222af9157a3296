"""The turns of a conversation as a prompt: only what is new has to be computed, and what no longer fits is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PromptError

if TYPE_CHECKING:
    from paceline.chat.asked import Asked
    from paceline.chat.road import Prompt
    from paceline.llm import LLM

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Next:
    """What the model is asked next. `dropped`: messages that are left out for the first time."""

    asked: Asked
    prompt: Prompt
    dropped: int


class Turns:
    """System prompt, messages, and the token ids that the model has seen of them."""

    def __init__(self, llm: LLM, *, refuse: bool = False) -> None:
        """`refuse`: an error where turns would have to be left out."""
        self._llm, self._refuse = llm, refuse
        self.system: str | None = None
        self.messages: list[Message] = []
        self.first = 0  # messages before it do not fit any more
        self.used = 0  # tokens of the context that the last answer ended with
        self._seen: tuple[str, list[int]] = ("", [])

    def clear(self) -> None:
        self.messages, self.first, self.used, self._seen = [], 0, 0, ("", [])

    def replace(self, system: str | None, messages: Seq[Message]) -> None:
        self.clear()
        self.system, self.messages = system, list(messages)

    def prompt(self, new: str | list[Message], wanted: int | None) -> Next:
        """The prompt with a text, or parts, as the user's next message, which is not kept yet. `wanted`: tokens to leave
        room for.

        Where room is short the oldest turns are left out, so many that the next turns fit, too: each time that the
        beginning changes, all of it has to be computed again. Raises PromptError if it does not fit alone, or nothing
        may be left out.
        """
        context, question = self._llm.engine.max_len, {"role": "user", "content": new}
        room = min(wanted or context // 4, context // 2)
        first = self.first
        asked, prompt = self._rendered(first, question)
        if len(prompt.ids) + room > context:
            if self._refuse and self.messages:
                raise PromptError(
                    f"the conversation would take {len(prompt.ids)} tokens, and the context of {context} needs {room} "
                    "for the answer: /new begins anew; a larger --max-model-len or --when-full drop goes on"
                )
            while len(prompt.ids) > context // 2 and first < len(self.messages):
                first = self._next(first)
                asked, prompt = self._rendered(first, question)
        if len(prompt.ids) >= context:
            raise PromptError(
                f"the message takes {len(prompt.ids)} tokens and the context holds {context}: shorten it, or start with "
                "a larger --max-model-len"
            )
        dropped, self.first = first - self.first, first
        return Next(asked, prompt, dropped)

    def add(self, question: str | list[Message], answer: str, prompt: Prompt, tokens: Seq[int]) -> None:
        """Keep a turn: `tokens` are those of the answer, marks and end included."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = [*prompt.ids, *tokens]
        self.used = len(ids)
        self._seen = (prompt.text + self._llm.tokenizer.decode(tokens, skip_special=False, begins=False), ids)

    def check(self, system: str | None) -> None:
        """Raise UsageError if the model's template refuses such a system prompt."""
        self._ask([*_system(system), {"role": "user", "content": "x"}])

    def _next(self, first: int) -> int:
        """The next turn of the user after `first`."""
        later = range(first + 1, len(self.messages))
        return next((i for i in later if self.messages[i]["role"] == "user"), len(self.messages))

    def _ask(self, messages: list[Message]) -> tuple[Asked, Prompt]:
        from paceline.chat.options import asked_of

        chats = self._llm.chats
        asked = asked_of(chats, messages, {})
        return asked, chats.prompt(asked)

    def _rendered(self, first: int, question: Message) -> tuple[Asked, Prompt]:
        asked, prompt = self._ask([*_system(self.system), *self.messages[first:], question])
        ids = None if prompt.media else self._goes_on(prompt.text)
        return asked, prompt if ids is None else replace(prompt, ids=ids)

    def _goes_on(self, text: str) -> list[int] | None:
        """Ids of a prompt that begins with what the model has seen: its own tokens, which the prefix cache holds.

        Written anew, the same text could be cut into other tokens. The rest begins at a special token, where a text may
        be cut in two. None where the template shows earlier turns in another way.
        """
        seen, ids = self._seen
        if not seen or not text.startswith(seen):
            return None
        tokenizer, rest = self._llm.tokenizer, text[len(seen) :]
        special = tokenizer.special_ids
        if ids[-1] in special:
            more = tokenizer.encode(
                tokenizer.decode(ids[-1:], skip_special=False, begins=False) + rest, add_bos=False
            )
            return [*ids, *more[1:]] if more[:1] == ids[-1:] else None
        more = tokenizer.encode(rest, add_bos=False)
        return [*ids, *more] if more and more[0] in special else None


def _system(system: str | None) -> list[Message]:
    return [] if not system else [{"role": "system", "content": system}]


def checked(messages: object) -> list[Message] | None:
    """Messages as a saved conversation has them, None for anything else."""
    if not isinstance(messages, list):
        return None
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            return None
        if not isinstance(message.get("content"), str) and not _parts(message.get("content")):
            return None
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _parts(content: object) -> bool:
    """Texts, and files as data URLs: a saved conversation names no path."""
    if not isinstance(content, list) or not content:
        return False
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "image", "audio") else None
        if not isinstance(value, str) or (kind != "text" and not value.startswith("data:")):
            return False
    return True
