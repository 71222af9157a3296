"""Builds the native code with sanitizers, runs it, and plants errors to see that they are found.

    python recipes/sanitizers/run.py [--only address thread] [--parts models tests plants]

README.md says what is run and how to read it. Exits with 1 if a sanitizer has something to say of our code, if a build
with a sanitizer computes other bits, or if a planted error is not found. Needs GCC and the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "recipes" / "processes")]

from plants import PLANTS, Plant  # noqa: E402

MODELS = (
    "gemma4-dense",
    "seeing-moe26b",
    "qwen3_5",
    "long",
)  # drafts in rounds, a tower and experts, states, long texts
TESTS = (
    "tests/ops/test_native_ops.py",
    "tests/ops/test_native_attention.py",
    "tests/ops/test_native_blocks.py",
    "tests/ops/test_native_sampling.py",
    "tests/ops/test_native_forward.py",
    "tests/ops/test_native_nan.py",
    "tests/ops/test_bf16_dot.py",
    "tests/ops/test_pool.py",
    "tests/ops/test_trees.py",
    "tests/ops/test_search.py",
    "tests/media/test_slices.py",
)
Bits = dict[str, dict[str, str]]  # by model, by what was computed
PATIENCE = 3600.0  # seconds of a run
FILLS = (1, 0xA5)  # bytes that new memory is filled with: numbers above and below 0
BEGINS = re.compile(r"^(?:=+\n(?:==\d+==)?(?:ERROR|WARNING): |.*: runtime error: )", re.MULTILINE)
OURS = re.compile(r"native/\w+\.(?:h|cpp)|/_native[\w.-]*\.so")


@dataclass(frozen=True, slots=True)
class Sanitizer:
    name: str
    flags: str
    library: str
    variable: str  # of the environment, with its options
    options: str


SANITIZERS = {
    "address": Sanitizer(
        "address", "address,undefined,float-cast-overflow", "libasan.so", "ASAN_OPTIONS",
        f"detect_leaks=0:detect_odr_violation=0:max_malloc_fill_size={1 << 30}",
    ),
    "thread": Sanitizer(
        "thread", "thread", "libtsan.so", "TSAN_OPTIONS",
        f"suppressions={HERE / 'thread.supp'}:die_after_fork=0:history_size=4:report_signal_unsafe=0:exitcode=0",
    ),
}  # fmt: skip


class Build:
    """The native code as one sanitizer has it, in a folder of its own, with a package to run it in."""

    def __init__(self, sanitizer: Sanitizer, folder: Path) -> None:
        self.sanitizer, self.folder = sanitizer, folder / sanitizer.name
        self.package, self.logs = self.folder / "package", self.folder / "logs"

    def make(self, plant: Plant | None = None) -> None:
        """Copy what has changed, build, and put the extension beside links to the package."""
        self._copy(plant)
        built = self.folder / "build"
        if not (built / "CMakeCache.txt").exists():
            _done("cmake", "-S", self.folder, "-B", built, f"-DPython_EXECUTABLE={sys.executable}",
                  "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DPACELINE_SANITIZE={self.sanitizer.flags}")  # fmt: skip
        _done("cmake", "--build", built, "--parallel", str(os.cpu_count() or 1))
        shutil.rmtree(self.package, ignore_errors=True)
        source = ROOT / "src" / "paceline"
        shutil.copytree(source, self.package / "paceline", copy_function=os.symlink,
                        ignore=shutil.ignore_patterns("_native*", "__pycache__"))  # fmt: skip
        (extension,) = built.glob("_native*.so")
        shutil.copy2(extension, self.package / "paceline")

    def _copy(self, plant: Plant | None) -> None:
        """Files are written only where they differ, so that only those are compiled."""
        (self.folder / "native").mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "CMakeLists.txt", *sorted((ROOT / "native").iterdir())):
            text = path.read_text(encoding="utf-8")
            if plant is not None and path.name == plant.file:
                text = planted(text, plant)
            to = self.folder / path.relative_to(ROOT)
            if not to.exists() or to.read_text(encoding="utf-8") != text:
                to.write_text(text, encoding="utf-8")

    def run(self, what: str, command: list[str], given: str = "", fill: int = FILLS[0]) -> Run:
        """Run Python with this build; what it said, and the reports."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir()
        log = f":log_path={self.logs}/report"
        env = {
            **os.environ,
            "LD_PRELOAD": f"{_library(self.sanitizer.library)} {_library('libstdc++.so')}",
            "PYTHONPATH": f"{self.package}:{HERE}",
            "PYTHONMALLOC": "malloc",  # or Python's buffers lie beside each other, too
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            self.sanitizer.variable: self.sanitizer.options + log,
        }
        if self.sanitizer.name == "address":
            env[self.sanitizer.variable] += f":malloc_fill_byte={fill}"
        begin = time.monotonic()
        fixed = (
            ["setarch", "-R"] if shutil.which("setarch") else []
        )  # the thread sanitizer wants its addresses free
        done = subprocess.run(
            [*fixed, sys.executable, *command], cwd=ROOT, env=env, input=given, capture_output=True, text=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.logs.iterdir())]
        texts.append(done.stderr)  # where that of undefined behaviour writes, whatever it is told
        seconds = time.monotonic() - begin
        return Run(what, done.returncode, done.stdout, done.stderr, reports("\n".join(texts)), seconds)


