"""Which PyTorch this machine needs, for scripts/setup: pip's arguments on stdout, one line for the user on stderr.

    python scripts/choose_torch.py [--free MEGABYTES]

PyTorch's CPU build where there is no NVIDIA driver, the one with CUDA where there is one. The plain index has only the one with
CUDA for Linux, which is gigabytes: so a CPU build is asked for by its full name, which is never anything else.
Uses the standard library only, and runs on Pythons that paceline does not, to say so.
"""

import argparse
import os
import platform
import shutil
import sys
import urllib.error
import urllib.request

VERSION = "2.13.0"
INDEX = "https://download.pytorch.org/whl/"
CPU_SIZE, CPU_INSTALLED = 190, 900  # megabytes; with what PyTorch itself depends on
CUDA_SIZE, CUDA_INSTALLED = 2800, 6500  # an estimate: it depends on the version of CUDA
REST, REST_INSTALLED = 80, 350  # paceline[serve] with its model files, and SmolLM2's 98 MB are not in it
DRIVER = "/proc/driver/nvidia/version"
OLDEST, NEWEST, LEAST_GLIBC = (3, 11), (3, 13), (2, 28)


def unusable(version, libc):
    """One line that says why this Python or C library will not do, else None. `version`: (3, 12); `libc`: as libc_ver."""
    if not OLDEST <= version <= NEWEST:
        wanted = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
        return "paceline needs Python %s, this one is %d.%d: set PYTHON=python3.12, say, and run it again" % (
            wanted,
            *version,
        )
    name, number = libc
    if sys.platform == "linux":
        if name != "glibc":
            return (
                "PyTorch has no packages for a C library other than glibc (this is %s): use a glibc system or image"
                % (name or "musl, it seems")
            )
        parts = tuple(int(part) for part in number.split(".")[:2] if part.isdigit())
        if parts and parts < LEAST_GLIBC:
            return "PyTorch needs glibc 2.28 or later, this is %s: use a newer system, or an image" % number
    return None


def choose(driver, system, reachable):
    """(pip's arguments, what it is, megabytes to download, megabytes installed)."""
    if system != "linux":
        return ["torch==" + VERSION], "PyTorch " + VERSION, CPU_SIZE, CPU_INSTALLED
    if driver:
        return (
            ["torch==" + VERSION],
            "PyTorch %s with CUDA, for the NVIDIA driver that is here" % VERSION,
            CUDA_SIZE,
            CUDA_INSTALLED,
        )
    name = "PyTorch %s, its CPU build" % VERSION
    arguments = ["torch==%s+cpu" % VERSION]
    if reachable:
        return [*arguments, "--extra-index-url", INDEX + "cpu"], name, CPU_SIZE, CPU_INSTALLED
    return (
        arguments,
        name + " by name from your own index (PyTorch's cannot be reached)",
        CPU_SIZE,
        CPU_INSTALLED,
    )


def reachable(url, seconds=5.0):
    """Whether an index answers, through the proxy that the environment names."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.status == 200
    except (OSError, ValueError):  # urllib's errors are OSErrors
        return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--free", type=int, help="megabytes free, instead of what is")
    given = parser.parse_args()
    wrong = unusable(sys.version_info[:2], platform.libc_ver() if sys.platform == "linux" else ("", ""))
    if wrong:
        sys.exit("scripts/setup: " + wrong)
    driver = os.path.exists(DRIVER)
    arguments, what, size, installed = choose(
        driver, sys.platform, not driver and reachable(INDEX + "cpu/torch/")
    )
    free = shutil.disk_usage(".").free // 2**20 if given.free is None else given.free
    need = size + installed + REST + REST_INSTALLED
    if free < need:
        sys.exit(
            "scripts/setup: %d MB are free here, and about %d are needed: make room, then run it again"
            % (free, need)
        )
    print(
        "%s: about %d MB to download, %d MB installed; then paceline and the rest: %d MB, %d MB"
        % (what, size, installed, REST, REST_INSTALLED),
        file=sys.stderr,
    )
    print("\n".join(arguments))


if __name__ == "__main__":
    main()
