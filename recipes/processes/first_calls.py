"""Does the first call of a function in a process give what the second gives, with two threads? Asked of forked processes.

    python recipes/processes/first_calls.py [--forks 10000] [--as-intel] [--unsettled] [--only cos exp]

torch is imported with one thread, each child sets two, computes twice and compares all bits. `--unsettled` leaves out
paceline's call in one thread (`ops/vector_math.py`). On a processor that is not Intel's, MKL's race changes nothing.
There `--as-intel` writes 9 ("Intel with AVX-512") or 7 ("with AVX2") where MKL keeps what the processor is.
Exits with 1 if a first call differs.

Without paceline, in torch 2.13.0 with MKL 2024.2, this is enough:

    import os, torch                       # with OMP_NUM_THREADS=1
    x = torch.rand(2394, 16)
    for _ in range(1500):
        if not os.fork():
            torch.set_num_threads(2)
            print(end="" if torch.equal(x.cos(), x.cos()) else "differs\\n", flush=True)
            os._exit(0)
        os.wait()
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor], torch.Tensor]
ROWS, WIDTH = 2394, 16  # the angles of a picture, among which it was first seen
INTEL = {
    "AVX512": 9,
    "AVX2": 7,
}  # what MKL calls Intel's processors, by the most that torch finds in this one

# Those that MKL's VML computes (torch 2.13.0): found by writing another number of kernels into its variable.
VML = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "logsumexp", "sin", "sqrt",
    "tan", "tanh",
)  # fmt: skip


def _others() -> dict[str, Function]:
    """What else has something to set up at its first call: BLAS, oneDNN, FFT, loops of torch itself."""
    weight = torch.rand(64, WIDTH)
    small = weight.bfloat16()
    kernel = torch.rand(8, 1, 3)
    return {
        "linear": lambda x: F.linear(x, weight),
        "linear-bfloat16": lambda x: F.linear(x.bfloat16(), small),
        "bmm": lambda x: x.view(9, -1, WIDTH) @ x.view(9, -1, WIDTH).mT,
        "addmv": lambda x: x @ weight[0],
        "conv": lambda x: F.conv1d(x.unsqueeze(1), kernel),
        "conv-bfloat16": lambda x: F.conv1d(x.bfloat16().unsqueeze(1), kernel.bfloat16()),
        "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 9, -1, WIDTH),) * 3),
        "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
        "rms_norm": lambda x: F.rms_norm(x, (WIDTH,)),
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "pow": lambda x: x**1.7,
        "cumsum": lambda x: x.cumsum(-1),
        "sum": lambda x: x.sum(-1),
        "topk": lambda x: x.topk(5).values,
        "sort": lambda x: x.sort(-1).values,
    }


def functions() -> dict[str, Function]:
    return {name: getattr(torch, name) for name in VML if name != "logsumexp"} | {
        "logsumexp": lambda x: x.logsumexp(-1),
        **_others(),
    }


class Detected:
    """Where MKL's VML keeps what the processor is. None of it is there in a torch that was built without MKL.

    Both functions are exported, and begin with an instruction that names its variable: `mov` (8b 05) and `cmpl` (83 3d),
    with a distance of four bytes from the next instruction.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.number = self._variable(library.mkl_vml_serv_cpu_detect, b"\x8b\x05", 6)  # of the kernels, or -1
        self.raw = self._variable(library.mkl_serv_vml_cpu_detect, b"\x83\x3d", 7)  # of the processor, or -1

    def as_intel(self) -> bool:
        """Go on as if an Intel processor had been found. False if this one has too little of it."""
        number = INTEL.get(torch.backends.cpu.get_cpu_capability())
        if number is not None:
            self.raw.value = number
        return number is not None

    @staticmethod
    def _variable(function: object, begin: bytes, length: int) -> ctypes.c_int:
        at = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        if at is None or ctypes.string_at(at, 2) != begin:
            raise LookupError("this MKL looks another way")
        return ctypes.c_int.from_address(at + length + ctypes.c_int32.from_address(at + 2).value)


def detected() -> Detected | None:
    """None where this torch has no such MKL."""
    try:
        return Detected()
    except (OSError, AttributeError, LookupError):
        return None


def differing(function: Function, forks: int, threads: int = 2) -> int:
    """In how many of so many forked processes the first result has other bits than the second."""
    torch.manual_seed(0)
    x = torch.rand(ROWS, WIDTH) * 0.8 + 0.1
    count = 0
    for _ in range(forks):
        child = os.fork()
        if not child:
            code = 2
            try:
                torch.set_num_threads(threads)
                code = int(not torch.equal(function(x), function(x)))
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, 1):
            raise RuntimeError(f"a process ended with {status}")
        count += status
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--forks", type=int, default=10000)
    parser.add_argument("--as-intel", action="store_true")
    parser.add_argument("--unsettled", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="FUNCTION")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.as_intel:
        found = detected()
        if found is None or not found.as_intel():
            parser.error(
                "this torch has no MKL that is known here, or this CPU no AVX2: leave --as-intel out"
            )
    if not args.unsettled:
        from paceline.ops.vector_math import settle

        settle()
    asked = {name: f for name, f in functions().items() if args.only is None or name in args.only}
    total, each = 0, max(1, -(-args.forks // len(asked)))
    for name, function in asked.items():
        total += (count := differing(function, each))
        print(f"{name:16} {count} of {each} processes", flush=True)
    print(f"{total} of {each * len(asked)} first calls differ from the second (torch {torch.__version__})")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
