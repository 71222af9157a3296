"""Gemma 4 12B sees without a tower: each square of 48 pixels goes through one matrix. Source: transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.checkpoints.loading import Shapes
from paceline.models.fields import Fields
from paceline.models.towers.base import Grid, Slices
from paceline.models.towers.parts import Take, norm

_NORM_EPS = 1e-5  # of the layer norms, torch's default


@dataclass(frozen=True, slots=True)
class UnifiedConfig:
    width: int  # of the embedder
    places: int
    grid: Grid
    eps: float
    out: int  # hidden_size of the language model
    together: bool


def parse_unified(raw: Mapping[str, Any], out: int, together: bool) -> UnifiedConfig:
    """The `vision_config` of a config.json. Raises ConfigError."""
    fields = Fields(raw, "vision_config")
    return UnifiedConfig(
        width=fields.size("mm_embed_dim", 3840),
        places=fields.size("mm_posemb_size", 1120),
        grid=Grid(fields.size("patch_size", 16), fields.size("pooling_kernel_size", 3)),
        eps=fields.number("rms_norm_eps", 1e-6),
        out=out,
        together=together,
    )


def unified_shapes(config: UnifiedConfig) -> Shapes:
    """Name and shape of every tensor, as published."""
    area, width, at = 3 * config.grid.side**2, config.width, "vision_embedder"
    norms = {"patch_ln1": area, "patch_ln2": width, "pos_norm": width}
    shapes: Shapes = {f"{at}.{n}.{part}": (size,) for n, size in norms.items() for part in ("weight", "bias")}
    return shapes | {
        f"{at}.patch_dense.weight": (width, area),
        f"{at}.patch_dense.bias": (width,),
        f"{at}.pos_embedding": (config.places, 2, width),
        "embed_vision.embedding_projection.weight": (config.out, width),
    }


def published_name(name: str) -> str:
    """A tensor as the published files call it, for one that transformers has saved from memory."""
    if name.startswith(("embed_vision.multimodal_embedder.", "embed_audio.multimodal_embedder.")):
        return name.replace("multimodal_embedder.", "")
    own = ("embed_vision.patch_", "embed_vision.pos_")
    return name.replace("embed_vision.", "vision_embedder.", 1) if name.startswith(own) else name


class UnifiedVision:
    """Loaded; implements `VisionTower`."""

    def __init__(self, config: UnifiedConfig, take: Take) -> None:
        self.config, self.grid, self.together = config, config.grid, config.together
        self.norms = {
            name: (take(f"vision_embedder.{name}.weight"), take(f"vision_embedder.{name}.bias"))
            for name in ("patch_ln1", "patch_ln2", "pos_norm")
        }
        self.dense = take("vision_embedder.patch_dense.weight"), take("vision_embedder.patch_dense.bias")
        self.places = take("vision_embedder.pos_embedding")
        self.projection = take("embed_vision.embedding_projection.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.norms[name]
        return F.layer_norm(x, x.shape[-1:], weight.to(x), bias.to(x), _NORM_EPS)

    @torch.no_grad()
    def slices(self, pixels: Tensor) -> Slices:
        """As `VisionTower`. Values are in [0, 1], not shifted."""
        side = self.grid.side
        height, width = pixels.shape[0] // side, pixels.shape[1] // side  # in squares
        values = pixels.to(self.places.device).float() * torch.tensor(1 / 255, dtype=torch.float32)
        squares = values.view(height, side, width, side, 3).transpose(1, 2).reshape(height * width, -1)
        y = torch.arange(height, device=squares.device).repeat_interleave(width)
        x = torch.arange(width, device=squares.device).repeat(height)
        h = F.linear(self._norm(squares, "patch_ln1"), *(part.float() for part in self.dense))
        h = self._norm(h, "patch_ln2") + (self.places[x, 0].float() + self.places[y, 1].float())
        h = norm(self._norm(h, "pos_norm"), None, self.config.eps)
        yield
        return F.linear(h, self.projection.float())


@dataclass(frozen=True, slots=True)
class UnifiedAudioConfig:
    samples: int  # of a soft token, at 16 kHz
    eps: float
    out: int


def parse_unified_audio(raw: Mapping[str, Any], out: int) -> UnifiedAudioConfig:
    """The `audio_config` of a config.json. Raises ConfigError."""
    fields = Fields(raw, "audio_config")
    return UnifiedAudioConfig(fields.size("audio_embed_dim", 640), fields.number("rms_norm_eps", 1e-6), out)


class UnifiedAudio:
    """Each 40 ms of sound through one matrix; implements `AudioTower`."""

    def __init__(self, config: UnifiedAudioConfig, take: Take) -> None:
        self.config, self.projection = config, take("embed_audio.embedding_projection.weight")

    def count(self, samples: int) -> int:
        """As `AudioTower`."""
        return -(-samples // self.config.samples)

    @torch.no_grad()
    def slices(self, samples: NDArray[np.float32]) -> Slices:
        """As `AudioTower`."""
        frames = torch.from_numpy(samples.copy()).to(self.projection.device)
        yield
        frames = F.pad(frames, (0, -len(samples) % self.config.samples)).view(-1, self.config.samples)
        return F.linear(norm(frames, None, self.config.eps), self.projection.float())
