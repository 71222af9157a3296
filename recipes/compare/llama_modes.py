"""The modes of llama-server that are compared, and what each is started with."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError

CONTEXT = 1024  # tokens, ours and theirs
Weights = Literal["f32", "bf16"]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run llama-server."""

    name: str
    weights: Weights = "f32"
    drafter: Literal["none", "assistant", "draft"] = "none"
    flags: tuple[str, ...] = ()


# Equal precision: float32 weights (exactly ours), cache and activations. Flash attention is off because over a
# float32 cache it halved the speed of llama.cpp 0.5.0 here.
F32 = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
F32_DRAFTED = (*F32, "-ctkd", "f32", "-ctvd", "f32")


def mtp(tokens: int) -> tuple[str, ...]:
    return ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(tokens))


def ngram(key: int, tokens: int, before: str = "") -> tuple[str, ...]:
    """The simple n-gram drafter; its defaults (12, 48) never found anything in these texts."""
    sizes = ("--spec-ngram-simple-size-n", str(key), "--spec-ngram-simple-size-m", str(tokens))
    return ("--spec-type", before + "ngram-simple", *sizes)


MODES = (
    Mode("f32 plain", flags=F32),
    Mode("f32 mtp 2", drafter="assistant", flags=(*F32_DRAFTED, *mtp(2))),
    Mode("f32 mtp 3", drafter="assistant", flags=(*F32_DRAFTED, *mtp(3))),
    Mode(
        "f32 model 2",
        drafter="draft",
        flags=(*F32_DRAFTED, "--spec-type", "draft-simple", "--spec-draft-n-max", "2"),
    ),
    Mode("f32 ngram 3/4", flags=(*F32, *ngram(3, 4))),
    Mode("f32 ngram 4/8", flags=(*F32, *ngram(4, 8))),
    # Less precise and faster: bfloat16 products, float16 cache, the defaults of llama-server otherwise.
    Mode("bf16 plain", "bf16"),
    Mode("bf16 mtp 2", "bf16", "assistant", mtp(2)),
    Mode("bf16 mtp 3", "bf16", "assistant", mtp(3)),
    Mode("bf16 ngram 3/4", "bf16", flags=ngram(3, 4)),
    Mode("bf16 ngram 4/8", "bf16", flags=ngram(4, 8)),
    Mode(
        "bf16 mtp 2 + ngram 4/8", "bf16", "assistant", (*ngram(4, 8, "draft-mtp,"), "--spec-draft-n-max", "2")
    ),
)


def chosen(only: Iterable[str] | None) -> list[Mode]:
    """The modes named, or all. Raises UsageError for a name that is none."""
    names = [mode.name for mode in MODES]
    wanted = list(only or names)
    for name in wanted:
        if name not in names:
            raise UsageError(f"no mode {name!r}: use one or more of {', '.join(names)}")
    return [mode for mode in MODES if mode.name in wanted]


def files_needed(modes: Seq[Mode]) -> list[tuple[str, Weights]]:
    """(folder of the demo, weights) of every GGUF that `modes` load."""
    targets = {("target", mode.weights) for mode in modes}
    return sorted(targets | {(mode.drafter, mode.weights) for mode in modes if mode.drafter != "none"})


def file_name(folder: str, weights: Weights) -> str:
    return f"{folder}-{weights}.gguf"


def command_flags(mode: Mode, files: Path, threads: int) -> list[str]:
    """What llama-server is started with for `mode`: one slot, nothing kept between requests."""
    count = str(threads)
    flags = ["-m", str(files / file_name("target", mode.weights)), "-c", str(CONTEXT), "-np", "1"]
    flags += ["-t", count, "-tb", count, "--cache-ram", "0", "--ctx-checkpoints", "0", "--no-ui", "--offline"]
    if mode.drafter != "none":
        flags += ["-md", str(files / file_name(mode.drafter, mode.weights)), "-td", count, "-tbd", count]
    return flags + list(mode.flags)


def find_binary(asked: Path | None, llama_cpp: Path) -> Path:
    """The llama-server to run. Raises UsageError that says where the build is explained."""
    on_path = shutil.which("llama-server")
    places = (
        [asked] if asked else [llama_cpp / "build/bin/llama-server", *([Path(on_path)] if on_path else [])]
    )
    for place in places:
        if place.is_file():
            return place
    raise UsageError(
        f"no llama-server at {places[0]}: build it as `against_llama.py --help` says, or name one with --server"
    )
