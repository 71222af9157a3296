"""A process that compiles a chat template and renders it, with bounds on its memory (text/chat.py).

A template is third-party code. The sandbox refuses what it knows to be too much; whatever else it finds to do,
it does here, where it can be killed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from types import CodeType
from typing import Any

from paceline.text import sandbox

MEMORY = 512 * 2**20  # bytes of address space
TIMEOUT = 5.0  # seconds for one rendering; the sandbox's own bounds come before


def limits() -> dict[str, float]:
    """The sandbox's bounds, which hold in the process, too."""
    return {"steps": sandbox.MAX_STEPS, "seconds": sandbox.MAX_SECONDS}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    hello = json.loads(sys.stdin.readline())
    sandbox.MAX_STEPS, sandbox.MAX_SECONDS = hello["steps"], hello["seconds"]
    try:
        code = _compiled(hello["source"])
        _answer({"error": code} if isinstance(code, str) else {"error": None})
        for line in sys.stdin:
            assert isinstance(code, CodeType), "nothing is asked of a template that cannot be read"
            _answer(_rendered(code, json.loads(line)))
    except MemoryError:
        os._exit(1)  # a new process has all its memory again


def _compiled(source: str) -> CodeType | str:
    """The template's code, or what is wrong with it."""
    try:
        return sandbox.Sandbox().compile(source)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  third-party code: `break` outside of a loop is Python's SyntaxError
        return str(error) or type(error).__name__


def _rendered(code: CodeType, values: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": sandbox.Sandbox().run(code, values)}
    except sandbox.MessagesRefused as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        return {"failed": str(error) or type(error).__name__}


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
