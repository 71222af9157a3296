"""`paceline bench` as a user runs it, on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from paceline.cli.bench import command


def test_further_rounds_are_measured_until_the_ratios_are_known(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    cell, short = (
        ["-w", "code", "-b", "1", "-t", "0", "-k", "2"],
        ["--rounds", "2", "--tokens", "4", "--min-seconds", "0"],
    )
    result = CliRunner().invoke(
        command, [*cell, *short, "--within", "1e-9", "--seconds", "60", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    counts = [line["ratio"]["count"] for line in json.loads(out.read_text())["lines"]]
    assert counts == [40, 40]  # none and two tokens: twenty times as many as were asked for
    assert "2 of 2 ratios are not known to within 0.00%" in result.output


def test_what_no_ratio_can_be_known_to_is_refused() -> None:
    result = CliRunner().invoke(command, ["--within", "0"])
    assert result.exit_code == 2
    assert "--within" in result.output
