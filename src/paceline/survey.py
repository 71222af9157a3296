"""What is looked at before any weight is loaded: configs, headers of weights, tokenizer, template, drafter."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.config import read_config
from paceline.models.defaults import read_defaults
from paceline.models.foreign import drafter_kind
from paceline.models.inspection import check
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer


def check_models(target: Path, drafter: Path | None) -> None:
    """Raise LoadError if target, drafter or the two together would be refused once their weights are loaded."""
    check(target)
    if drafter is not None:
        check(drafter, target=target if drafter_kind(read_config(drafter)) else None)


def why_not_together(target: Path, assistant: Path) -> str | None:
    """Why an assistant that was found, not asked for, cannot draft for `target`; None if it can."""
    try:
        check(assistant, target=target)
    except PacelineError as error:
        return str(error)
    return None


def describe_sampling(folder: Path) -> tuple[dict[str, str], list[str]]:
    """({"sampling": what its makers suggest} if they do, what is wrong with it). Raises nothing of ours."""
    try:
        found = read_defaults(folder).given()
    except PacelineError as error:
        return {}, [str(error)]
    said = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return ({"sampling": f"{said}, where a request says nothing else"} if said else {}), []


def describe_text(folder: Path) -> tuple[dict[str, str], list[str]]:
    """({part: what it is} of tokenizer and chat template, what is wrong with them). Raises nothing of ours."""
    try:
        tokenizer = Tokenizer.load(folder)
    except PacelineError as error:
        return {"tokenizer": "unusable"}, [str(error)]
    facts = {"tokenizer": f"{tokenizer.vocab_size:,} tokens"}
    if tokenizer.template is None:
        return facts | {"template": "none: this model takes prompts, not chats"}, []
    try:
        ChatTemplate.of(tokenizer)
    except PacelineError as error:
        return facts | {"template": "unusable"}, [str(error)]
    return facts | {"template": f"{len(tokenizer.template):,} characters"}, []
