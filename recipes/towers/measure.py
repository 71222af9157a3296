"""What a tower of Gemma 4 E2B's shape costs here, with random weights: time by budget, memory above its weights, and what
others notice of it.

    python recipes/towers/measure.py --threads 2 --budgets 70 140 280          # beside transformers, in turns
    python recipes/towers/measure.py --alone --budgets 280                     # memory is that of our tower
    python recipes/towers/measure.py --prefill --budgets 280                   # and of E2B's language model, its rows
    python recipes/towers/measure.py --beside --budgets 280 1120               # texts that decode meanwhile

Needs the extra `dev` (transformers) for the comparison. Run it on a machine that does nothing else: times are the best of
`--rounds`. Weights are bfloat16, as published, and transformers computes in `--theirs`. "of peak" is the share of this
machine's float32 multiply-add peak; registers for bfloat16 (AMX) go beyond it. "off" is the distance of soft tokens from
those of the same weights in float32, by their norms.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4TextConfig, Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel, Gemma4VisionModel

from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.engine.engine import Engine, EngineParts
from paceline.forecast.random_target import random_target
from paceline.forecast.shapes import FULL, SLIDING, fields_of, shallow, target_config
from paceline.kv.cache import KVCache
from paceline.media.pixels import Cut, resized
from paceline.models.families.gemma4.config import parse_gemma
from paceline.models.target import GraphTarget
from paceline.models.towers.base import whole
from paceline.models.towers.gemma4_vision import GemmaVision, parse_vision
from paceline.ops.native import NativeRunner, measure_peak, set_threads
from paceline.turns import Turns

WIDTH, VOCABULARY, TEXT = 1536, 16384, 20  # of the language model; tokens of text around a picture


def above(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What it gives, and MB that it holds at most beyond what was held before. Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is no room for what comes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is held now
    before = _held("VmRSS")
    return run(), _held("VmHWM") - before


def _held(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def best(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """The least seconds of each, measured in turns."""
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - begin)
    return least


def flops_per_second() -> float:
    """Of float32 multiply-adds, all threads."""
    found = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        found = max(found, measure_peak(50_000) / (time.perf_counter() - begin))
    return found


@dataclass
class Pair:
    """Ours, and transformers' with the same weights."""

    held: dict[str, torch.Tensor]
    config: Any
    theirs: Gemma4VisionModel | None = None

    def ours(self, dtype: torch.dtype = torch.bfloat16) -> GemmaVision:
        parsed = parse_vision(self.config.to_dict(), WIDTH, False)
        return GemmaVision(parsed, lambda name: self.held[name].to(dtype))


def pair(theirs: torch.dtype | None) -> Pair:
    config = Gemma4VisionConfig(use_clipped_linears=True, position_embedding_size=10240)
    model = Gemma4VisionModel(config).eval().bfloat16()
    held = {f"vision_tower.{n}": t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    held["embed_vision.embedding_projection.weight"] = (
        torch.randn(WIDTH, config.hidden_size) * 0.03
    ).bfloat16()
    for name, tensor in held.items():
        if name.endswith(("_min", "_max")):
            tensor.fill_(-4.0 if name.endswith("_min") else 4.0)
    return Pair(held, config, None if theirs is None else model.to(theirs))


def pixels_of(budget: int) -> torch.Tensor:
    height, width = resized(480, 640, Cut(budget, 16, 3))
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)


