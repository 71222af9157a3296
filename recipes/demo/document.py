"""Write CORPUS.md, the list of corpus files and the plot of a finished work folder.

python recipes/demo/document.py --work DIR
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import HERE, read_json, run_main, write_atomic, write_text

INTRO = """# The corpus of the demo pair

Python source under permissive licences: the library of the interpreter that ran the recipe, and the
wheels pinned in `packages.txt`. Gathered by `build.py`; this page is written by `document.py`.

- {train} files, {train_bytes:.1f} MB, are trained on; {held} files, {held_bytes:.2f} MB, are held out:
  no model and no tokenizer was trained on them. The split is by file: one in {one_in}, by a hash of its name.
- `corpus_files.tsv` lists every file (package, version, `held` or `train`, bytes, path).
- Left out: test folders, bundled copies of other packages, tables and generated files, files under
  500 bytes or over 150 kB ({unsuitable} together), {bad} files that are not UTF-8, {same} exact copies,
  {near} near copies (more than 60 % of their longer lines seen before). One package brings at most
  1.5 MB, the standard library four times that.
- A leading comment block that only states copyright and licence is cut. Tabs become four spaces.

The licence is the one each wheel declares.

| package | version | licence | files | held out | kB |
|---|---|---|---:|---:|---:|
"""


def corpus_page(index: dict[str, Any]) -> str:
    """The page with one line per package."""
    groups: dict[tuple[str, str, str], list[tuple[int, bool]]] = defaultdict(list)
    for package, version, licence, _, size, held in index["files"]:
        groups[package, version, licence].append((size, held))
    counts = index["counts"]
    text = INTRO.format(
        train=counts["train"],
        held=counts["held"],
        train_bytes=index["bytes"]["train"] / 1e6,
        held_bytes=index["bytes"]["held"] / 1e6,
        one_in=50,
        unsuitable=counts["unsuitable"],
        bad=counts["not UTF-8"],
        same=counts["duplicate"],
        near=counts["near copy"],
    )
    for (package, version, licence), files in sorted(groups.items(), key=lambda item: item[0][0].lower()):
        held = sum(1 for _, is_held in files if is_held)
        size = sum(size for size, _ in files) // 1000
        text += f"| {package} | {version} | {licence} | {len(files)} | {held} | {size} |\n"
    text += "\n## Held-out files\n\n"
    text += "".join(f"- `{p}/{path}`\n" for p, _, _, path, _, held in sorted(index["files"]) if held)
    return text


def file_list(index: dict[str, Any]) -> str:
    """Every file in one line."""
    rows = [
        f"{package}\t{version}\t{'held' if held else 'train'}\t{size}\t{path}"
        for package, version, _, path, size, held in sorted(index["files"])
    ]
    return "\n".join(["package\tversion\tsplit\tbytes\tpath", *rows]) + "\n"


def plot(work: Path, out: Path) -> None:
    """Held-out bits per byte over training tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), dpi=110)
    for name, label in (("target", "target"), ("draft", "small draft model")):
        curve = read_json(work / name / "curve.json")
        axes.plot([c[1] / 1e6 for c in curve], [c[2] for c in curve], marker="o", markersize=3, label=label)
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel("held-out bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    write_atomic(out, lambda path: figure.savefig(path, format="png"))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    index = read_json(args.work / "corpus/index.json")
    write_text(HERE / "CORPUS.md", corpus_page(index))
    write_text(HERE / "corpus_files.tsv", file_list(index))
    if (args.work / "target/curve.json").exists():
        plot(args.work, HERE / "bits_per_byte.png")
    return 0


if __name__ == "__main__":
    run_main(main)
