"""Forwards on CUDA devices: Triton kernels and captured graphs, from the recordings that the native runner uses.

`linear`, `rows`, `attention` and `experts` hold the kernels; `weights` what they read; `lowering` makes launches of a
recording, by `launch`; `places` says where values lie, `shape` what a step brings along; `plan` captures and replays;
`runner` is what the rest of the program sees. Models, drafters and the policy do not belong here.
"""

from __future__ import annotations

import importlib.util

import torch

CAPABILITY = 8, 0  # the least that has matrix instructions for bfloat16


def why_not(device: torch.device) -> str | None:
    """None if the kernels can run on a CUDA device, else one line that says why not and what to do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, which comes with PyTorch's CUDA builds: pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"a card of compute capability {capability[0]}.{capability[1]} is older than 8.0, which the kernels need"
    return None
