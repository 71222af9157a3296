"""A process that compiles grammars, so that one that takes too long, or too much memory, can be killed.

Run as a module it is that process: one JSON object per line in, one per line out (helper.py).
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from paceline.errors import UsageError
from paceline.text.helper import Helper
from paceline.text.vocabulary import Vocabulary

MEMORY = 4 * 2**30  # bytes of address space


class CompilerProcess:
    """Started at the first use, and again after it was killed. One grammar at a time."""

    def __init__(self, vocabulary: Vocabulary, timeout: float) -> None:
        self._vocabulary, self._timeout = vocabulary, timeout
        self._helper = Helper("paceline.text.compiler_process", self._greeting, timeout)

    def check(self, grammar: str) -> None:
        """Raise UsageError unless `grammar` compiles within the time limit."""
        if self._helper.greet() is None:
            raise UsageError("grammars cannot be used: the process that compiles them does not start")
        answer = self._helper.ask({"grammar": grammar})
        if answer is None:
            raise UsageError(
                f"the grammar takes longer than {self._timeout:g} s or too much memory: make it simpler"
            )
        if answer["error"]:
            raise UsageError(f"the grammar cannot be compiled: {' '.join(answer['error'].split())[:300]}")

    def close(self) -> None:
        self._helper.close()

    def _greeting(self) -> dict[str, Any]:
        v = self._vocabulary
        return {"tokenizer": v.tokenizer_json, "size": v.size, "end_ids": v.end_ids}


def main() -> None:
    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    hello = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(hello["tokenizer"], n_vocab=hello["size"], eos_token=hello["end_ids"])
    print("{}", flush=True)
    for line in sys.stdin:
        matcher = llguidance.LLMatcher(tokenizer, json.loads(line)["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error().partition("\n<state>")[0]  # behind it stands a dump of the matcher
        print(json.dumps({"error": error.replace("NoExtensionBias", "nothing can fit it")}), flush=True)


if __name__ == "__main__":
    main()
