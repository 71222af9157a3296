"""transformers' `generate` on targets of the same shapes, weights made on the device."""

from __future__ import annotations

import time
from typing import Any

import torch
from journal import Journal
from subjects import Place, free


def transformers(place: Place, journal: Journal, name: str) -> None:
    """Greedy texts with the default cache: milliseconds a token, over those of a plain step of paceline."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = place.fields(name)
    config = AutoConfig.for_model(
        **{k: v for k, v in fields.items() if k != "eos_token_id"}, eos_token_id=None
    )
    dtype = torch.float32 if place.torch.type == "cpu" else torch.bfloat16
    free()
    with torch.device(place.torch):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    try:
        ids = torch.arange(5, 69, device=place.torch)[None]
        _generate(model, ids, 4)
        count = 8 if place.dry else 24
        short, long = _generate(model, ids, 4), _generate(model, ids, 4 + count)
        each = (long - short) / count
        plain = journal.value(f"{name} drafts, batch 1", "plain_step_ms")
        ratio = None if plain is None else each * 1e3 / plain
        words = f"{each * 1e3:.1f} ms a token" + (
            "" if ratio is None else f", {ratio:.1f} times a plain step here"
        )
        journal.add(
            f"{name} transformers", words, ms=each * 1e3, ratio=ratio, target={"31b": 6, "e2b": 25}.get(name)
        )
    finally:
        del model
        free()


def _generate(model: Any, ids: torch.Tensor, count: int) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    if ids.is_cuda:
        torch.cuda.synchronize()
    assert out.shape[1] == ids.shape[1] + count, "it ended early"
    return time.perf_counter() - begin
