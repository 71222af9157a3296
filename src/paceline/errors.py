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


class PacelineError(Exception):
    """Base of all deliberate errors; the command line prints the message without a traceback."""

    exit_code = 1


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


def unreadable(token: int, readable: int) -> PromptError:
    """For a token that a model has no row for in one of its tables."""
    return PromptError(
        f"token id {token} is past the model's per-layer embedding, which has rows for {readable} tokens: tokens were "
        "added and that table was not resized; write the prompt without added tokens, or resize it and save the model"
    )
