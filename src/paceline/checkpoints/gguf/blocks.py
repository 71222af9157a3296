"""The block types of GGUF, which the kernels read as they are: see `paceline.ops.blocks`."""

from paceline.ops.blocks import BY_NAME, DEQUANTIZERS, NAMES_OF_OTHERS, TYPES, BlockType, dequantize

__all__ = ["BY_NAME", "DEQUANTIZERS", "NAMES_OF_OTHERS", "TYPES", "BlockType", "dequantize"]