@dataclass(slots=True)
class Run:
    what: str
    code: int
    out: str
    errors: str
    reports: list[str]  # of our code
    seconds: float

    @property
    def bits(self) -> Bits:
        lines = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return {line["model"]: line["bits"] for line in lines if "bits" in line}


def planted(text: str, plant: Plant) -> str:
    """Raises ValueError where the code has changed so that the plant fits no more."""
    if text.count(plant.old) != 1:
        times = text.count(plant.old)
        raise ValueError(
            f"native/{plant.file} has {plant.old!r} {times} times: mend the plant {plant.name!r}"
        )
    return text.replace(plant.old, plant.new)


def reports(text: str) -> list[str]:
    """Those of `text` in which a frame is ours."""
    starts = [m.start() for m in BEGINS.finditer(text)]
    pieces = [text[at:end] for at, end in zip(starts, [*starts[1:], len(text)])]
    return [piece for piece in pieces if OURS.search(piece)]


def _library(name: str) -> str:
    return _done("g++", f"-print-file-name={name}").strip()


def _done(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def orders(folder: Path) -> str:
    """Small models, made without a sanitizer."""
    import tiny

    return json.dumps({name: asdict(tiny.build(name, folder)) for name in MODELS})


def say(run: Run, wrong: str) -> bool:
    print(f"{'FAILED' if wrong else 'clean '} {run.what} ({run.seconds:.0f} s) {wrong}".rstrip(), flush=True)
    if wrong:
        print("\n".join([*run.reports[:3], run.errors[-3000:] if not run.reports else ""]), flush=True)
    return not wrong


def complaint(run: Run, told: Bits | None) -> str:
    """What is wrong with a run that was to be clean; `told`: the bits that it has to have."""
    if run.reports:
        return f"{len(run.reports)} reports"
    if told is not None and run.bits != told:
        return f"other bits of {', '.join(name for name in told if run.bits.get(name) != told[name])}"
    return f"ended with {run.code}" if run.code else ""


def found(run: Run, plant: Plant, told: Bits) -> bool:
    if plant.report:
        return any(plant.report in report for report in run.reports)
    return run.bits != told and not run.reports


def models(build: Build, asked: str, told: Bits) -> bool:
    name, well = build.sanitizer.name, True
    for fill in FILLS if name == "address" else FILLS[:1]:
        what = f"{name}: models" + (f", memory filled with {fill}" if name == "address" else "")
        run = build.run(what, [str(HERE / "probe.py")], asked, fill)
        well &= say(run, complaint(run, told))
    return well


def tests(build: Build, *_: object) -> bool:
    command = ["-m", "pytest", "-x", "-q", "-s", "-p", "apart", "-p", "no:cacheprovider", *TESTS]
    run = build.run(f"{build.sanitizer.name}: tests", command)
    print("\n".join(run.out.strip().splitlines()[-1:]), flush=True)
    return say(run, complaint(run, None))


def plants(build: Build, asked: str, told: Bits) -> bool:
    well = True
    try:
        for plant in (p for p in PLANTS if p.sanitizer == build.sanitizer.name):
            build.make(plant)
            one = {plant.model: json.loads(asked)[plant.model]}
            run = build.run(plant.name, [str(HERE / "probe.py")], json.dumps(one), FILLS[1])
            seen = found(run, plant, {plant.model: told[plant.model]})
            well &= seen
            how = (plant.report or "other bits") if seen else f"not found, {len(run.reports)} reports"
            print(
                f"{'found ' if seen else 'MISSED'} planted: {plant.name} ({run.seconds:.0f} s): {how}",
                flush=True,
            )
            if not seen:
                print("\n".join([*run.reports[:2], run.errors[-2000:]]), flush=True)
    finally:
        build.make()
    return well


PARTS = {"models": models, "tests": tests, "plants": plants}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SANITIZERS), default=list(SANITIZERS))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitizers")
    args = parser.parse_args()
    folder = args.folder.resolve()
    asked = orders(folder / "models")
    plain = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{HERE}", "OMP_NUM_THREADS": "1"}
    probe = [sys.executable, str(HERE / "probe.py")]
    done = subprocess.run(probe, env=plain, input=asked, capture_output=True, text=True, check=True)
    told = Run("release", 0, done.stdout, "", [], 0).bits
    well = True
    for name in args.only:
        build = Build(SANITIZERS[name], folder)
        build.make()
        for part in args.parts:
            well &= PARTS[part](build, asked, told)
    print("all is well" if well else "something is wrong")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
