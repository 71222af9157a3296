"""Proves or refutes, on this machine, that speculation changes no text. See docs/controller.md for what is
shown.
"""
