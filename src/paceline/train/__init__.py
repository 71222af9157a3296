"""Training drafters for frozen targets.

Here belongs what all methods share: capture, rounds, the loop, export. What one kind of drafter does differently
belongs to `methods/`, and drafting with the result to `drafters/`.

From Python, with token windows at hand (an array [N, T], one text per row, or `pack(texts, length)`):

    from paceline.train import Recipe, TrainOptions, Windows, distil

    done = distil(
        "target-folder", Windows.of_array(train), Windows.of_array(held), "drafter-folder",
        Recipe(
            TrainOptions(steps=1000, batch=8, length=256, lr=1e-3, draft_tokens=4),
            init="scratch",  # or a drafter's folder, or a drafter's config.json as a dict
            method=Eagle3(vocabulary=8192),  # or GemmaAssistant(HeadOptions("centroid", recall=0.99))
        ),
        report=print,  # gets each entry: {"step", "loss", ...} or {"step", "held_out": {...}}
    )
    done.after.greedy_tokens  # expected tokens per target step at temperature 0

`out` then holds a drafter that paceline loads; `out/run` holds the checkpoint, and the
same call resumes it. The command `paceline train` does the same from files, with a comparison and a model
card.
"""

from paceline.train.capture import TargetTeacher
from paceline.train.distil import Distilled, Recipe, distil
from paceline.train.methods import DFlash, DFlash2, DSpark, Eagle3, GemmaAssistant, Mtp
from paceline.train.methods.gemma_assistant import HeadOptions
from paceline.train.options import TrainOptions
from paceline.train.windows import Text, Windows, pack

__all__ = [
    "DFlash", "DFlash2", "DSpark", "Distilled", "Eagle3", "GemmaAssistant", "HeadOptions", "Mtp", "Recipe",
    "TargetTeacher", "Text", "TrainOptions", "Windows", "distil", "pack",
]  # fmt: skip
