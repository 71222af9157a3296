"""Shaping, noise, choice and verification: pure functions of tensors and of what a request asked for."""
