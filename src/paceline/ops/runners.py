"""Where and with what arithmetic graphs are run: device and runner of an `EngineConfig`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from paceline.config import EngineConfig
from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import UsageError
from paceline.ops.base import Group, Runner
from paceline.ops.reference import EagerRunner

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:N` or `mps`. Raises UsageError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device={name!r} is unknown: use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={name!r}, but {_why_no_cuda()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        there = "only cuda:0 is there" if not last else f"cuda:0 to cuda:{last} are there"
        raise UsageError(f"device={name!r}, but {there}: use one that is, or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device='mps', but this PyTorch has no Metal support here: use device='cpu'")
    return device


def _why_no_cuda() -> str:
    """Why PyTorch sees no GPU, and what to do."""
    if torch.version.cuda is None:
        return "this PyTorch has no CUDA: use device='cpu', or install a CUDA build"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        what = (
            "update the driver, or install a PyTorch that was built for it"
            if "driver" in why
            else "see nvidia-smi"
        )
        return f"{why}: {what}, or use device='cpu'"
    return "this PyTorch sees no CUDA GPU: use device='cpu', or see whether nvidia-smi does"


def pick_runner(
    config: EngineConfig,
    device: torch.device,
    group: Group | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Runner, str]:
    """(runner, what it is): the native kernels where they can run, plain torch elsewhere.

    `say` gets a line where something runs the slow way later on; None: it is logged.
    """
    exact = config.activations == "float32"
    if device.type != "cpu":
        if exact:
            raise UsageError(
                f"activations=float32 is for the CPU; on {device} they follow dtype: set dtype=float32"
            )
        return _device_runner(config, device, group, say)
    if not config.native:
        return EagerRunner(torch.float32, group), "plain torch (native kernels switched off)"
    from paceline.ops import native

    reason = native.why_not()
    if reason is not None:
        return EagerRunner(torch.float32, group), f"plain torch: {reason}"
    rows = max(config.step_tokens, config.prefill_chunk) + config.max_batch * (MAX_DRAFT_TOKENS + 1)
    if rows > native.most_rows():
        raise UsageError(
            f"a step of these sizes may have {rows} rows, at most {native.most_rows()} are computed at once: "
            "use a smaller step_tokens, prefill_chunk or max_batch"
        )
    threads = config.threads or native.default_threads()
    which = f"{native.isa(exact)}, {threads} threads"
    if wrong := native.left_out():
        (say or log.warning)(
            f"kernels that compute wrongly on this processor are not used: {wrong}; others are, which are slower: "
            "`paceline self-test` says what to do"
        )
        which += f", without {wrong}"
    return native.NativeRunner(threads, exact, group), f"native kernels ({which})"


def _device_runner(
    config: EngineConfig, device: torch.device, group: Group | None, say: Callable[[str], None] | None
) -> tuple[Runner, str]:
    """Captured kernels of our own on CUDA, plain torch where they cannot run, with the reason."""
    dtype = DTYPES.get(config.dtype, torch.bfloat16)
    plain = EagerRunner(dtype, group)
    if device.type != "cuda":
        return plain, f"plain torch on {device}"
    if not config.native:
        return plain, f"plain torch on {device} (kernels switched off)"
    if group is not None:
        return plain, f"plain torch on {device}: a target over several processes has no captured kernels yet"
    if config.adapters:
        return plain, f"plain torch on {device}: adapters that requests choose have no captured kernels yet"
    from paceline.ops.cuda import why_not

    reason = why_not(device)
    if reason is not None:
        return plain, f"plain torch on {device}: {reason}"
    from paceline.ops.cuda.runner import CudaRunner

    runner = CudaRunner(device, dtype, note=say or log.warning)
    return runner, f"captured kernels on {device} ({torch.cuda.get_device_name(device)})"
