"""Layers that several families share, as graphs over `Ops`, with the configs that describe them.

Here belongs arithmetic that a second family uses, too: attention, latent attention, the delta net, MLPs and experts,
rotary embeddings, and the decoder that is made of them. What one family alone does belongs to its file in
`families/`.
"""
