"""What paceline reaches on the GPU at hand: one command, four minutes at most, a row as soon as it is known.

    python recipes/gpu/measure.py --out card.json [--budget 240] [--only 31b,checks] [--list]
    python recipes/gpu/measure.py --dry          # everything on the CPU with tiny models: whether the code runs

The sections stand in order of importance. One that would not end within the budget is left out, one that fails is
noted and the next begins. After a fault of the GPU no call of a process works any more, and a kernel may never end:
then a fresh process goes on with what is left. Weights are random, of published shapes, and made on the device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AGAIN = 75  # the exit code of a process of which nothing on the GPU can be used any more
HERE = {"--worker", "--dry", "--list", "--help"}  # options with which this process does it all


def supervise() -> int:
    """Run the measurement in a process of its own, and a fresh one after each fault: what it held is free then."""
    more: list[str] = []
    while (code := subprocess.call([sys.executable, *sys.argv, "--worker", *more])) == AGAIN:
        more = ["--resume"]
    return code


def main() -> None:
    if not HERE & set(sys.argv):
        sys.exit(supervise())  # torch is not loaded here
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parent), str(here.parents[2] / "src")]
    from sections import main as measure

    measure()


if __name__ == "__main__":
    main()
