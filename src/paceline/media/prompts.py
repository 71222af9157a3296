"""A conversation that may hold media, before its template renders it and after.

No torch comes with it: a server reads requests before its model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.errors import PromptError
from paceline.media.sources import of_client
from paceline.media.talk import Talk, hidden, taken
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.media.reader import MediaReader


def opened(messages: Seq[Mapping[str, Any]], reader: MediaReader | None, *, served: bool = False) -> Talk:
    """A conversation ready to be rendered. Raises PromptError for media that nothing here reads.

    `served`: it comes from a client, for whom no file is opened.
    """
    plain, items = taken(messages)
    if reader is None:
        if items:
            raise PromptError(f"{items[0].where}: this model reads text only")
        return Talk(plain)
    talk = hidden(plain, reader.placeholders)
    for item in items:
        if (why := reader.why_not(item.kind)) is not None:
            raise PromptError(f"{item.where}: {why}")
    talk.items = (
        [replace(item, source=of_client(item.source, item.where)) for item in items] if served else items
    )
    return talk


def prompt_of(
    text: str, talk: Talk, tokenizer: Tokenizer, reader: MediaReader | None, salt: str = "", *,
    add_bos: bool | None = False,
) -> list[int]:  # fmt: skip
    """Ids of the rendered text, with soft tokens where the conversation has media. Raises PromptError."""
    if reader is None or not (talk.items or talk.marks):
        return tokenizer.encode(text, add_bos=add_bos)
    return reader.prompt(text, talk, salt, add_bos=add_bos)
