"""What a tower of Gemma 4 E2B's shape costs here, with random weights: time by budget, and memory above its weights.

    python recipes/towers/measure.py --threads 2 --budgets 70 140 280

Needs the extra `dev` (transformers) for the comparison. Run it on a machine that does nothing else: times are the best of
`--rounds`, ours and transformers' in turns.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from transformers import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

from paceline.media.pixels import Cut, resized
from paceline.models.towers.base import whole
from paceline.models.towers.gemma4_vision import GemmaVision, parse_vision

WIDTH = 1536  # of the language model


def peak() -> float:
    """MB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def best(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def towers() -> tuple[GemmaVision, Gemma4VisionModel]:
    """Ours and transformers', with the same weights."""
    config = Gemma4VisionConfig(use_clipped_linears=True, position_embedding_size=10240)
    theirs = Gemma4VisionModel(config).eval()
    held = {
        f"vision_tower.{name}": tensor
        for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers())
    }
    held["embed_vision.embedding_projection.weight"] = torch.randn(WIDTH, config.hidden_size) * 0.03
    for name, tensor in held.items():
        if name.endswith(("_min", "_max")):
            tensor.fill_(-4.0 if name.endswith("_min") else 4.0)
    return GemmaVision(parse_vision(config.to_dict(), WIDTH, False), lambda name: held[name].detach()), theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budgets", type=int, nargs="+", default=[70, 140, 280])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="ours only: memory is that of our tower")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ours, theirs = towers()
    print(
        f"{'budget':>7}{'patches':>9}{'ours s':>9}{'theirs s':>10}{'ours GFLOP/s':>14}{'peak MB above':>15}"
    )
    for budget in options.budgets:
        height, width = resized(480, 640, Cut(budget, 16, 3))
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
        count = (height // 16) * (width // 16)
        flat = (
            pixels.view(height // 16, 16, width // 16, 16, 3).transpose(1, 2).reshape(1, count, 768) / 255.0
        )
        places = torch.stack(
            (torch.arange(count) % (width // 16), torch.arange(count) // (width // 16)), dim=-1
        )[None]
        before, mine, other = peak(), float("inf"), float("inf")
        mine = best(lambda pixels=pixels: whole(ours.slices(pixels)))  # type: ignore[misc]
        above = peak() - before
        for _ in range(options.rounds):
            mine = min(mine, best(lambda pixels=pixels: whole(ours.slices(pixels))))  # type: ignore[misc]
            if not options.alone:
                with torch.no_grad():
                    other = min(other, best(lambda flat=flat, places=places: theirs(flat, places)))  # type: ignore[misc]
        work = 302e6 * count + 4 * count**2 * 768 * 16
        print(f"{budget:>7}{count:>9}{mine:>9.2f}{other:>10.2f}{work / mine / 1e9:>14.0f}{above:>15.0f}")


if __name__ == "__main__":
    main()
