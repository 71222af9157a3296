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
from paceline.text.schemas import held, held_arguments
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

    def hold(self, schemas: dict[str, Any], arguments: bool) -> dict[str, Any]:
        """The schemas by name as `schemas.held` (or `held_arguments`) makes them, within the time limit. UsageError."""
        answer = self._helper.ask({"schemas": schemas, "arguments": arguments})
        if answer is None:
            raise UsageError(
                f"the schema takes longer than {self._timeout:g} s or too much memory to read: make it simpler"
            )
        if "refused" in answer:
            raise UsageError(answer["refused"])
        return dict(answer["schemas"])

    def lark_of(self, gbnf: str) -> str:
        """A grammar of llama.cpp's in Lark, by llguidance's converter, within the time limit. Raises UsageError."""
        answer = self._helper.ask({"gbnf": gbnf})
        if answer is None:
            raise UsageError(f"the grammar takes longer than {self._timeout:g} s to read: make it simpler")
        if "refused" in answer:
            raise UsageError(f"the grammar cannot be read: {answer['refused']}")
        return str(answer["lark"])

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
        asked = json.loads(line)
        if "schemas" in asked:
            print(json.dumps(_held(asked["schemas"], asked["arguments"])), flush=True)
            continue
        if "gbnf" in asked:
            print(json.dumps(_lark(asked["gbnf"])), flush=True)
            continue
        matcher = llguidance.LLMatcher(tokenizer, asked["grammar"], log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error = matcher.get_error().partition("\n<state>")[0]  # behind it stands a dump of the matcher
        print(json.dumps({"error": error.replace("NoExtensionBias", "nothing can fit it")}), flush=True)


def _lark(gbnf: str) -> dict[str, str]:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return {"lark": gbnf_to_lark(gbnf)}
    except RecursionError:
        return {"refused": "it is nested too deep: make it flatter"}
    except Exception as error:  # noqa: BLE001 - the converter raises nothing more special for a missing rule
        return {"refused": " ".join(str(error).split())[:300]}


def _held(schemas: dict[str, Any], arguments: bool) -> dict[str, Any]:
    made, name = {}, ""
    try:
        for name, schema in schemas.items():  # the last one is named where it fails
            made[name] = held_arguments(schema) if arguments else held(schema)
    except UsageError as error:
        return {"refused": f"{name}: {error}" if name else str(error)}
    except RecursionError:
        return {
            "refused": f"{name + ': ' if name else ''}the schema refers to itself too often: make it flatter"
        }
    return {"schemas": made}


if __name__ == "__main__":
    main()
