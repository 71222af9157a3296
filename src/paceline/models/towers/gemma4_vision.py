"""Gemma 4's vision tower (E2B, E4B, 26B-A4B, 31B): patches -> encoder -> 3 x 3 means -> the language model's width.

Source of truth: transformers' models/gemma4. All patches of a picture see each other; no padding, one picture at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.checkpoints.loading import Shapes
from paceline.models.fields import Fields
from paceline.models.towers.base import Grid, Slices
from paceline.models.towers.encoder import Encoder, EncoderLayer, Matrix
from paceline.models.towers.parts import BOUNDS, Linear, Take, axial_rotary, norm

_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_PATCHES = 2048  # of a slice
_SLICE = 256  # rows of the MLP at a time: its inner values are four times as wide
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    head_dim: int
    places: int  # rows of each position table
    grid: Grid
    theta: float
    eps: float
    clipped: bool
    standardize: bool
    out: int  # hidden_size of the language model
    together: bool


def parse_vision(raw: Mapping[str, Any], out: int, together: bool) -> VisionConfig:
    """The `vision_config` of a config.json. Raises ConfigError."""
    fields = Fields(raw, "vision_config")
    fields.refuse("hidden_activation", (None, "gelu_pytorch_tanh"), "Gemma 4's tower uses gelu_pytorch_tanh")
    fields.refuse("attention_bias", (None, False), "no published Gemma 4 has biases there")
    heads, head_dim = fields.size("num_attention_heads", 12), fields.size("head_dim", 64)
    fields.refuse("num_key_value_heads", (None, heads), "the tower has a K/V head for each head")
    rope = raw.get("rope_parameters")
    return VisionConfig(
        hidden_size=fields.size("hidden_size", 768),
        intermediate_size=fields.size("intermediate_size", 3072),
        layers=fields.size("num_hidden_layers", 16),
        heads=heads,
        head_dim=head_dim,
        places=fields.size("position_embedding_size", 10240),
        grid=Grid(fields.size("patch_size", 16), fields.size("pooling_kernel_size", 3)),
        theta=Fields(rope if isinstance(rope, Mapping) else {}, "vision_config.rope_parameters").number(
            "rope_theta", 100.0
        ),
        eps=fields.number("rms_norm_eps", 1e-6),
        clipped=bool(raw.get("use_clipped_linears")),
        standardize=bool(raw.get("standardize")),
        out=out,
        together=together,
    )


def vision_shapes(config: VisionConfig) -> Shapes:
    """Name and shape of every tensor of tower and projector."""
    hidden, wide, inner = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    shapes: Shapes = {
        "vision_tower.patch_embedder.input_proj.weight": (hidden, 3 * config.grid.patch**2),
        "vision_tower.patch_embedder.position_embedding_table": (2, config.places, hidden),
        "embed_vision.embedding_projection.weight": (config.out, hidden),
    }
    if config.standardize:
        shapes |= {f"vision_tower.{name}": (hidden,) for name in ("std_bias", "std_scale")}
    sizes = [(inner, hidden)] * 3 + [(hidden, inner), (wide, hidden), (wide, hidden), (hidden, wide)]
    for i in range(config.layers):
        at = f"vision_tower.encoder.layers.{i}"
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in _NORMS}
        shapes |= {f"{at}.self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
        for name, size in zip(_LINEARS, sizes, strict=True):
            shapes[f"{at}.{name}.linear.weight"] = size
            if config.clipped:
                shapes |= {f"{at}.{name}.{bound}": () for bound in BOUNDS}
    return shapes


def picture_operations(config: VisionConfig, budget: int) -> int:
    """Floating-point operations of the tower for a picture of so many soft tokens."""
    patches, inner = budget * config.grid.pooling**2, config.heads * config.head_dim
    linears = 4 * config.hidden_size * inner + 3 * config.hidden_size * config.intermediate_size
    return config.layers * patches * (2 * linears + 4 * patches * inner)


class _Layer:
    def __init__(self, take: Take, at: str, config: VisionConfig) -> None:
        self.config = config
        self.norms = [take(f"{at}.{name}.weight") for name in _NORMS]
        self.q_norm, self.k_norm = (
            take(f"{at}.self_attn.q_norm.weight"),
            take(f"{at}.self_attn.k_norm.weight"),
        )
        linears = (Linear(take, f"{at}.{name}", config.clipped) for name in _LINEARS)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = linears

    def as_stored(self) -> EncoderLayer:
        linears = [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]
        bounds = [linear.bounds for linear in linears if linear.bounds is not None]
        return EncoderLayer(
            [*self.norms, self.q_norm, self.k_norm], [linear.weight for linear in linears], bounds or None
        )

    def __call__(self, x: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        eps = self.config.eps
        before, after, pre, post = self.norms
        x = x + norm(self._attend(norm(x, before, eps), places), after, eps)
        h = norm(x, pre, eps)
        h = torch.cat([self._mlp(part) for part in torch.split(h, _SLICE)])
        return x + norm(h, post, eps)

    def _mlp(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(h), approximate="tanh").mul_(self.up(h)))

    def _attend(self, h: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """h [N, hidden]; torch's fused attention goes through blocks of keys and holds no matrix of scores."""
        eps, theta, shape = self.config.eps, self.config.theta, (len(h), self.config.heads, -1)
        q = axial_rotary(norm(self.q(h).view(shape), self.q_norm, eps), places, theta)
        k = axial_rotary(norm(self.k(h).view(shape), self.k_norm, eps), places, theta)
        v = norm(self.v(h).view(shape), None, eps)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # [1, heads, N, d]
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.o(mixed[0].transpose(0, 1).reshape(len(h), -1))


