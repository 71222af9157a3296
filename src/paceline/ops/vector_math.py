"""The first call of torch's vector math in a process is made here, by one thread.

torch computes cos, sin, exp, log, tanh, erf and their like on contiguous floats by MKL's VML, where it was built with it
(on x86). VML asks at its first call what the processor is. `mkl_vml_serv_cpu_detect` (MKL 2024.2, in torch 2.13.0)
stores the answer in a static variable and only then puts its number among the kernels in its place:

    cpu = mkl_serv_vml_cpu_detect();   // 9 on an Intel processor with AVX-512
    if (cpu <= 9) cpu = numbers[cpu];  // 5: the last of six sets of kernels for each of three accuracies

A second thread that comes in between goes on with the first number. 9 points into the next accuracy, at kernels for AVX2
with 11 right bits of 24, and the thread's whole share of that call is computed by them. On AMD both numbers are 0, so
nothing is seen. `recipes/processes/first_calls.py` shows it on any processor. Once it has its value, the variable stays.
"""

from __future__ import annotations

import torch


def settle() -> None:
    """Call it before torch computes with several threads. All functions of VML share the variable, so one is enough."""
    torch.ones(8).cos()  # so few that the calling thread does it alone
