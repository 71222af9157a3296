"""What runs under a sanitizer beside the tests: orders of `paceline.check.again` on standard input, their bits as lines.

An order is a forward of a small model by two threads, texts with drafts, and what its tower sees.
"""

from __future__ import annotations

import json
import sys

import apart  # noqa: F401

from paceline.check.again import Order, follow


def main() -> None:
    for name, order in json.loads(sys.stdin.read()).items():
        bits = follow(Order(**order))
        print(json.dumps({"model": name, "bits": bits}), flush=True)


if __name__ == "__main__":
    main()
