"""Matrices packed as other tools store them, each with the values that it stands for: the formats' arithmetic, in numpy.

Every function takes float values [out, in], of which it keeps the sizes and rough values, and gives (what is stored, by
the ends of the names, the values in float32). `CONFIGS` has what stands in config.json beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layouts import edit

Packed = tuple[dict[str, Tensor], np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], dtype=np.float32)  # fmt: skip


def words(q: np.ndarray, bits: int) -> Tensor:
    """Integers [n, k] -> int32 [n, k * bits / 32], the first in the lowest bits."""
    run = (q.astype(np.uint64)[..., None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    bytes_ = np.packbits(run.reshape(len(q), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bytes_).view("<i4").copy())


def _grouped(
    w: np.ndarray, size: int, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q [out, in], scale float16 [out, groups], zero point [out, groups])."""
    parts = w.reshape(len(w), -1, size)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scale = (np.maximum(high - low, 1e-4) / (2**bits - 1)).astype(np.float16)
    zero = np.full(scale.shape, 2 ** (bits - 1)) if symmetric else np.rint(-low / scale)
    q = np.clip(np.rint(parts / scale[..., None].astype(np.float64) + zero[..., None]), 0, 2**bits - 1)
    return q.reshape(w.shape).astype(np.int64), scale, zero.astype(np.int64)


def _values(q: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    size = q.shape[1] // scale.shape[1]
    wide = np.repeat(scale.astype(np.float64), size, 1)
    return ((q - np.repeat(zero, size, 1)) * wide).astype(np.float32)


def awq(w: np.ndarray) -> Packed:
    q, scale, zero = _grouped(w, 32, 4, symmetric=False)

    def packed(columns: np.ndarray) -> Tensor:  # eight outputs a word
        return words(columns.reshape(len(columns), -1, 8)[..., AWQ_ORDER].reshape(columns.shape), 4)

    stored = {"qweight": packed(q.T), "qzeros": packed(zero.T), "scales": torch.from_numpy(scale.T.copy())}
    return stored, _values(q, scale, zero)


def gptq(w: np.ndarray, symmetric: bool = True) -> Packed:
    q, scale, zero = _grouped(w, 32, 4, symmetric)
    zero = np.maximum(zero, 1)
    stored = {
        "qweight": words(q, 4).T.contiguous(),
        "qzeros": words((zero - 1).T, 4),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.arange(w.shape[1], dtype=torch.int32) // 32,
    }
    return stored, _values(q, scale, zero)


def gptq_asymmetric(w: np.ndarray) -> Packed:
    return gptq(w, symmetric=False)


def mlx(w: np.ndarray, bits: int = 4) -> Packed:
    parts = w.reshape(len(w), -1, 32)
    low = parts.min(-1)
    scale = torch.from_numpy(np.maximum((parts.max(-1) - low) / (2**bits - 1), 1e-4)).bfloat16()
    bias = torch.from_numpy(low).bfloat16()
    s, b = scale.double().numpy()[..., None], bias.double().numpy()[..., None]
    q = np.clip(np.rint((parts - b) / s), 0, 2**bits - 1)
    values = ((q * s).astype(np.float32) + b.astype(np.float32)).reshape(w.shape)
    return {
        "weight": words(q.reshape(w.shape).astype(np.int64), bits).view(torch.uint32),
        "scales": scale,
        "biases": bias,
    }, values


def mlx8(w: np.ndarray) -> Packed:
    stored, values = mlx(w, 8)
    return stored, torch.from_numpy(values).bfloat16().float().numpy()


def w8a8(w: np.ndarray) -> Packed:
    scale = torch.from_numpy(np.abs(w).max(1, keepdims=True) / 127).bfloat16()
    s = scale.double().numpy()
    q = np.clip(np.rint(w / s), -127, 127)
    return {"weight": torch.from_numpy(q.astype(np.int8)), "weight_scale": scale}, (q * s).astype(np.float32)


def w4a16(w: np.ndarray) -> Packed:
    """In groups of 64, or all of a row."""
    q, scale, zero = _grouped(w, 64 if w.shape[1] % 64 == 0 else w.shape[1], 4, symmetric=True)
    stored = {"weight_packed": words(q, 4), "weight_scale": torch.from_numpy(scale).bfloat16(),
              "weight_shape": torch.tensor(w.shape)}  # fmt: skip
    return stored, _values(q, stored["weight_scale"].double().numpy(), zero)


def fp8(w: np.ndarray) -> Packed:
    scale = torch.from_numpy(np.abs(w).max(1, keepdims=True) / 448).float()
    q = (torch.from_numpy(w) / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale}, (q.float() * scale).bfloat16().float().numpy()


def nvfp4(w: np.ndarray) -> Packed:
    """As ModelOpt stores it."""
    whole = np.float32(np.abs(w).max() / (6 * 448))
    parts = w.reshape(len(w), -1, 16)
    scale = (
        torch.from_numpy(np.abs(parts).max(-1) / 6 / whole).float().clamp(min=2**-6).to(torch.float8_e4m3fn)
    )
    s = scale.float().numpy() * whole
    q = np.abs(np.abs(parts / s[..., None])[..., None] - E2M1).argmin(-1)
    code = (q | np.where(parts < 0, 8, 0)).reshape(w.shape).astype(np.uint8)
    values = (np.where(parts < 0, -E2M1[q], E2M1[q]).astype(np.float32) * s[..., None]).reshape(w.shape)
    stored = {"weight": torch.from_numpy(code[:, 0::2] | code[:, 1::2] << 4), "weight_scale": scale,
              "weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(1.0)}  # fmt: skip
    return stored, values


def nf4(w: np.ndarray) -> Packed:
    flat = w.reshape(-1, 32)
    largest = np.abs(flat).max(-1).astype(np.float32)
    q = (
        np.abs((flat / np.maximum(largest, 1e-9)[:, None])[..., None] - NF4)
        .argmin(-1)
        .astype(np.uint8)
        .reshape(-1)
    )
    values = torch.from_numpy(NF4[q] * np.repeat(largest, 32)).bfloat16().float().numpy().reshape(w.shape)
    kept = "weight.quant_state.bitsandbytes__nf4"
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(w.shape)}
    stored = {"weight": torch.from_numpy(q[0::2] << 4 | q[1::2])[:, None], "weight.absmax": torch.from_numpy(largest),
              "weight.quant_map": torch.from_numpy(NF4.copy()),
              kept: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)}  # fmt: skip
    return stored, values


