"""How long a model stays loaded after a request, as Ollama's clients say it."""

from __future__ import annotations

import math
import re
from typing import Any

from paceline.server.params import refuse

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")


def seconds_of(said: Any) -> float | None:
    """Seconds; infinite for a negative value, None where nothing is said. Numbers are seconds, texts as `1h30m`.

    Raises ApiError 400.
    """
    if said is None:
        return None
    if isinstance(said, int | float) and not isinstance(said, bool) and said == said:
        return math.inf if said < 0 else float(said)
    if isinstance(said, str) and len(said) <= 64:
        text = said.strip()
        sign, text = text[:1] == "-", text.removeprefix("-")
        if re.fullmatch(r"\d{1,9}", text):
            return math.inf if sign else float(text)
        parts = _PART.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            return math.inf if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)
    raise refuse("keep_alive", "give seconds, or a time such as 5m or 1h30m; -1 keeps the model loaded")
