"""Gemma 4: its config (config), the tensors and arithmetic of a layer (layers), and the target (target).

Here belongs what only Gemma 4 does: per-layer embeddings, shared K/V, two kinds of layers. Its MTP drafter belongs to
`models/drafters/`, its eyes and ears to `models/towers/`.
"""
