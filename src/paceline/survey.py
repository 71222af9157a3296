"""What is looked at before any weight is loaded: configs, headers of weights, tokenizer, template, drafter."""

from __future__ import annotations

import filecmp
from pathlib import Path

from paceline.checkpoints.defaults import read_defaults
from paceline.errors import PacelineError, PairError
from paceline.models.drafters.networks import kind_of
from paceline.models.inspection import check
from paceline.text.chat import ChatTemplate
from paceline.text.formats.choose import format_of
from paceline.text.tokenizer import Tokenizer

SAME_VOCABULARY = 0.99  # of the tokens: fine-tunes rename a few special ones


def check_models(target: Path, drafter: Path | None) -> None:
    """Raise LoadError if target, drafter or the two together would be refused once their weights are loaded."""
    check(target)
    if drafter is not None:
        made_for_it = kind_of(drafter, target) is not None
        check(drafter, target=target if made_for_it else None)
        if not made_for_it and not same_vocabulary(drafter, target):
            check_spelling(drafter, target)


def same_vocabulary(draft: Path, target: Path) -> bool:
    """Whether a draft model's tokens are the target's. Padding and tokens of only one do not count.

    A model without a tokenizer of its own is taken as it is: wrong drafts cost time and change no text.
    """
    mine, theirs = (path / "tokenizer.json" for path in (draft, target))
    if mine.is_file() and theirs.is_file() and filecmp.cmp(mine, theirs, shallow=False):
        return True
    entries, other = Tokenizer.entries(draft), Tokenizer.entries(target)
    if entries is None or other is None:
        return True
    equal = sum(other.get(token) == i for token, i in entries.items())
    return equal >= SAME_VOCABULARY * min(len(entries), len(other))


def check_spelling(draft: Path, target: Path) -> None:
    """Raise PairError unless a draft model can draft for a target of another vocabulary, by the text."""
    for folder in (draft, target):
        if not Tokenizer.load(folder).splits:
            raise PairError(
                f"{draft} has another vocabulary than {target}, and the tokenizer of {folder} cannot encode a text in "
                "pieces, so it cannot draft by the text either: give a smaller model of the target's own family, or the "
                "drafter ngram"
            )


def why_not_together(target: Path, assistant: Path) -> str | None:
    """Why an assistant that was found, not asked for, cannot draft for `target`; None if it can."""
    try:
        check(assistant, target=target)
    except PacelineError as error:
        return str(error)
    return None


def other_vocabulary(tokens: int, rows: int) -> str | None:
    """One line where a tokenizer seems to be of another model than one with `rows` embeddings; None where it fits.

    Models are padded, and fine-tunes add tokens: a few more or fewer are no fault.
    """
    if SAME_VOCABULARY * tokens <= rows and tokens >= rows / 2:
        return None
    return (
        f"{tokens:,} tokens for a model of {rows:,}: this tokenizer seems to be another model's, take the one from its "
        "repository"
    )


def describe_sampling(folder: Path) -> tuple[dict[str, str], list[str]]:
    """({"sampling": what its makers suggest} if they do, what is wrong with it). Raises nothing of ours."""
    try:
        given = read_defaults(folder).given()
    except PacelineError as error:
        return {}, [str(error)]
    words = ", ".join(f"{name} {value:g}" for name, value in given.items())
    return ({"sampling": f"{words}, where a request says nothing else"} if words else {}), []


def describe_text(folder: Path, rows: int = 0) -> tuple[dict[str, str], list[str]]:
    """({part: what it is} of tokenizer and chat template, what is wrong with them). Raises nothing of ours.

    `rows`: of the model's vocabulary, where they are known.
    """
    try:
        tokenizer = Tokenizer.load(folder)
    except PacelineError as error:
        return {"tokenizer": "unusable"}, [str(error)]
    other = other_vocabulary(tokenizer.vocab_size, rows) if rows else None
    facts = {"tokenizer": other or f"{tokenizer.vocab_size:,} tokens"}
    if tokenizer.template is None:
        return facts | {"template": "none: this model takes prompts, not chats"}, []
    try:
        ChatTemplate.of(tokenizer)
    except PacelineError as error:
        return facts | {"template": "unusable"}, [str(error)]
    return facts | {
        "template": f"{len(tokenizer.template):,} characters, {format_of(tokenizer).described}"
    }, []
