"""Triton kernels, each over plain tensors: what they compute, and what a row's bits depend on, stands at each."""
