"""Small random models of all families, with a drafter where there is one, as orders for `paceline.check.again`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import FAMILIES, build_assistant, build_target  # noqa: E402
from decoders import DECODERS, build_decoder, write_letters  # noqa: E402
from media_models import KINDS, build_seeing  # noqa: E402
from paceline.check.again import Order  # noqa: E402

OPTIONS: dict[str, Any] = {"threads": 2, "max_model_len": 256, "cache_memory": 2**26}
PROMPTS = [[5, 6, 7, 8] * 5, [9, 3, 4, 11, 12, 10] * 4, [7] * 30]
LONG = [[(5 + 37 * i) % 50 + 3 for i in range(1200)]]  # so long that its keys are shared out among threads


def names() -> list[str]:
    return [
        *(f"gemma4-{name}" for name in FAMILIES),
        *DECODERS,
        *(f"seeing-{kind}" for kind in KINDS),
        "long",
    ]


def build(name: str, folder: Path) -> Order:
    """Make the model of a name if it is not there, and say how it is loaded. Every other one in float32."""
    place = folder / name
    drafter, options, prompts = "ngram", dict(OPTIONS), PROMPTS
    make: Callable[[], object]
    if name.startswith("gemma4-"):
        family = name.removeprefix("gemma4-")
        drafter = str(place / "drafter")

        def make() -> None:
            build_target(family, place / "target")
            write_letters(place / "target")
            build_assistant(family, place / "drafter")
    elif name.startswith("seeing-"):
        make = lambda: build_seeing(name.removeprefix("seeing-"), place / "target")  # noqa: E731
        options["image_tokens"] = 70
    elif name == "long":
        make = lambda: build_decoder("llama", place / "target", max_position_embeddings=2048)  # noqa: E731
        options["max_model_len"], prompts = 1400, LONG
    else:
        make = lambda: build_decoder(name, place / "target")  # noqa: E731
    if names().index(name) % 2:
        options["activations"] = "float32"
    done = place / "made.json"
    if not done.exists():
        make()
        done.write_text(json.dumps({"name": name}))
    return Order(str(place / "target"), [drafter], options, prompts)
