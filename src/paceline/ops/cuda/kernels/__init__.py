"""Triton kernels, each over plain tensors: what they compute, and what a row's bits depend on, is in its docstring.

Here belongs what runs on the card. Which kernel runs when belongs to `ops/cuda/lowering.py`.
"""
