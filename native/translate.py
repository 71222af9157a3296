"""Translate modules of the package to C, for CMake: `python translate.py SRC OUT MODULE...`, paths below SRC.

mypyc makes one extension of all their code and, for each module, one that only names it, and that Python finds before
the .py file beside it. All is written below OUT; OUT/extensions.cmake calls `add_translated` for each, with its folder,
its name, its sources and the folders to include.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mypyc.build import mypycify

# Other packages are not looked at: the same code comes out, whatever is installed. Errors are what `mypy` tells.
SETTINGS = """
[mypy]
python_version = 3.11
no_site_packages = True
ignore_missing_imports = True
ignore_errors = True
"""


def main(source: str, out: str, *modules: str) -> None:
    target = Path(out).resolve()
    target.mkdir(parents=True, exist_ok=True)
    settings = target / "mypy.ini"
    settings.write_text(SETTINGS)
    os.chdir(source)
    options = [f"--config-file={settings}", f"--cache-dir={target / 'cache'}"]
    calls = []
    for extension in mypycify([*options, *modules], group_name="paceline", target_dir=str(target)):
        *packages, name = extension.name.split(".")
        paths = [";".join(Path(p).resolve().as_posix() for p in own) for own in (extension.sources, extension.include_dirs)]
        calls.append(f'add_translated("{"/".join([".", *packages])}" {name} "{paths[0]}" "{paths[1]}")\n')
    (target / "extensions.cmake").write_text("".join(calls))


main(*sys.argv[1:])
