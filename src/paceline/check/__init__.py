"""Proves or refutes, on this machine, that speculation changes no text. See docs/how-a-step-works.md for what is
shown.

Here belongs what is played to an engine twice and compared. Servers of others belong to `audit/`, speed to `bench/`.
"""
