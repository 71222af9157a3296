"""Requests in, deltas out: the step, and what it plans, drafts, reserves, verifies and emits.

Here belongs what happens between two forwards, and who may call the engine. Draft lengths belong to `control/`, pages
to `kv/`, functions of logits to `sampling/`, and what a server says to `server/`.
"""
