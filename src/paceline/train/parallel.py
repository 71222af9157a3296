"""All draft rounds of a window at once: what the frozen target says of it, where rounds begin, and what a drafter is.

With token t pending (the target has computed the rows up to t - 1) step i of a round reads the token t + i and predicts
token t + i + 1, so its distribution is compared with the target's at row t + i. This holds for every method; what a
step reads beside the token is the method's own. Nothing mixes two rounds, which is why all of them run side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(slots=True)
class Captured:
    """What the frozen target says of B windows of T tokens, each holding one or more texts side by side."""

    tokens: torch.Tensor  # [B, T] int64
    segments: torch.Tensor  # [B, T] int64, which text of the window; -1 = padding
    counted: torch.Tensor  # [B, T] bool, tokens that the target would write: only these are predicted
    positions: torch.Tensor  # [B, T] int64, from 0 in each text
    embeddings: torch.Tensor  # [B, T, H] scaled input embeddings
    hidden: torch.Tensor  # [B, T, H] after the final norm
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )  # kind -> K, V [B, kv_heads, T, head_dim], as cached; of drafters that read them
    states: torch.Tensor | None = None  # [B, T, taps * H] after the tapped layers; of drafters that read them


class DraftModule(nn.Module, ABC):
    """A trainable drafter. `unroll` gives states, `logits` scores them. Its parameters carry the names of the file."""

    vocab: int  # tokens of the target
    runs_otherwise = False  # `running_logits` are others than `logits`
    kind = ""  # what the parameters do not say of its arithmetic; a run goes on only with the same

    @property
    @abstractmethod
    def head(self) -> torch.Tensor:
        """[C, hidden], a row for each of `ids`."""

    @property
    def ids(self) -> torch.Tensor | None:
        """The tokens [C] that it can draft, rising; None: all."""
        return None

    @property
    def outside(self) -> list[torch.Tensor]:
        """Parameters that are no matrices of a layer, beside the head: tables, and what reads states alone."""
        return []

    def sureness(self, states: torch.Tensor) -> torch.Tensor | None:
        """Of states [M, hidden] the logit [M] of its own word that a token is kept; None: it has none."""
        return None

    def beside(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Of states [M, hidden] further ones that are to score well, too."""
        return []

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the head that score `tokens`, -1 for those that it cannot draft."""
        if self.ids is None:
            return tokens
        place = torch.full((self.vocab,), -1, device=tokens.device)
        place[self.ids] = torch.arange(len(self.ids), device=tokens.device)
        return place[tokens]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters that a loss reaches, by name."""
        return [(n, p) for n, p in self.named_parameters() if p.requires_grad]

    @abstractmethod
    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """States [B, A, hidden] of `steps` draft steps for anchors [B, A] (the window index t of the pending token).

        Anchors need t >= 1 with t - 1 in the same text, and t + steps - 1 < T; `valid_steps` says which steps count.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., C], float32."""
        return F.linear(states, self.head.to(states.dtype)).float()

    @torch.no_grad()
    def running_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, C] as it will run, -inf for what it would not look at."""
        return self.logits(states)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * (mean(x^2) + eps)^-1/2 * weight in float32, returned in x's dtype."""
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5) * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + d/2) of x [B, heads, A, d] by positions [B, A]."""
    angles = positions[:, None, :, None].float() * inv_freq  # [B, 1, A, d/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def seen_keys(captured: Captured, anchors: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """[B, 1, A, T]: which rows an anchor sees: those of its text up to t - 1, with `window` only from t - 1 - window."""
    index = torch.arange(captured.tokens.shape[1], device=anchors.device)  # [T]
    segment = captured.segments.gather(1, anchors)  # [B, A]
    distance = anchors[:, :, None] - 1 - index  # [B, A, T]
    seen = (distance >= 0) & (captured.segments[:, None, :] == segment[:, :, None])
    if window is not None:
        seen &= distance <= window
    # no key at all would make NaN; such anchors never count
    seen |= (distance == 0) & ~seen.any(-1, keepdim=True)
    return seen[:, None]


def choose_anchors(
    captured: Captured, steps: int, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """[B, A] window indices: all that `unroll` can run from (count 0), else `count` of them drawn evenly."""
    length = captured.tokens.shape[1]
    every = torch.arange(1, max(2, length - steps), device=captured.tokens.device)
    if not count or count >= len(every):
        return every.expand(captured.tokens.shape[0], -1)
    picks = [torch.randperm(len(every), generator=generator)[:count].sort().values for _ in captured.tokens]
    return every[torch.stack(picks).to(every.device)]


def valid_steps(captured: Captured, anchors: torch.Tensor, steps: int) -> torch.Tensor:
    """[B, A, steps]: whether step i has a counted token to predict and all that it reads lies in the
    anchor's text.
    """
    segment = captured.segments.gather(1, anchors)  # [B, A]
    begun = (captured.segments.gather(1, anchors - 1) == segment) & (segment >= 0)
    ahead = [anchors + i + 1 for i in range(steps)]
    same = torch.stack([captured.segments.gather(1, at) == segment for at in ahead], dim=-1)
    wanted = torch.stack([captured.counted.gather(1, at) for at in ahead], dim=-1)
    return same & wanted & begun[:, :, None]
