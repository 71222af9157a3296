"""Gemma 4's audio tower (E2B, E4B): mel features -> two convolutions -> a conformer -> the language model's width.

Source of truth: transformers' models/gemma4 and its feature extractor. Only frames of real sound are computed: those
behind them are zero there before each convolution, and no keys of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.checkpoints.loading import Shapes
from paceline.models.fields import Fields
from paceline.models.towers.base import Slices
from paceline.models.towers.parts import BOUNDS, Linear, Take, norm

HOP, FRAME, TRANSFORM, MELS, RATE = 160, 320, 512, 128, 16_000
FLOOR = 1e-3  # added to mel energies
_FF = ("ffw_layer_1", "ffw_layer_2")
_CLIPPED = ("q_proj", "k_proj", "v_proj", "post")


@dataclass(frozen=True, slots=True)
class AudioConfig:
    hidden_size: int
    layers: int
    heads: int
    channels: tuple[int, int]  # of the two convolutions
    kernel: int
    horizon: int  # rows that a row sees, itself included
    cap: float
    residual: float
    eps: float
    clipped: bool
    width: int  # of what the tower gives to the projector
    out: int  # hidden_size of the language model


def parse_audio(raw: Mapping[str, Any], out: int) -> AudioConfig:
    """The `audio_config` of a config.json. Raises ConfigError."""
    fields = Fields(raw, "audio_config")
    fields.refuse("hidden_act", (None, "silu"), "Gemma 4's tower uses silu")
    fields.refuse("attention_context_right", (None, 0), "Gemma 4's tower hears nothing ahead")
    channels = raw.get("subsampling_conv_channels") or (128, 32)
    first, second = (Fields({"channels": c}, "audio_config").size("channels") for c in list(channels)[:2])
    return AudioConfig(
        hidden_size=fields.size("hidden_size", 1024),
        layers=fields.size("num_hidden_layers", 12),
        heads=fields.size("num_attention_heads", 8),
        channels=(first, second),
        kernel=fields.size("conv_kernel_size", 5),
        horizon=fields.size("attention_context_left", 13, least=2) - 1,
        cap=fields.number("attention_logit_cap", 50.0),
        residual=fields.number("residual_weight", 0.5),
        eps=fields.number("rms_norm_eps", 1e-6),
        clipped=raw.get("use_clipped_linears") is not False,
        width=fields.size("output_proj_dims", 1536),
        out=out,
    )


def audio_shapes(config: AudioConfig) -> Shapes:
    """Name and shape of every tensor of tower and projector."""
    hidden, (first, second), at = config.hidden_size, config.channels, "audio_tower"
    sub = f"{at}.subsample_conv_projection"
    shapes: Shapes = {
        f"{sub}.layer0.conv.weight": (first, 1, 3, 3), f"{sub}.layer0.norm.weight": (first,),
        f"{sub}.layer1.conv.weight": (second, first, 3, 3), f"{sub}.layer1.norm.weight": (second,),
        f"{sub}.input_proj_linear.weight": (hidden, MELS // 4 * second),
        f"{at}.output_proj.weight": (config.width, hidden), f"{at}.output_proj.bias": (config.width,),
        "embed_audio.embedding_projection.weight": (config.out, config.width),
    }  # fmt: skip
    for i in range(config.layers):
        shapes |= _layer_shapes(config, f"{at}.layers.{i}")
    return shapes


def _layer_shapes(config: AudioConfig, at: str) -> Shapes:
    hidden = config.hidden_size
    norms = ["norm_pre_attn", "norm_post_attn", "norm_out", "lconv1d.pre_layer_norm", "lconv1d.conv_norm"]
    linears = {f"self_attn.{name}": (hidden, hidden) for name in _CLIPPED}
    linears |= {"lconv1d.linear_start": (2 * hidden, hidden), "lconv1d.linear_end": (hidden, hidden)}
    for part in ("feed_forward1", "feed_forward2"):
        norms += [f"{part}.pre_layer_norm", f"{part}.post_layer_norm"]
        linears |= {f"{part}.{_FF[0]}": (4 * hidden, hidden), f"{part}.{_FF[1]}": (hidden, 4 * hidden)}
    shapes: Shapes = {f"{at}.{name}.weight": (hidden,) for name in norms}
    shapes[f"{at}.self_attn.relative_k_proj.weight"] = (hidden, hidden)
    shapes[f"{at}.self_attn.per_dim_scale"] = (hidden // config.heads,)
    shapes[f"{at}.lconv1d.depthwise_conv1d.weight"] = (hidden, 1, config.kernel)
    for name, size in linears.items():
        shapes[f"{at}.{name}.linear.weight"] = size
        if config.clipped:
            shapes |= {f"{at}.{name}.{bound}": () for bound in BOUNDS}
    return shapes


def frames_of(samples: int) -> int:
    """Frames that end in real sound."""
    return max(0, (samples - HOP - 1) // HOP + 1)


def mel_filters() -> NDArray[np.float64]:
    """[257, 128] triangles that are as wide on the HTK mel scale, from 0 to 8000 Hz, of height 1."""
    highest = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, MELS + 2) / 2595) - 1)
    bins = np.linspace(0, RATE // 2, TRANSFORM // 2 + 1)
    slopes = edges[None] - bins[:, None]
    down, up = -slopes[:, :-2] / np.diff(edges)[:-1], slopes[:, 2:] / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(down, up))


def features(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """[frames, 128] logarithms of mel energies; each frame is 320 samples, the first begins 160 before the sound."""
    count = frames_of(len(samples))
    padded = np.concatenate((np.zeros(HOP, np.float32), samples, np.zeros(FRAME, np.float32)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[: count * HOP : HOP]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32)
    magnitudes = np.abs(np.fft.rfft(frames * window, n=TRANSFORM, axis=-1))
    return np.log(magnitudes @ mel_filters() + FLOOR).astype(np.float32)


class _Layer:
    def __init__(self, take: Take, at: str, config: AudioConfig) -> None:
        self.config = config
        self.feeds = [self._feed(take, f"{at}.feed_forward{i}") for i in (1, 2)]
        self.norms = [take(f"{at}.{name}.weight") for name in ("norm_pre_attn", "norm_post_attn", "norm_out")]
        self.q, self.k, self.v, self.post = (
            Linear(take, f"{at}.self_attn.{name}", config.clipped) for name in _CLIPPED
        )
        self.relative = take(f"{at}.self_attn.relative_k_proj.weight")
        head_dim = config.hidden_size // config.heads
        scale = F.softplus(take(f"{at}.self_attn.per_dim_scale").float())
        self.q_scale = scale * (head_dim**-0.5 / math.log(2))
        self.start, self.end = (
            Linear(take, f"{at}.lconv1d.{name}", config.clipped) for name in ("linear_start", "linear_end")
        )
        self.conv = take(f"{at}.lconv1d.depthwise_conv1d.weight")
        self.conv_norms = [take(f"{at}.lconv1d.{name}.weight") for name in ("pre_layer_norm", "conv_norm")]

    def _feed(self, take: Take, at: str) -> tuple[Tensor, Linear, Linear, Tensor]:
        up, down = (Linear(take, f"{at}.{name}", self.config.clipped) for name in _FF)
        return take(f"{at}.pre_layer_norm.weight"), up, down, take(f"{at}.post_layer_norm.weight")

    def parts(self, distances: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """What is done to x [T, hidden], in order; distances [horizon, hidden], the sinusoids of 0, 1, ... rows back."""
        return [
            lambda x: self._fed(x, 0), lambda x: self._seen(x, distances), self._convolved,
            lambda x: norm(self._fed(x, 1), self.norms[2], 1e-6),
        ]  # fmt: skip

    def _seen(self, x: Tensor, distances: Tensor) -> Tensor:
        return x + norm(self._attend(norm(x, self.norms[0], 1e-6), distances), self.norms[1], 1e-6)

    def _convolved(self, x: Tensor) -> Tensor:
        eps = self.config.eps
        h = F.glu(self.start(norm(x, self.conv_norms[0], eps)), dim=-1)
        h = F.conv1d(F.pad(h.T, (self.config.kernel - 1, 0)), self.conv.to(h), groups=len(self.conv)).T
        return x + self.end(F.silu(norm(h, self.conv_norms[1], eps)))

    def _fed(self, x: Tensor, which: int) -> Tensor:
        pre, up, down, post = self.feeds[which]
        return x + self.config.residual * norm(down(F.silu(up(norm(x, pre, 1e-6)))), post, 1e-6)

    def _attend(self, h: Tensor, distances: Tensor) -> Tensor:
        """Each row sees itself and the `horizon` - 1 before it."""
        heads, horizon, rows = self.config.heads, self.config.horizon, len(h)
        q, k, v = (part(h).view(rows, heads, -1) for part in (self.q, self.k, self.v))
        q, k = q * self.q_scale, k * (math.log(1 + math.e) / math.log(2))
        back = (0, 0, 0, 0, horizon - 1, 0)
        k, v = (
            F.pad(part, back).unfold(0, horizon, 1) for part in (k, v)
        )  # [T, heads, d, horizon], oldest first
        r = F.linear(distances, self.relative.to(h)).view(horizon, heads, -1).flip(0)
        scores = torch.einsum("thd,thdj->thj", q, k) + torch.einsum("thd,jhd->thj", q, r)
        scores = torch.tanh(scores / self.config.cap) * self.config.cap
        place = torch.arange(rows, device=h.device)[:, None] + torch.arange(1 - horizon, 1, device=h.device)
        scores = scores.masked_fill((place < 0)[:, None], -torch.inf)
        mixed = torch.einsum("thj,thdj->thd", torch.softmax(scores, dim=-1), v)
        return self.post(mixed.reshape(rows, -1))


class GemmaAudio:
    """A loaded tower with its projector; implements `AudioTower`."""

    def __init__(self, config: AudioConfig, take: Take) -> None:
        self.config = config
        at = "audio_tower.subsample_conv_projection"
        self.convs = [
            (take(f"{at}.layer{i}.conv.weight"), take(f"{at}.layer{i}.norm.weight")) for i in (0, 1)
        ]
        self.input = take(f"{at}.input_proj_linear.weight")
        self.layers = [_Layer(take, f"audio_tower.layers.{i}", config) for i in range(config.layers)]
        self.output = take("audio_tower.output_proj.weight"), take("audio_tower.output_proj.bias")
        self.projection = take("embed_audio.embedding_projection.weight")

    def count(self, samples: int) -> int:
        """As `AudioTower`."""
        return -(-frames_of(samples) // 4)

    @torch.no_grad()
    def slices(self, samples: NDArray[np.float32]) -> Slices:
        """As `AudioTower`."""
        x = torch.from_numpy(features(samples)).to(self.input.device)[None, None]  # [1, 1, frames, mels]
        for weight, scale in self.convs:
            x = F.conv2d(x, weight.to(x), stride=2, padding=1).permute(0, 2, 3, 1)
            x = F.relu(F.layer_norm(x, x.shape[-1:], scale.to(x), None, self.config.eps)).permute(0, 3, 1, 2)
        h = F.linear(x[0].permute(1, 2, 0).flatten(1), self.input.to(x))  # [T, hidden]
        half = self.config.hidden_size // 2
        turns = torch.exp(torch.arange(half, device=h.device) * -(math.log(10000.0) / max(half - 1, 1)))
        angles = torch.arange(self.config.horizon, device=h.device)[:, None] * turns
        distances = torch.cat((angles.sin(), angles.cos()), dim=-1)
        for layer in self.layers:
            for part in layer.parts(distances):
                yield
                h = part(h)
        h = F.linear(h, *(part.to(h) for part in self.output))
        return F.linear(norm(h, None, self.config.eps), self.projection.to(h))
