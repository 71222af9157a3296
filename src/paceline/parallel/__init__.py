"""One target over several processes: who starts them, what they are sent, and how their sums are added.

Here belongs what ranks of one target say to each other. Which part of a weight a rank has belongs to
`models/shards.py`, and several engines behind one server to `cluster/`.
"""
