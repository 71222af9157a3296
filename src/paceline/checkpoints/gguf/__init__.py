"""GGUF files: what they hold (reader), the values of their blocks (blocks), names, config and tokenizer.

Here belongs what GGUF files mean. Writing them belongs to `convert/`, and packing blocks for kernels to `ops/tiles.py`.
"""
