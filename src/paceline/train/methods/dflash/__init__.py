"""DFlash: a block of tokens drafted in one forward, beside hidden states of some layers of any target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.checkpoints.loading import Tensors
from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import PairError, UsageError
from paceline.models.config import read_config
from paceline.models.drafters.dflash import KIND, TAPS, dflash_shapes, parse_dflash
from paceline.models.drafters.speculators import parse_layers
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.ops.reference import dequantize
from paceline.train.capture import TargetTeacher
from paceline.train.methods.base import CardText, Exported, Init, Start
from paceline.train.methods.dflash.module import DFlashModule
from paceline.train.methods.eagle3.vocabulary import choose
from paceline.train.methods.speculators import (
    TappingMethod,
    default_taps,
    finished_config,
    fresh_parameters,
    layer_config,
    speculators_config,
)
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows

VOCABULARY, LAYERS, BLOCK = 8192, 2, 4


@dataclass(frozen=True, slots=True)
class DFlash(TappingMethod):
    """`vocabulary`, `taps`, `shared`: as `Eagle3`. `block`: rows of a draft, the text's last token included."""

    vocabulary: int | None = None
    taps: tuple[int, ...] | None = None
    layers: int = LAYERS
    block: int = BLOCK
    shared: bool = False

    name: ClassVar[str] = KIND
    card_text: ClassVar[CardText] = CardText(
        "DFlash drafter", "speculative-decoding, dflash",
        "It has the layout of `speculators`, which vLLM reads: compared with their source, not loaded there.",
    )  # fmt: skip

    @staticmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        return raw.get("speculators_model_type") == KIND

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 2:
            raise UsageError(f"--draft-vocabulary {self.vocabulary} is not possible: give at least 2 tokens")
        if not 2 <= self.block <= MAX_DRAFT_TOKENS + 1 or self.layers < 1:
            raise UsageError(
                f"a block of {self.block} rows in {self.layers} layers is not possible: give --draft-tokens from 1 to "
                f"{MAX_DRAFT_TOKENS} and --layers from 1"
            )

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        if isinstance(init, Mapping) or init == "scratch":
            start = self._fresh(teacher, train, init if isinstance(init, Mapping) else None, seed)
        else:
            if replace(self, block=BLOCK) != type(self)():
                raise UsageError(
                    "draft vocabulary, taps, layers and head are those of --init: leave them out"
                )
            start = self.load(Path(str(init)), teacher)
        assert isinstance(start.module, DFlashModule), "both make one"
        teacher.target.tap(start.module.taps)
        start.module.to(teacher.device)
        return start

    def _fresh(
        self, teacher: TargetTeacher, train: Windows, given: Mapping[str, Any] | None, seed: int
    ) -> Start:
        target = teacher.target
        size = min(self.vocabulary or VOCABULARY, target.vocab_size)
        raw = dict(given) if given else self._config(target, size)
        if layer_width(raw) != target.hidden_size:
            raise PairError(f"a new drafter is as wide as its target: {target.hidden_size}")
        size, ids = int(raw["draft_vocab_size"]), None
        if size < target.vocab_size:
            ids = choose(train, size, target.vocab_size, target.eos_token_ids)
        head = teacher.narrow(ids)
        module = self.module(raw, ids, head if self.shared else None, target)
        fresh_parameters(module, seed)
        self.begin(module)
        with torch.no_grad():
            module.norm.weight.copy_(target.norm.float())  # the target's head reads what this norm gives
            if not self.shared:
                module.lm_head.weight.copy_(head)
        stored = target.embedding.data.dtype
        return Start(module, raw, stored if stored.is_floating_point else torch.bfloat16, True)

    def module(
        self, raw: Mapping[str, Any], ids: torch.Tensor | None, head: torch.Tensor | None, target: GraphTarget
    ) -> DFlashModule:
        """What a config.json describes."""
        config = parse_dflash(raw)
        return DFlashModule(config, ids, head, mask_row(target, config.mask, target.embedding_scale))

    def begin(self, module: DraftModule) -> None:
        """Change what fresh parameters are drawn as."""

    def load(self, folder: Path, teacher: TargetTeacher) -> Start:
        """A drafter's folder as a module in float32. Raises PairError and LoadError."""
        return _load(folder, teacher)

    def _config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        """config.json of a new drafter. The mask is a token that never is a text's last one: the one that ends it."""
        return {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": KIND, "speculators_version": "0.9.0",
            "block_size": self.block, "mask_token_id": min(target.eos_token_ids, default=0),
            TAPS: list(self.taps or default_taps(target.layer_count)), "draft_vocab_size": size,
            "target_hidden_size": target.hidden_size, "tie_word_embeddings": False,
            "transformer_layer_config": layer_config(target) | {"num_hidden_layers": self.layers},
            "speculators_config": speculators_config(target, KIND),
        }  # fmt: skip

    def describe(self, module: DraftModule) -> str:
        assert isinstance(module, DFlashModule), "it trains these only"
        return (
            f"blocks of {module.config.block}, {len(module.layers)} layers, reads after layers "
            f"{', '.join(map(str, module.taps))}, drafts {len(module.head):,} of {module.vocab:,} tokens, head "
            f"{'of its own' if module.shared_head is None else 'of the target'}"
        )

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        assert isinstance(module, DFlashModule), "it trains these only"
        tensors = dict(module.state_dict())
        if module.ids is not None:
            mask = torch.zeros(module.vocab, dtype=torch.bool, device=module.ids.device)
            tensors["t2d"] = mask.index_fill_(0, module.ids, True)
        return tensors, {"config.json": finished_config(exported)}


def layer_width(raw: Mapping[str, Any]) -> int:
    return parse_layers(raw, KIND, raw).hidden_size


def mask_row(target: GraphTarget, mask: int, scale: float) -> torch.Tensor:
    """The target's embedding of a token, as a block reads it."""
    row = dequantize(target.embedding, torch.tensor([mask], device=target.device), torch.float32)
    return row[0] * scale


def _load(folder: Path, teacher: TargetTeacher) -> Start:
    """A drafter's folder as a module in float32. Raises PairError and LoadError."""
    raw, target = read_config(folder), teacher.target
    if not DFlash.reads(raw):
        raise PairError(f"{folder} is no DFlash drafter in speculators format: give one, or --init scratch")
    config = parse_dflash(raw)
    ids = load_network(folder, target).ids  # which checks the rest
    if any(config.windows):
        raise PairError(
            f"{folder} has layers with a sliding window, which are not trained: use --init scratch"
        )
    found = Tensors(folder, dflash_shapes(config, folder))
    if found.scales or "embed_tokens.weight" in found.entries or config.layers.biases:
        raise PairError(
            f"{folder} is quantized, or has a table or biases of its own, which are not trained: use --init scratch"
        )
    tensors = {name: found.take(name) for name in [*found.entries] if name not in ("d2t", "t2d")}
    head = teacher.narrow(ids)
    row = mask_row(target, config.mask, target.embedding_scale)
    module = DFlashModule(config, ids, None if "lm_head.weight" in tensors else head, row)
    known = {n: t for n, t in module.state_dict().items() if n == "d2t"}
    module.load_state_dict({n: t.float() for n, t in tensors.items()} | known)
    return Start(module, raw, tensors["fc.weight"].dtype, False)


__all__ = ["DFlash"]
