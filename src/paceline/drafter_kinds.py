"""The kinds of drafters that are made for one target: the one list of them, as data.

What a kind computes stands in `models/drafters/NAME.py`, and how a method trains it in `train/methods/NAME.py`. All else,
what a config is, what is looked for beside a target, what commands offer and messages advise, asks this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# keys that say that a draft is made side by side; of P-EAGLE in vLLM's layout
PARALLEL_KEYS = ("mask_token_id", "pard_token", "ptd_token_id", "parallel_drafting")
_TABLE = ("draft_vocabulary", "taps", "shared_head")


@dataclass(frozen=True, slots=True)
class Training:
    """A method of `paceline train`. Its module is that of its name, with `_` for `-`."""

    name: str
    options: tuple[str, ...] = ()  # of the command, which not all methods have
    usual_for: str | None = (
        None  # targets whose model_type begins so, unless another is asked for; "": all others
    )


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """One kind. Its network's module is that of its name."""

    name: str
    what: str  # in messages
    word: str | None  # a config is one that names itself by a word with this in it, and with no longer one
    named: bool = False  # only a config whose `speculators_model_type` is its very name is one
    types: tuple[str, ...] = ()  # of which `model_type` makes it one, too
    implied: tuple[str, str] | None = None  # a word that makes it one beside a key
    relative_of: str | None = None  # whose word its configs may have beside its own
    side_by_side: str | None = None  # the kind that it is with one of PARALLEL_KEYS
    tensors: tuple[str, ...] = ()  # beginnings of their names where a target's own files hold it
    files: tuple[str, ...] = ()  # words in the name of a GGUF file of it that lies beside a target
    beside: bool = (
        True  # it is looked for in a folder of its name inside a target, or of the target's name and it
    )
    gguf: str = ""  # its architecture in GGUF files, if they have one of its own
    branches: str | None = None  # it can draft trees; in which case
    trained: tuple[Training, ...] = ()


MTP = DrafterKind(
    "mtp", "a multi-token-prediction (MTP) head", "mtp", named=True, types=ASSISTANT_TYPES, tensors=("mtp.",),
    files=("assistant", "mtp"), beside=False, branches="with one module",
    trained=(Training("gemma-assistant", ("head", "clusters", "recall"), usual_for="gemma4"), Training("mtp")),
)  # fmt: skip
EAGLE3 = DrafterKind(
    "eagle3", "an EAGLE-3 head", "eagle3", implied=("eagle", "draft_vocab_size"), side_by_side="peagle", gguf="eagle3",
    branches="", trained=(Training("eagle3", (*_TABLE, "flags"), usual_for=""),),
)  # fmt: skip
DFLASH = DrafterKind(
    "dflash", "a DFlash drafter", "dflash", gguf="dflash", trained=(Training("dflash", (*_TABLE, "layers")),)
)
DSPARK = DrafterKind(
    "dspark",
    "a DSpark drafter",
    "dspark",
    relative_of="dflash",
    trained=(Training("dspark", (*_TABLE, "layers")),),
)
KINDS: Mapping[str, DrafterKind] = {
    kind.name: kind
    for kind in (
        MTP,
        EAGLE3,
        DrafterKind("peagle", "a P-EAGLE head", "peagle", relative_of="eagle3"),
        DFLASH,
        DrafterKind(
            "dflash2",
            "a DFlash 2 drafter",
            "dflash2",
            relative_of="dflash",
            trained=(Training("dflash2", ("taps", "layers")),),
        ),
        DSPARK,
        DrafterKind("heads", "a set of parallel heads", None, tensors=("extra_heads.",), beside=False),
    )
}
TRAININGS: Mapping[str, Training] = {
    training.name: training
    for training in sorted(
        (training for kind in KINDS.values() for training in kind.trained),
        key=lambda training: -len(training.usual_for or ""),
    )
}


def usual_training(model_type: str) -> str:
    """The method by which a target gets a drafter where none is named."""
    fitting = [
        t for t in TRAININGS.values() if t.usual_for is not None and model_type.startswith(t.usual_for)
    ]
    return max(fitting, key=lambda training: len(training.usual_for or "")).name


def trained_with(option: str) -> str:
    """The methods that have an option, as helps name them."""
    return ", ".join(training.name for training in TRAININGS.values() if option in training.options)


def branching() -> str:
    """The kinds that can draft trees, as messages name them."""
    having = [kind for kind in KINDS.values() if kind.branches is not None]
    return ", ".join(f"{kind.name} {kind.branches}".strip() for kind in having)


def file_word(kind: str) -> str:
    """What a file that is written beside a target has in its name if it holds a drafter of a kind, or a draft model."""
    words = KINDS[kind].files if kind in KINDS else ()
    return words[0] if words else "draft"


def kind_of_config(raw: Mapping[str, Any]) -> DrafterKind | None:
    """The kind that says by its own name or type which one it is, in config.json."""
    name, of = raw.get("speculators_model_type"), raw.get("model_type")
    return next(
        (kind for kind in KINDS.values() if of in kind.types or (kind.named and name == kind.name)), None
    )
