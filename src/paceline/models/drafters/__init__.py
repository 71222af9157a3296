"""Networks that draft for one target: their configs, their graphs, and what of a checkpoint they are made of.

Here belongs the network: what it computes of states and tokens. When and how far it drafts belongs to the drafters of
the package (`paceline.drafters`), which hold one of these. `networks` is the list.
"""
