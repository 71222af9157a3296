"""Options that several commands share, and how they become an `EngineConfig`."""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from paceline.core import MAX_DRAFT_TOKENS, SamplingParams, VerifyRule
from paceline.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
RULES = get_args(VerifyRule)


class DraftTokens(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    name = f"0..{MAX_DRAFT_TOKENS}|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto":
            return value
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number <= MAX_DRAFT_TOKENS:
            self.fail(f"{value!r} is neither a number from 0 to {MAX_DRAFT_TOKENS} nor auto")
        return number


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 800M or 2G."""

    name = "size"
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}  # noqa: RUF012  a constant

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).upper().removesuffix("B").removesuffix("I")
        unit = text[-1:] if text[-1:] in "KMG" else ""
        try:
            size = int(float(text.removesuffix(unit)) * self.units[unit])
        except (ValueError, OverflowError):
            size = 0
        if not 0 < size < 2**62:
            self.fail(f"{value!r} is no size: write for instance 800M or 2G")
        return size


def profile_dir() -> str:
    """The user's cache folder for paceline, by the conventions of the platform."""
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return str(Path(os.environ.get("XDG_CACHE_HOME") or home) / "paceline")


def as_number(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """The number that was chosen among texts."""
    return None if value is None else int(value)


TARGET = [
    click.argument("target", required=False),
    click.option("--target", "named", metavar="TARGET", help="The same as the argument TARGET."),
]

ENGINE = [
    click.option("--drafter", default="auto", show_default=True, metavar="NAME",
                 help="auto, none, ngram, lookahead, mtp, mtp+ngram, eagle3, dflash, heads, model, or a drafter's "
                 "folder or hub id."),
    click.option("--draft-tokens", type=DraftTokens(), default="auto", show_default=True,
                 help="Tokens to draft per step; auto measures what pays on this machine."),
    click.option("--verify", type=click.Choice(RULES), default="match", show_default=True,
                 help="match: the very text of plain decoding. reject, block: equal in distribution. typical: LOSSY."),
    click.option("--draft-tree", metavar="DEPTHxWIDTH", help="Draft several continuations at once, for instance 4x2: "
                 "that many tokens one after the other and beside each other at most, --draft-tokens in all."),
    click.option("--adapter", multiple=True, metavar="DIR", help="A LoRA adapter (PEFT's layout; folder or hub id) to "
                 "merge into the target's weights at load; one."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps."),
    click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
                 show_default=True, help="Of the weights; auto keeps them as stored on CPU."),
    click.option("--activations", type=click.Choice(["auto", "float32"]), default="auto", show_default=True,
                 help="What weights are multiplied with on CPU; auto rounds it to bfloat16 for bfloat16 weights, where "
                 "the processor has twice the speed for that, and to 8 or 16 bits for int4 and blocks of GGUF files."),
    click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Quantize the target's weights at load."),
    click.option("--quantize-drafter", type=click.Choice(["int8", "int4", "none"]),
                 help="Quantize the drafter's. Left out, a drafter that reads hidden states is int8 on a CPU."),
    click.option("--chat-format", default="auto", show_default=True, metavar="NAME",
                 help="How the model writes thoughts and tool calls, a name of docs/families.md; auto: as its chat "
                 "template writes them."),
    click.option("--max-model-len", type=click.IntRange(min=1), help="Context in tokens (prompt and answer)."),
    click.option("--max-batch", type=click.IntRange(min=1), default=16, show_default=True,
                 help="Texts that are computed side by side."),
    click.option("--cache-memory", type=Bytes(), help="Memory for the K/V cache, e.g. 2G; default: a share."),
    click.option("--kv-cache", type=click.Choice(["auto", "int8"]), default="auto", show_default=True,
                 help="What keys and values are kept as on a CPU; int8: less memory, faster in long texts, not exact."),
    click.option("--media/--no-media", default=True, help="Read pictures and sound, where the model can."),
    click.option("--mmproj", metavar="FILE",
                 help="The file with a GGUF model's towers.  [default: the one beside it that fits]"),
    click.option("--image-tokens", type=click.Choice(["70", "140", "280", "560", "1120"]), callback=as_number,
                 help="Soft tokens of a picture at most: more see finer print, and take longer.  [default: the model's]"),
    click.option("--threads", type=click.IntRange(1, 256), help="CPU threads; default: one per core."),
    click.option("--tensor-parallel", type=click.IntRange(1, 64), default=1, show_default=True,
                 help="Processes that compute the target together, each with a share of its weights and K/V."),
    click.option("--native/--no-native", default=True, help="Use the compiled kernels where they are installed."),
    click.option("--profile-dir", default=profile_dir, envvar="PACELINE_PROFILE_DIR",
                 show_default="the user's cache",
                 help="Folder that keeps what start-up measured for the next start; none: keep nothing."),
    click.option("--remeasure", is_flag=True,
                 help="Measure again at start-up, the drafter's self-test too if nothing better is known."),
]  # fmt: skip

TYPICAL = [
    click.option("--typical-epsilon", type=float, help="Of --verify typical: keep drafts likelier than "
                 "this, ...  [default: 0.09]"),
    click.option("--typical-delta", type=float, help="... or than this times exp(-entropy).  [default: 0.3]"),
]  # fmt: skip

SAMPLING = [
    click.option("-n", "--max-tokens", type=int, help="Tokens to write at most.  [default: 128; a chat: what fits]"),
    click.option("-t", "--temperature", type=float, help="0 is greedy.  [default: the model's own, else 0]"),
    click.option("--top-k", type=int, help="Sample from the K most likely tokens; 0: off.  [default: the model's own]"),
    click.option("--top-p", type=float, help="Sample from the most likely tokens of mass P.  [default: the model's own]"),
    click.option("--min-p", type=float, help="Drop tokens below P times the most likely one."),
    click.option("--repetition-penalty", type=float, help="Above 1: avoid what prompt and answer hold."),
    click.option("--presence-penalty", type=float, help="Avoid what the answer holds."),
    click.option("--frequency-penalty", type=float, help="Avoid what the answer holds often."),
    click.option("--seed", type=int, help="Same seed, same text. Default: a fresh one, shown with --stats."),
    click.option("--stop", multiple=True, help="End the text before this string; may be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Write on after the model's end token."),
    *TYPICAL,
]  # fmt: skip

SAMPLING_NAMES = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "ignore_eos", "typical_epsilon", "typical_delta",
}  # fmt: skip


def apply(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    """All of `options` as one decorator."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine options, what is said of sampling) of a command's keyword arguments. Raises UsageError for bad values.

    What is not said is the model's own: see `LLM.params`.
    """
    said = {k: v for k, v in values.items() if k in SAMPLING_NAMES and v is not None and v != ()}
    SamplingParams(**said)  # bad values are refused before a model is loaded
    return {k: v for k, v in values.items() if k not in SAMPLING_NAMES}, said


def need_ray() -> None:
    """Raise UsageError where Ray is not installed. Nothing of how it is used is sent to its makers."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("ray is missing: install it with `pip install paceline[ray]`")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def one_target(argument: str | None, option: str | None, default: str | None = "demo") -> str:
    """The target, an argument or --target. Raises UsageError for both, and for neither without a default."""
    if argument is not None and option is not None:
        raise UsageError(f"the target is given twice, as {argument} and as --target {option}: give it once")
    target = next((given for given in (argument, option) if given is not None), default)
    if target is None:
        raise UsageError("no target is given: name a folder, a GGUF file or a hub id, first or with --target")
    return target


def read_text(path: str) -> str:
    """A prompt from a file, or from standard input for `-`."""
    try:
        with click.open_file(path, encoding="utf-8") as file:
            return str(file.read()).removeprefix("\ufeff")  # a byte order mark is no part of the text
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror}): give a file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: convert it first") from error


def json_line(record: dict[str, Any]) -> str:
    """JSON on one line; what standard output cannot write is escaped, where other text has a question mark."""
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    return json.dumps(record, ensure_ascii=encoding != "utf-8")


def sized(count: int) -> str:
    """Bytes as people read them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
