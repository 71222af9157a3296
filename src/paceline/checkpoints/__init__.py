"""Files of weights -> checked, named tensors: safetensors, GGUF, and what was quantized or packed by other tools.

Here belongs how bytes become a named tensor, and what the small files beside them say. What a tensor is used for
belongs to `models/`, where a file comes from to `hub/`, and how one is written to `convert/`.
"""
