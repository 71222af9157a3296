"""Matrices that other tools quantized, read without these tools: one table of layouts (table), and what they share.

Here belongs how the tensors of one linear become a matrix in a form that is multiplied with. A layout is recognised by
the ends of its tensors' names and by `quantization_config`; headers alone say what it becomes.
"""
