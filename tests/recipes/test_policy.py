"""The simulated clock of the policy recipe: real texts, fixed prices, the same figures in every run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "policy" / "simulate.py"


def simulate(*options: str) -> list[str]:
    command = [sys.executable, str(RECIPE), "--texts", "1", "--tokens", "24", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_the_simulation_repeats_itself_and_follows_the_prices() -> None:
    usual, steep = simulate(), simulate("--steep", "3")
    assert simulate() == usual
    assert len([line for line in usual if line.startswith("T=")]) == 2 * 8
    assert [line.split()[0] for line in usual if "means" in line] == ["T=0.0", "T=0.8"]

    def fixed(lines: list[str]) -> list[float]:
        return [float(line.split()[7]) for line in lines if " 4: " in line]

    assert all(dear < cheap for dear, cheap in zip(fixed(steep), fixed(usual), strict=True))


def test_it_may_learn_the_prices_from_what_it_is_billed() -> None:
    believing, learning = simulate("--belief", "0.5"), simulate("--belief", "0.5", "--learn")
    assert len(learning) == len(believing)
    fixed = [line for line in believing if line.startswith("T=") and " auto " not in line]
    assert all(line in learning for line in fixed)  # what is not the controller's to decide costs the same


def test_texts_side_by_side_share_steps() -> None:
    alone, together = simulate("--texts", "2"), simulate("--texts", "2", "--batch", "2")
    assert len(together) == len(alone)
    assert together != alone
    for line in together[1:]:
        assert 0.3 < float(line.split(" auto ")[1].split()[0]) < 4.0, line  # a text cannot outrun its drafts
    command = [sys.executable, str(RECIPE), "--texts", "3", "--batch", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert refused.returncode == 2
    assert "--texts must be a multiple of --batch" in refused.stderr