def int8(w: np.ndarray) -> Packed:
    """As bitsandbytes stores it."""
    largest = np.abs(w).max(1).astype(np.float32)
    q = np.rint(w * 127 / largest[:, None])
    scale = (largest.astype(np.float64) / 127).astype(np.float32)
    stored = {"weight": torch.from_numpy(q.astype(np.int8)), "SCB": torch.from_numpy(largest)}
    return stored, q.astype(np.float32) * scale[:, None]


PACKINGS: dict[str, Callable[[np.ndarray], Packed]] = {
    "awq": awq, "gptq": gptq, "gptq asymmetric": gptq_asymmetric, "mlx": mlx, "mlx 8 bits": mlx8, "w8a8": w8a8,
    "w4a16": w4a16, "fp8": fp8, "nvfp4": nvfp4, "nf4": nf4, "int8": int8,
}  # fmt: skip
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": _GPTQ | {"sym": True}, "gptq asymmetric": _GPTQ | {"sym": False},
    "mlx": {"group_size": 32, "bits": 4}, "mlx 8 bits": {"group_size": 32, "bits": 8},
    "w8a8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip
TABLES = ("mlx", "mlx 8 bits")  # whose makers pack the embeddings, too


def pack_folder(folder: Path, kind: str) -> dict[str, Tensor]:
    """Pack the linears of a folder of float32; returns all tensors by their old names, with the values that they mean."""
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, data in load_file(file).items():
        inside = (
            ".layers." in name and "norm" not in name and "per_layer" not in name and "router" not in name
        )
        table = kind in TABLES and ("embed_tokens.weight" in name or "lm_head" in name)
        if data.dim() != 2 or not (inside or table):
            stored[name] = values[name] = data
            continue
        packed, meant = PACKINGS[kind](data.double().numpy())
        at = name.removesuffix(".weight")
        stored |= {f"{at}.{end}": part.contiguous() for end, part in packed.items()}
        values[name] = torch.from_numpy(np.ascontiguousarray(meant, dtype=np.float32))
    save_file(stored, file, metadata={"format": "mlx" if kind in TABLES else "pt"})
    key = "quantization" if kind in TABLES else "quantization_config"
    edit(folder / "config.json", **{key: CONFIGS[kind]})
    return values
