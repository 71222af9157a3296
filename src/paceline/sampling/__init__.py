"""Shaping, noise, choice and verification: pure functions of tensors and of what a request asked for.

Here belongs what makes a token of logits. Who asks, and which rows belong to which text, belongs to `engine/`; the
same in C++ or on a GPU to `ops/`.
"""
