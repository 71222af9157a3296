"""The model of a conversation, which `/model` and `/drafter` replace while the talk goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import PacelineError
from paceline.llm import LLM

Load = Callable[..., LLM]  # (target, **options of the engine)


class Loaded:
    """One model at a time: the old one's weights are given back before the next are read."""

    def __init__(self, target: str, options: Mapping[str, Any], load: Load) -> None:
        """`options`: of the engine, as `LLM` takes them. Raises what `load` raises."""
        self.target, self.options, self._load = target, dict(options), load
        self.llm = load(target, **self.options)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *what: object) -> None:
        self.llm.close()

    def change(self, target: str, drafter: str | None) -> LLM:
        """Load `target` with a drafter, by default the one that fits it. Raises what loading raises, with what was
        loaded before in place again."""
        options = {name: value for name, value in self.options.items() if name != "drafter"}
        options |= {} if drafter is None else {"drafter": drafter}
        self.llm.close()
        try:
            self.llm = self._load(target, **options)
        except (PacelineError, OSError, KeyboardInterrupt):
            self.llm = self._load(self.target, **self.options)
            raise
        self.target, self.options = target, options
        return self.llm
