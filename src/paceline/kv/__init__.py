"""What a target remembers of texts: pages of keys and values, states of linear attention, shared prefixes,
provisional tails.

Here belongs where something is cached and who may read it. What is computed from it belongs to `ops/`, and which text
gives way when space ends to `engine/reserve.py`.
"""
