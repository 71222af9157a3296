"""How a process of our own is started: with this process's modules, and none that lie in the current folder."""

from __future__ import annotations

import sys

_RUN = (
    "import sys; sys.path[:] = {}; import runpy; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """Runs a module as `python -m` does, which would put the current folder before the library."""
    return [sys.executable, "-P", "-c", _RUN.format(sys.path, module), *arguments]
