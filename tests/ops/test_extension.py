"""What an installation has compiled."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files

import pytest


def test_where_the_kernels_are_compiled_so_is_the_controller() -> None:
    """It would run as Python, slower, and say nothing but a line in `paceline info`."""
    try:
        compiled = {
            path.name.split(".")[0] for path in files("paceline") or () if path.suffix in (".so", ".pyd")
        }
    except PackageNotFoundError:
        pytest.skip("paceline is not installed")
    if "_native" not in compiled:
        pytest.skip("it was installed without a compiler")
    assert {"controller", "planner", "budget", "learning", "paceline__mypyc"} <= compiled
