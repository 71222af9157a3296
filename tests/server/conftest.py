"""Fixtures of the server's tests."""

from server.grammars import setup

__all__ = ["setup"]
