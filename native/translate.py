"""Translate modules of the package to C, for CMake: `python translate.py SRC OUT MODULE...`, paths below SRC.

mypyc makes one extension of all their code and, for each module, one that only names it, and that Python finds before
the .py file beside it. All is written below OUT; OUT/extensions.txt has a line for each: its folder, its name, its
sources and the folders to include, separated by `|`.
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
    lines = []
    for extension in mypycify([*options, *modules], group_name="paceline", target_dir=str(target)):
        *packages, name = extension.name.split(".")
        sources, includes = ([str(Path(p).resolve()) for p in own] for own in (extension.sources, extension.include_dirs))
        lines.append("|".join(["/".join([".", *packages]), name, " ".join(sources), " ".join(includes)]))
    (target / "extensions.txt").write_text("\n".join(lines) + "\n")


main(*sys.argv[1:])