def by_transformers(model: Gemma4VisionModel, pixels: torch.Tensor) -> Callable[[], object]:
    height, width = pixels.shape[0] // 16, pixels.shape[1] // 16
    flat = pixels.view(height, 16, width, 16, 3).transpose(1, 2).reshape(1, height * width, 768) / 255.0
    flat = flat.to(model.dtype)
    places = torch.arange(height * width)
    places = torch.stack((places % width, places // width), dim=-1)[None]
    return torch.no_grad()(lambda: model(flat, places))


def prefill_by_transformers(rows: int, dtype: torch.dtype, rounds: int) -> float:
    fields = fields_of("gemma-4-e2b") | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    torch.set_default_dtype(dtype)
    model = Gemma4TextModel(Gemma4TextConfig(**fields)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.arange(rows)[None] + 5
    return best(rounds, torch.no_grad()(lambda: model(input_ids=ids)))[0]


def prefill_by_ours(rows: int, rounds: int) -> float:
    target = random_target(target_config("gemma-4-e2b", VOCABULARY), "bfloat16", NativeRunner())
    cache = cache_of(target, rows)
    cache.open(0, list(range(5, 5 + rows)), share=False)
    with cache.tail([(0, list(range(5, 5 + rows)))]) as tail:
        batch = tail.rows()
    return best(rounds + 1, lambda: target.forward(batch, cache))[0]


def cache_of(target: GraphTarget, rows: int) -> KVCache:
    pages = dict.fromkeys(target.layout.kinds, rows // 16 + 2)
    return KVCache(target.layout, pages, max_sequences=1, max_tokens=rows, dtype=target.kv_dtype)


def measure_towers(options: argparse.Namespace) -> None:
    kind = None if options.alone else getattr(torch, options.theirs)
    both = pair(kind)
    ours = both.ours()
    exact = None if options.alone else both.ours(torch.float32)
    if options.alone:
        both.held.clear()
        gc.collect()
    flops = flops_per_second()
    print(f"float32 multiply-add peak {flops / 1e9:.0f} GFLOP/s; transformers in {options.theirs}")
    print(
        f"{'budget':>7}{'patches':>9}{'ours s':>9}{'theirs s':>10}{'GFLOP/s':>9}{'of peak':>9}{'MB above':>10}{'off':>9}"
    )
    for budget in options.budgets:
        pixels = pixels_of(budget)
        count = pixels.shape[0] * pixels.shape[1] // 256
        found, more = above(lambda pixels=pixels: whole(ours.slices(pixels)))  # type: ignore[misc]
        runs: list[Callable[[], object]] = [lambda pixels=pixels: whole(ours.slices(pixels))]  # type: ignore[misc]
        off = float("nan")
        if both.theirs is not None and exact is not None:
            runs.append(by_transformers(both.theirs, pixels))
            wanted = whole(exact.slices(pixels))
            off = float((found - wanted).norm() / wanted.norm())
        mine, *other = best(options.rounds, *runs)
        rate = (302e6 * count + 4 * count**2 * 768 * 16) / mine
        seconds = f"{other[0]:.2f}" if other else "-"
        print(
            f"{budget:>7}{count:>9}{mine:>9.2f}{seconds:>10}{rate / 1e9:>9.0f}"
            f"{rate / flops:>9.0%}{more:>10.0f}{off:>9.4f}"
        )


def towers_in_turns(pixels: torch.Tensor, kind: torch.dtype, rounds: int) -> list[float]:
    both = pair(kind)
    ours = both.ours()
    assert both.theirs is not None
    return best(rounds, lambda: whole(ours.slices(pixels)), by_transformers(both.theirs, pixels))


def measure_prefill(options: argparse.Namespace) -> None:
    kind = getattr(torch, options.theirs)
    for budget in options.budgets:
        pixels = pixels_of(budget)
        rows = pixels.shape[0] * pixels.shape[1] // 48**2 + TEXT
        towers = towers_in_turns(pixels, kind, options.rounds)
        gc.collect()
        theirs = prefill_by_transformers(rows, kind, options.rounds)
        gc.collect()
        mine = prefill_by_ours(rows, options.rounds)
        ratio = (towers[1] + theirs) / (towers[0] + mine)
        print(f"budget {budget}, {rows} rows: ours {towers[0]:.2f} + {mine:.2f} s, transformers in {options.theirs} "
              f"{towers[1]:.2f} + {theirs:.2f} s: {ratio:.2f} times as fast")  # fmt: skip


class Decoding:
    """An engine that writes one text without end, in a thread: when each step was done."""

    def __init__(self, layers: int) -> None:
        config = parse_gemma(
            shallow("gemma-4-e2b", layers)
            | {"layer_types": [SLIDING] * (layers - 1) + [FULL]}
            | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
        )
        target = random_target(config, "bfloat16", NativeRunner())
        self.turns = Turns()
        parts = EngineParts(
            target=target, cache=cache_of(target, 60_000), drafters={}, default_drafter="none",
            policy=FixedPolicy(0), media=self,
        )  # fmt: skip
        self.engine, self.steps, self.over = Engine(parts), list[float](), False
        self.engine.add("text", [5, 6, 7], SamplingParams(max_tokens=50_000, ignore_eos=True))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.over and self.engine.has_work:
            self.engine.step()
            self.steps.append(time.perf_counter())

    def speed(self, begin: float, end: float) -> tuple[float, float]:
        """Steps a second, and the longest pause, between two moments."""
        inside = [begin, *(at for at in self.steps if begin < at < end), end]
        return (len(inside) - 2) / (end - begin), max(b - a for a, b in pairwise(inside))

    def close(self) -> None:
        self.over = True
        self._thread.join()


def measure_beside(options: argparse.Namespace) -> None:
    ours = pair(None).ours()
    text = Decoding(options.layers)
    time.sleep(2)
    for budget in options.budgets:
        pixels = pixels_of(budget)
        alone, _ = text.speed(time.perf_counter() - 1.5, time.perf_counter())
        begin = time.perf_counter()
        text.turns.run(ours.slices(pixels))
        end = time.perf_counter()
        beside, pause = text.speed(begin, end)
        print(f"budget {budget}: {1e3 / alone:.1f} ms a step alone; tower {end - begin:.2f} s, meanwhile "
              f"{beside / alone:.2f} of the speed, longest pause {pause * 1e3:.0f} ms")  # fmt: skip
        time.sleep(2)
    text.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budgets", type=int, nargs="+", default=[70, 140, 280])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--theirs", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the text that decodes beside: some ms a step"
    )
    parser.add_argument("--alone", action="store_true", help="ours only: memory is that of our tower")
    parser.add_argument(
        "--prefill", action="store_true", help="tower and prefill of its rows: 12 GB in float32"
    )
    parser.add_argument("--beside", action="store_true", help="the speed of a text that decodes meanwhile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_threads(options.threads)
    torch.manual_seed(0)
    if options.beside:
        measure_beside(options)
    elif options.prefill:
        measure_prefill(options)
    else:
        measure_towers(options)


if __name__ == "__main__":
    main()
