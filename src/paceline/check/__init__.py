"""Proves or refutes, on this machine, that speculation changes no text. See docs/how-a-step-works.md for what is
shown.
"""
