"""Training MTP drafters for frozen Gemma 4 targets.

From Python, with token windows at hand (an array [N, T], one text per row, or `pack(texts, length)`):

    from paceline.train import Recipe, TrainOptions, Windows, distil

    done = distil(
        "target-folder", Windows.of_array(train), Windows.of_array(held), "drafter-folder",
        Recipe(
            TrainOptions(steps=1000, batch=8, length=256, lr=1e-3, draft_tokens=4),
            init="scratch",  # or an assistant folder, or an assistant's config.json as a dict
            head=HeadOptions("centroid", clusters=128, recall=0.99),  # left out: the kind it began with
        ),
        report=print,  # gets each entry: {"step", "loss", ...} or {"step", "held_out": {...}}
    )
    done.after.greedy_tokens  # expected tokens per target step at temperature 0

`out` then holds an assistant that paceline and transformers load; `out/run` holds the checkpoint, and the
same call resumes it. The command `paceline train` does the same from files, with a comparison and a model
card.
"""

from paceline.train.capture import TargetTeacher, load_teacher
from paceline.train.distil import Distilled, Recipe, distil
from paceline.train.heads import HeadOptions
from paceline.train.options import TrainOptions
from paceline.train.windows import Text, Windows, pack

__all__ = [
    "Distilled", "HeadOptions", "Recipe", "TargetTeacher", "Text", "TrainOptions", "Windows", "distil", "load_teacher",
    "pack",
]  # fmt: skip
