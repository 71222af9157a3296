"""What drafters in the format of `speculators` have in common. Source of truth: speculators 0.9.0, config.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from paceline.capacity import make_cache
from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.drafters.registry import over
from paceline.errors import PairError, UsageError
from paceline.models.config import parse_target, read_config
from paceline.models.families.gemma4.config import GemmaConfig
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.methods.base import TORCH_NAMES, Exported, Init, Start
from paceline.train.networks import HEAD, Described, NetworkModule, fresh_parameters
from paceline.train.parallel import DraftModule
from paceline.train.windows import Windows

if TYPE_CHECKING:
    from paceline.train.loop import Hooks, Run

VOCABULARY = 8192  # tokens that a new drafter drafts, unless it is said
CACHE_SHARE = 0.1  # of what is free, for the drafter's own K/V in a comparison


def default_taps(layers: int) -> tuple[int, ...]:
    """Where EAGLE-3 reads; in a target of few layers three around its middle."""
    taps = (2, layers // 2, layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (layers // 2 - 1, layers // 2, layers // 2 + 1)


class SpeculatorsMethod(ABC):
    """What methods share whose drafter reads hidden states of the target; see `base.Method`."""

    name: ClassVar[str]
    copies: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"draft_tokens": 3, "batch": 4, "optimizer": "muon", "lr": 0.02}
    )
    title: ClassVar[str]  # of the kind of drafter, in messages
    norm: ClassVar[str] = "norm.weight"  # what the head reads was multiplied with it
    head: ClassVar[str] = HEAD

    @abstractmethod
    def config(self, target: GraphTarget, size: int) -> dict[str, Any]:
        """config.json of a new drafter of `size` tokens."""

    @abstractmethod
    def module(self, described: Described, shared: Mapping[str, torch.Tensor]) -> NetworkModule:
        """What learns."""

    @abstractmethod
    def describe(self, module: DraftModule) -> str:
        """As `base.Method`."""

    @staticmethod
    @abstractmethod
    def reads(raw: Mapping[str, Any]) -> bool:
        """As `base.Method`."""

    def size(self, target: GraphTarget) -> int:
        """Tokens that a new drafter drafts."""
        return target.vocab_size

    @property
    def shares_head(self) -> bool:
        """Whether a new one's head is the target's own rows, which its file then lacks."""
        return True

    def begin(self, module: NetworkModule) -> None:
        """Change what fresh parameters are drawn as."""
        return

    def check_options(self) -> None:
        """Raise UsageError for options that a drafter to go on from has set."""
        return

    def check_init(self, raw: Mapping[str, Any], folder: Path) -> None:
        """Raise PairError for a drafter that is not trained."""
        return

    def stored_name(self, name: str) -> str:
        """What the format calls a tensor of the network."""
        return name

    def start(self, teacher: TargetTeacher, train: Windows, init: Init, seed: int) -> Start:
        if isinstance(init, Mapping) or init == "scratch":
            start = self._fresh(teacher, train, init if isinstance(init, Mapping) else None, seed)
        else:
            start = self._load(Path(init), teacher)
        assert isinstance(start.module, NetworkModule), "it makes these only"
        teacher.target.tap(start.module.taps)
        return start

    def _fresh(
        self, teacher: TargetTeacher, train: Windows, given: Mapping[str, Any] | None, seed: int
    ) -> Start:
        target = teacher.target
        raw = dict(given) if given else self.config(target, self.size(target))
        size, ids = int(raw.get("draft_vocab_size") or target.vocab_size), None
        if size < target.vocab_size:
            ids = choose(train, size, target.vocab_size, target.eos_token_ids)
        head = {self.head: teacher.narrow(ids)}
        own = {} if ids is None else {"d2t": ids - torch.arange(len(ids))}
        described = Described.fresh(raw, target, own if self.shares_head else own | head)
        if (width := described.network.layers.hidden_size) != target.hidden_size:
            raise PairError(
                f"a new drafter as wide as {width} would need a head and an embedding of its own: make it as wide as the "
                f"target, {target.hidden_size}"
            )
        module = self.module(described, head if self.shares_head else {})
        fresh_parameters(module, seed)
        self.begin(module)
        with torch.no_grad():
            module.named(self.norm).copy_(target.norm.float())  # the target's head reads what this norm gives
            if not self.shares_head:
                module.head_rows.copy_(head[self.head])
        return Start(module, raw, described.dtype, True)

    def _load(self, folder: Path, teacher: TargetTeacher) -> Start:
        """A drafter's folder as a module in float32. Raises LoadError."""
        self.check_options()
        raw = read_config(folder)
        if not self.reads(raw) or "speculators_model_type" not in raw:
            raise PairError(
                f"{folder} is no {self.title} drafter in speculators format: give one, or --init scratch"
            )
        self.check_init(raw, folder)
        described = Described.loaded(folder, raw, teacher.target)
        head = teacher.narrow(described.ids)
        module = self.module(described, {} if self.head in described.tensors else {self.head: head})
        return Start(module, raw, described.dtype, False)

    def files(
        self, module: DraftModule, exported: Exported
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        """As `base.Method`. `d2t` holds what is added to a row's number, `t2d` marks what is drafted."""
        tensors = {self.stored_name(name): tensor for name, tensor in module.state_dict().items()}
        if module.ids is not None:
            mask = torch.zeros(module.vocab, dtype=torch.bool, device=module.ids.device)
            tensors["t2d"] = mask.index_fill_(0, module.ids, True)
        return tensors, {"config.json": finished_config(exported)}

    def last_batches(self, module: DraftModule) -> int:
        return 0

    def finish(self, run: Run, hooks: Hooks) -> tuple[DraftModule, str]:
        return run.module, self.describe(run.module)

    def drafter(self, name: str, folder: Path, target: GraphTarget) -> Callable[[EngineConfig], Drafter]:
        net = load_network(folder, target)

        def make(config: EngineConfig) -> Drafter:
            return over(name, net, make_cache(net, replace(config, max_model_len=None), CACHE_SHARE))

        return make


class TappingMethod(SpeculatorsMethod):
    """One whose drafter reads hidden states of some layers of the target, and may draft some of its tokens only."""

    taps: tuple[int, ...] | None
    vocabulary: int | None
    shared: bool

    def size(self, target: GraphTarget) -> int:
        return min(self.vocabulary or VOCABULARY, target.vocab_size)

    @property
    def shares_head(self) -> bool:
        return self.shared

    def check(self, target: Path) -> None:
        layers = parse_target(read_config(target)).layer_count
        taps = self.taps or default_taps(layers)
        if taps[0] < 0 or taps[-1] > layers or any(a >= b for a, b in pairwise(taps)):
            raise PairError(
                f"hidden states after layers {list(taps)} cannot be read of {target}, which has {layers} layers: give "
                f"--taps that rise from 0 to {layers}"
            )

    def teacher(self, target: Path, device: str = "cpu") -> TargetTeacher:
        self.check(target)
        return TargetTeacher(load_frozen(target, device))


def given_taps(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The option `taps` of the command as numbers. Raises UsageError."""
    if "taps" not in given:
        return None
    try:
        return tuple(int(tap) for tap in given["taps"].split(","))
    except ValueError as error:
        raise UsageError(f"--taps {given['taps']} is no list of layers: give three like 2,15,27") from error


def check_vocabulary(size: int | None) -> None:
    """Raise UsageError for a draft vocabulary that cannot be."""
    if size is not None and size < 2:
        raise UsageError(f"--draft-vocabulary {size} is not possible: give at least 2 tokens")


def reading(module: NetworkModule) -> str:
    """Of what it reads and drafts, in a few words."""
    return (
        f"reads after layers {', '.join(map(str, module.taps))}, drafts {len(module.head_rows):,} of {module.vocab:,} "
        f"tokens, head {'of the target' if module.shares_head else 'of its own'}"
    )


def choose(train: Windows, size: int, vocab: int, always: Iterable[int]) -> torch.Tensor:
    """The `size` tokens [size] that are counted most often in `train`, and those of `always`, rising.

    Where fewer were written, the rest is filled up from the lowest ids: tokenizers number by frequency.
    """
    often = np.bincount(train.tokens[train.counted], minlength=vocab).astype(np.int64)
    often[list(always)] = often.sum() + 1
    return torch.from_numpy(np.sort(np.argsort(-often, kind="stable")[:size]))


def speculators_config(target: GraphTarget, algorithm: str) -> dict[str, Any]:
    """What the drafter was made for; how it proposes is said when it is finished."""
    architectures = read_config(target.path).get("architectures") or []
    return {
        "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [],
        "verifier": {"name_or_path": target.path.name, "architectures": architectures},
    }  # fmt: skip


def finished_config(exported: Exported) -> dict[str, Any]:
    """config.json of the finished drafter."""
    method = {
        "proposal_type": "greedy", "speculative_tokens": exported.draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    about = dict(exported.config.get("speculators_config") or {}) | {"proposal_methods": [method]}
    return dict(exported.config) | {"dtype": TORCH_NAMES[exported.dtype], "speculators_config": about}


def layer_config(target: GraphTarget) -> dict[str, Any]:
    """A Llama layer of the target's own widths."""
    config = parse_target(read_config(target.path))
    if isinstance(config, DecoderConfig):
        rotary = config.rotary
        rope: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": rotary.kind}
        if rotary.kind != "default":
            rope["factor"] = rotary.factor
        if rotary.kind in ("llama3", "yarn"):
            rope["original_max_position_embeddings"] = int(rotary.original)
        if rotary.kind == "llama3":
            rope |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
        if rotary.kind == "yarn":
            rope |= {"beta_slow": rotary.low, "beta_fast": rotary.high, "attention_factor": rotary.attention}
        sizes = config.heads, config.kv_heads, config.head_dim, config.intermediate_size
    else:
        assert isinstance(config, GemmaConfig)
        first, rope = config.layers[0], {"rope_theta": 10_000.0, "rope_type": "default"}
        sizes = config.heads, first.kv_heads, first.head_dim, first.intermediate_size
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return dict(zip(names, sizes, strict=True)) | {
        "model_type": "llama", "hidden_size": target.hidden_size, "num_hidden_layers": 1,
        "vocab_size": target.vocab_size, "rms_norm_eps": config.eps, "rope_parameters": rope,
        "max_position_embeddings": target.max_len, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
