"""A Gemma 4 folder (target, assistant or draft model) as GGUF, written by llama.cpp's own converter.

    python recipes/compare/gguf_export.py FOLDER OUT.gguf --llama-cpp LLAMA_CPP [--type f32]

LLAMA_CPP is a llama.cpp source tree; its `convert_hf_to_gguf.py` brings its own `gguf` and needs torch, transformers and
PyYAML (all there after `pip install '.[dev]'`). `f32` holds bfloat16 weights exactly; `bf16` keeps the bytes, but
llama.cpp then also rounds the activations of every product to bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from paceline.errors import LoadError, PacelineError, UsageError

TYPES = ("f32", "bf16", "f16", "q8_0")
CONVERTER = "convert_hf_to_gguf.py"


def export(folder: Path, out: Path, llama_cpp: Path, kind: str = "f32") -> Path:
    """Write `folder` to `out` with weights of `kind`; returns `out`.

    Raises UsageError if something named is not there, LoadError with the converter's last words if it fails.
    """
    converter = llama_cpp / CONVERTER
    if kind not in TYPES:
        raise UsageError(f"type {kind!r} is unknown: use one of {', '.join(TYPES)}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: give a folder in Hugging Face layout")
    if not converter.is_file():
        raise UsageError(f"{llama_cpp} has no {CONVERTER}: give a llama.cpp source tree with --llama-cpp")
    command = [sys.executable, str(converter), str(folder), "--outtype", kind, "--outfile", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        out.unlink(missing_ok=True)
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LoadError(f"{CONVERTER} could not write {folder.name} as {kind}: {last}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--type", choices=TYPES, default="f32")
    args = parser.parse_args()
    try:
        out = export(args.folder, args.out, args.llama_cpp, args.type)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
