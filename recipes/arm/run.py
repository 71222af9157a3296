"""Runs paceline for ARM (aarch64) under emulation, on a machine that is none.

    apt-get install qemu-user-static g++-aarch64-linux-gnu debootstrap      # Debian's names
    python recipes/arm/run.py kernels          # the kernels alone, without Python
    python recipes/arm/run.py wheel            # build/arm/dist/paceline-...-linux_aarch64.whl
    python recipes/arm/run.py root             # a Debian for arm64 in build/arm/root, with that wheel and torch
    python recipes/arm/run.py run -m paceline self-test      # any Python command in it

README.md says what was seen. Speed under emulation says nothing, and is not measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
TRIPLET = "aarch64-linux-gnu"
RELEASE, PYTHON = "bookworm", "3.11"  # of Debian, and the Python that it has
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-dev,libgomp1,libstdc++6"
# What the emulator may be: without and with dot products (asimddp), int8 matrices (i8mm), bfloat16, SVE.
PROCESSORS = ("cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1", "max", "max,sve=off")
GLIBC = range(17, 37)  # of wheels that this Debian can load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arm")
    parser.add_argument("--cpu", default="neoverse-n1", help="as the emulator names it, for `run`")
    parser.add_argument("what", choices=["kernels", "wheel", "root", "run"])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of Python, for `run`")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.what == "kernels":
        return kernels(folder)
    if args.what == "wheel":
        wheel(folder)
    elif args.what == "root":
        root(folder)
    else:
        return run(folder, args.cpu, args.command)
    return 0


def kernels(folder: Path) -> int:
    """`native/selftest.cpp` on each processor: linears and attention against float64, rows bit for bit."""
    wrong = 0
    for isa in ("neon", "generic"):
        program = folder / f"selftest-{isa}"
        flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-static"]
        sources = [ROOT / "native" / "selftest.cpp", ROOT / "native" / "kernels.cpp"]
        done(COMPILER, *flags, "-DPACELINE_ARM", f"-DPACELINE_ISA={isa}", *sources, "-o", program)
        for cpu in PROCESSORS:
            print(f"{cpu:12} ", end="", flush=True)
            wrong += subprocess.run([EMULATOR, "-cpu", cpu, str(program)], check=False).returncode != 0
    return int(wrong > 0)


def wheel(folder: Path) -> None:
    """Cross-compile the wheel, with the headers of the root's Python.

    Without isolation: pip would fetch a CMake for ARM, which does not run here.
    """
    base(folder)
    include = folder / "root" / "usr" / "include"
    define = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_CXX_FLAGS": f"-idirafter {include}",
        "Python_INCLUDE_DIR": str(include / f"python{PYTHON}"),
    }
    env = {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{PYTHON.replace('.', '')}-{TRIPLET}.so",
    }
    if sys.version_info[:2] != tuple(int(part) for part in PYTHON.split(".")):
        sys.exit(f"run this with Python {PYTHON}, as the root has: a wheel is for one Python")
    options = [part for name, value in define.items() for part in ("-C", f"cmake.define.{name}={value}")]
    plain = [
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder / "dist",
        "-C",
        f"build-dir={folder / 'wheel'}",
    ]
    done(sys.executable, "-m", "pip", "wheel", *plain, *options, ROOT, env=env)
    print("\n".join(str(path) for path in sorted((folder / "dist").glob("*.whl"))))


def base(folder: Path) -> None:
    """The files of a Debian for arm64. No program of it is run to make it."""
    to = folder / "root"
    if (to / "usr" / "bin" / f"python{PYTHON}").exists():
        return
    done(
        "debootstrap",
        "--foreign",
        "--variant=minbase",
        "--arch=arm64",
        f"--include={PACKAGES}",
        RELEASE,
        to,
        MIRROR,
    )
    for package in sorted((to / "var" / "cache" / "apt" / "archives").glob("*.deb")):
        files = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", to, "--keep-directory-symlink"], input=files, check=True)
    pretend(to)


def pretend(to: Path) -> None:
    """What libraries read of the processor: the emulator shows them the files of this machine, which is no ARM."""
    features = (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
    )
    part = "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n"
    info = "".join(f"processor\t: {i}\nFeatures\t: {features}\n{part}\n" for i in range(os.cpu_count() or 1))
    write(to / "proc" / "cpuinfo", info)
    write(
        to / "sys/devices/system/cpu/cpu0/regs/identification/midr_el1", "0x00000000413fd0c1\n"
    )  # Neoverse N1


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def root(folder: Path) -> None:
    """The root, with wheels for aarch64 of what paceline needs, torch among them, and paceline's own."""
    base(folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    site = folder / "site"
    platforms = [part for minor in reversed(GLIBC) for part in ("--platform", f"manylinux_2_{minor}_aarch64")]
    options = [
        "--target",
        site,
        "--python-version",
        PYTHON,
        "--only-binary",
        ":all:",
        "--no-compile",
        "--upgrade",
    ]
    done(
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        *platforms,
        "--platform",
        "manylinux2014_aarch64",
        *needs,
    )
    shutil.rmtree(site / "paceline", ignore_errors=True)
    for built in sorted((folder / "dist").glob("paceline-*aarch64.whl")):
        shutil.unpack_archive(built, site, "zip")


def run(folder: Path, cpu: str, command: list[str]) -> int:
    """Python of the root under the emulator. What it starts is emulated only where the system does that (binfmt_misc)."""
    to = folder / "root"
    env = {**os.environ, "PYTHONPATH": str(folder / "site"), "QEMU_CPU": cpu, "QEMU_LD_PREFIX": str(to)}
    return subprocess.run(
        [EMULATOR, to / "usr" / "bin" / f"python{PYTHON}", *command], env=env, check=False
    ).returncode


def done(*command: object, env: dict[str, str] | None = None) -> None:
    said = subprocess.run(
        [str(part) for part in command], env=env, capture_output=True, text=True, check=False
    )
    if said.returncode:
        sys.exit(f"{command[0]} ended with {said.returncode}:\n{(said.stdout + said.stderr)[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
