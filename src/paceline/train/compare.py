"""Two drafters for one target, side by side in the real engine: same prompts, same seeds, turn by turn.

One engine holds both, so the target, its cache and the machine are the same; each prompt is written by one
drafter and at once by the other, so a change of the machine's mood meets both. Under `match` both texts are
the same text, which is checked: what differs is only how many target steps it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.capacity import make_cache
from paceline.config import EngineConfig
from paceline.control.fixed import FixedPolicy
from paceline.core import Completion, SamplingParams
from paceline.drafters.base import Drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.errors import RequestFailed
from paceline.models.registry import load_target
from paceline.ops.runners import pick_device, pick_runner
from paceline.train.methods import method_of
from paceline.train.windows import Text

TEMPERATURES = (0.0, 1.0)
BASELINES = ("ngram", "none")  # what a first drafter is compared with


@dataclass(slots=True)
class Score:
    """What one drafter did at one temperature."""

    emitted: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    by_prompt: list[float] = field(default_factory=list)  # tokens per step

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / max(1, self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    def acceptance(self) -> list[float]:
        """Share of drafted tokens that were kept, by position."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def add(self, text: Completion) -> None:
        stats = text.stats
        self.emitted += stats.emitted
        self.steps += stats.steps
        self.seconds += stats.seconds - stats.first_token_seconds
        self.by_prompt.append(stats.tokens_per_step)
        for mine, new in (
            (self.drafted, stats.drafted_by_position),
            (self.accepted, stats.accepted_by_position),
        ):
            mine.extend([0] * (len(stats.drafted_by_position) - len(mine)))
            for i, count in enumerate(new):
                mine[i] += count


Comparison = Mapping[str, Mapping[float, Score]]  # drafter -> temperature -> score


def open_engine(
    target: Path, drafters: Mapping[str, Path], draft_tokens: int, device: str = "auto"
) -> Engine:
    """An engine that can draft with each of the drafters in the named folders, and with the BASELINES, always
    `draft_tokens` tokens. One text at a time.
    """
    config = EngineConfig(
        target=str(target),
        device=device,
        draft_tokens=draft_tokens,
        max_batch=1,
        threads=torch.get_num_threads(),
    )
    place = pick_device(device)
    runner, _ = pick_runner(config, place)
    loaded = load_target(target, device=place, runner=runner)
    makers = {name: method_of(folder).drafter(name, folder, loaded) for name, folder in drafters.items()}
    cache = make_cache(loaded, config, share=0.5)
    known: dict[str, Drafter] = {name: make(config) for name, make in makers.items()}
    return Engine(
        EngineParts(
            target=loaded, cache=cache, drafters=known | {"ngram": NgramDrafter()},
            default_drafter=next(iter(known), "none"), policy=FixedPolicy(draft_tokens),
            draft_tokens=draft_tokens, max_batch=1, prefix_cache=False,
        )
    )  # fmt: skip


def write(engine: Engine, prompt: Seq[int], params: SamplingParams) -> Completion:
    """One text. Raises RequestFailed with what the engine said."""
    (text,) = engine.run({"text": (list(prompt), params)})["text"]
    if text.finish_reason == "error":
        raise RequestFailed(f"the engine failed on a prompt: {text.error}")
    return text


def prompts_of(texts: Seq[Text], count: int, most: int = 64) -> list[list[int]]:
    """The beginnings of held-out texts: up to the last run of counted tokens, at least a third of the text."""
    out = []
    for text in texts:
        begin = text.counted[-1][0] if text.counted else 0
        length = begin or min(most, max(2, len(text.tokens) // 3))
        if 2 <= length < len(text.tokens):
            out.append(list(text.tokens[:length]))
    return out[:count]


def compare(
    engine: Engine,
    drafters: Seq[str],
    prompts: Seq[Seq[int]],
    max_tokens: int,
    temperatures: Seq[float] = TEMPERATURES,
    phase: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Write every prompt with every drafter at every temperature, taking turns. Raises RequestFailed."""
    scores: dict[str, dict[float, Score]] = {d: {t: Score() for t in temperatures} for d in drafters}
    for i, prompt in enumerate(prompts):
        for temperature in temperatures:
            texts = []
            for drafter in drafters if i % 2 == 0 else list(reversed(drafters)):
                params = SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=i, drafter=drafter, ignore_eos=True
                )
                text = write(engine, prompt, params)
                scores[drafter][temperature].add(text)
                texts.append(text.token_ids)
            if any(text != texts[0] for text in texts):
                raise RequestFailed("two drafters gave two texts: this must not be, run `paceline check`")
        phase(i + 1, len(prompts))
    return scores


def mean_tokens(scores: Mapping[float, Score]) -> float:
    """Tokens per step, mean over the temperatures: the number by which drafters are ranked."""
    return sum(s.tokens_per_step for s in scores.values()) / max(1, len(scores))


def rate(scores: Mapping[float, Score]) -> float:
    """Tokens a second over all temperatures."""
    seconds = sum(s.seconds for s in scores.values())
    return sum(s.emitted for s in scores.values()) / seconds if seconds else 0.0