class GemmaVision:
    """A loaded tower with its projector; implements `VisionTower`."""

    def __init__(self, config: VisionConfig, take: Take) -> None:
        self.config, self.grid, self.together = config, config.grid, config.together
        first = take("vision_tower.patch_embedder.input_proj.weight")
        last = take("embed_vision.embedding_projection.weight")
        self.places = take("vision_tower.patch_embedder.position_embedding_table")
        layers = (_Layer(take, f"vision_tower.encoder.layers.{i}", config) for i in range(config.layers))
        native, self.encoder, self.layers = Encoder.available(first.device), None, list[_Layer]()
        self.input: Callable[[Tensor], Tensor] = lambda x: F.linear(x, first.float())
        self.project: Callable[[Tensor], Tensor] = lambda x: F.linear(x, last.float())
        if native is not None:
            parts = (layer.as_stored() for layer in layers)
            self.encoder = Encoder(native, parts, config.heads, config.eps)
            self.input, self.project = Matrix(native, first), Matrix(native, last)
        else:
            self.layers = list(layers)
        self.standard = None
        if config.standardize:
            self.standard = take("vision_tower.std_bias").float(), take("vision_tower.std_scale").float()

    @torch.no_grad()
    def slices(self, pixels: Tensor) -> Slices:
        """As `VisionTower`."""
        config, grid = self.config, self.grid
        height, width = pixels.shape[0] // grid.patch, pixels.shape[1] // grid.patch  # in patches
        values = pixels.to(self.places.device).float() * torch.tensor(1 / 255, dtype=torch.float32)
        patches = (
            values.view(height, grid.patch, width, grid.patch, 3).transpose(1, 2).reshape(height * width, -1)
        )
        y = torch.arange(height, device=patches.device).repeat_interleave(width)
        x = torch.arange(width, device=patches.device).repeat(height)
        h = torch.empty(len(patches), config.hidden_size, device=patches.device)
        for some in torch.split(torch.arange(len(patches), device=patches.device), _PATCHES):
            places = self.places[0][x[some]].float() + self.places[1][y[some]].float()
            h[some] = self.input(2 * (patches[some] - 0.5)) + places
            yield
        if self.encoder is not None:
            yield from self.encoder.run(h, (x, y), config.theta)
        for layer in self.layers:
            h = layer(h, (x, y))
            yield
        pooled = h.view(height // grid.pooling, grid.pooling, width // grid.pooling, grid.pooling, -1)
        h = pooled.mean(dim=(1, 3)).flatten(0, 1) * config.hidden_size**0.5
        if self.standard is not None:
            h = (h - self.standard[0]) * self.standard[1]
        return self.project(norm(h, None, config.eps))
