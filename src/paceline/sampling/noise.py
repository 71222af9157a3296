"""Counter-based noise: a pure function of (seed, absolute position, token id, purpose), equal on any device.

Nothing is drawn from hidden state, so a discarded draft position consumes nothing, and only tokens that
survive the filters need their noise. All of it is exact on unsigned 32-bit integers, for kernels to repeat:

    u32 mix(u32 x) { x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; return x ^ x >> 16; }
    u32 absorb(u32 start) { u32 h = mix(start + purpose);                      // start: 0x243f6a88 -> k0
                            h = mix(h ^ lo32(seed)); h = mix(h + hi32(seed));  //        0x85a308d3 -> k1
                            h = mix(h ^ lo32(position)); return mix(h + hi32(position)); }
    u32 bits = mix(mix(token * 0x9e3779b9 + k0) ^ k1);
    double v = (bits + 0.5) * 0x1p-32;        // exact, in (0, 1), never 0 or 1
    double gumbel = -log(-log1p(-v));         // in [-3.14, 22.88]
    token drawn at a position = the lowest id that maximises (double)shaped_logit[id] + gumbel[id]

`mix` is the "lowbias32" bijection (Wellons, 2018), so under one pair of keys distinct ids have distinct bits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq

import numpy as np
import torch

TARGET, DRAFT, ACCEPT, RESIDUAL, XTC = 0, 1, 2, 3, 4  # purposes; `match` drafts with TARGET too

GUMBEL_MAX = 22.875  # no token's noise exceeds this

_M32 = 0xFFFFFFFF
_MUL_A = 0x7FEB352D
_MUL_B = 0x846CA68B - (1 << 32)  # negative representative: |x * _MUL_B| < 2^63, so int64 never overflows
_GOLDEN = 0x9E3779B9


def draft_purpose(step: int) -> int:
    """The purpose of the draw at `step` of a draft round under `reject` and `block`, whose position is the round's first.

    `block` judges drafted tokens together, so a round may not draw with noise that an earlier one was judged by.
    """
    return DRAFT + (step << 8)


def keys(seed: int, position: int, purpose: int) -> tuple[int, int]:
    """The two 32-bit keys of one noise field. Seeds count modulo 2^64."""
    words = (seed & _M32, (seed >> 32) & _M32, position & _M32, (position >> 32) & _M32)
    return _absorb(0x243F6A88 + purpose, words), _absorb(0x85A308D3 + purpose, words)


def uniform(seeds: Seq[int], positions: Seq[int], token_ids: torch.Tensor, purpose: int) -> torch.Tensor:
    """Exact uniforms in (0, 1), float64 [M, C], for M rows and token ids int64 [C] (shared) or [M, C]."""
    return (bits(seeds, positions, token_ids, purpose).double() + 0.5) * 2.0**-32


def bits(seeds: Seq[int], positions: Seq[int], token_ids: torch.Tensor, purpose: int) -> torch.Tensor:
    """The 32-bit integers behind `uniform`, int64 [M, C]."""
    pairs = [keys(s, p, purpose) for s, p in zip(seeds, positions, strict=True)]
    both = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(token_ids.device)
    h = (token_ids.long() * _GOLDEN + both[:, :1]) & _M32  # [M, C]; ids < 2^31 keep the product exact
    return _mix(_mix(h) ^ both[:, 1:])


def gumbel(v: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of uniforms in (0, 1); finite always."""
    return -torch.log(-torch.log1p(-v))


def scalar(seed: int, position: int, purpose: int, index: int = 0) -> float:
    """One uniform on the host: `uniform` for token id `index`."""
    k0, k1 = keys(seed, position, purpose)
    return (_mix_int(_mix_int((index * _GOLDEN + k0) & _M32) ^ k1) + 0.5) * 2.0**-32


def host_bits(pair: tuple[int, int], token_ids: np.ndarray) -> np.ndarray:
    """`bits` of one row on the host, by its `keys`: ids [C] -> uint32 [C], 20 times as fast as tensors."""
    k0, k1 = pair
    h = token_ids.astype(np.uint32) * np.uint32(_GOLDEN)
    h += np.uint32(k0)
    scratch = np.empty_like(h)
    _mix_host(h, scratch)
    h ^= np.uint32(k1)
    _mix_host(h, scratch)
    return h


def host_gumbel(h: np.ndarray) -> np.ndarray:
    """`gumbel` of bits uint32 [C], float64."""
    return -np.log(-np.log1p((h + 0.5) * -(2.0**-32)))


def fresh_seed() -> int:
    """A seed for a request that gave none: 63 bits from the operating system."""
    return secrets.randbits(63)


def sibling_seed(seed: int, index: int) -> int:
    """The seed of text `index` of a request with n texts; text 0 keeps the request's own."""
    if index == 0:
        return seed
    low, high = keys(seed, index, 0x51B1)  # a purpose that no token draw uses
    return (high << 32 | low) >> 1


def _absorb(start: int, words: tuple[int, int, int, int]) -> int:
    h = _mix_int(start & _M32)
    h = _mix_int(h ^ words[0])
    h = _mix_int((h + words[1]) & _M32)
    h = _mix_int(h ^ words[2])
    return _mix_int((h + words[3]) & _M32)


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _M32
    x ^= x >> 15
    x = x * 0x846CA68B & _M32
    return x ^ x >> 16


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * _MUL_A) & _M32
    x = ((x ^ (x >> 15)) * _MUL_B) & _M32
    return x ^ (x >> 16)


def _mix_host(x: np.ndarray, scratch: np.ndarray) -> None:
    """In place, without temporaries: at 262,144 ids allocation would cost more than the arithmetic."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        np.right_shift(x, np.uint32(shift), out=scratch)
        x ^= scratch
        if factor is not None:
            x *= np.uint32(factor)
