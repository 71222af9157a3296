"""Every error that paceline raises on purpose. Each message says what is wrong and what to do next.

PacelineError
├── UsageError            a value, option or combination that cannot work          (exit code 2)
│   └── PromptError       empty, too long, or with token ids out of range
├── LoadError             a checkpoint or config that cannot be used               (exit code 3)
│   ├── ConfigError       unknown model_type, missing or contradictory fields
│   ├── WeightsError      missing, extra, duplicated, misshapen or corrupt tensors
│   └── PairError         a drafter that was made for another target
├── CapacityError         not enough memory or cache space                         (exit code 4)
├── RequestFailed         one request ended in an error; its neighbours are untouched (exit code 5)
└── EngineLost            a process that computes a share of the target has ended  (exit code 6)
"""

import re

_MOST, _WORD = 2000, 500  # characters of a message, and of what is written in it without a space
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """One line that a terminal can be given, whatever names of files, tensors or fields stand in it.

    Control characters, among them colours and what turns the direction of writing, become escapes; long parts are cut.
    """
    text = re.sub(rf"\S{{{_WORD},}}", lambda word: _cut(word[0], 160, 40), text)
    text = _UNPRINTABLE.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)
    return text if len(text) <= _MOST else _cut(text, _MOST - 500, 480)


def _cut(text: str, first: int, last: int) -> str:
    return f"{text[:first]}...{text[-last:]}"


class PacelineError(Exception):
    """Base of all deliberate errors; the command line prints the message without a traceback."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class UsageError(PacelineError):
    exit_code = 2


class PromptError(UsageError):
    pass


class LoadError(PacelineError):
    exit_code = 3


class ConfigError(LoadError):
    pass


class WeightsError(LoadError):
    pass


class PairError(LoadError):
    pass


class CapacityError(PacelineError):
    exit_code = 4


class RequestFailed(PacelineError):
    exit_code = 5


class EngineLost(PacelineError):
    exit_code = 6


_SHOWN = 80  # characters


def shown(value: object) -> str:
    """A value of the user's as a message quotes it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def sized(count: float) -> str:
    """Bytes as people read them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def unreadable(token: int, readable: int) -> PromptError:
    """For a token that a model has no row for in one of its tables."""
    return PromptError(
        f"token id {token} is past the model's per-layer embedding, which has rows for {readable} tokens: tokens were "
        "added and that table was not resized; write the prompt without added tokens, or resize it and save the model"
    )
