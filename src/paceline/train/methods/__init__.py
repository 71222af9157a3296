"""What can be trained: one loop, a module for each method of drafter_kinds.py. To add one: CONTRIBUTING.md.

Here belongs what one kind of drafter does differently. What all share belongs to the room above. The class of a method
is its module's `METHOD`, and an attribute of this package by its own name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.drafter_kinds import TRAININGS, usual_training
from paceline.errors import UsageError
from paceline.models.config import parse_target, read_config
from paceline.train.methods.base import Method


def _method(name: str) -> Any:
    return importlib.import_module(f"paceline.train.methods.{name.replace('-', '_')}").METHOD


METHODS: Mapping[str, Any] = MappingProxyType({name: _method(name) for name in TRAININGS})  # name -> class


def __getattr__(name: str) -> Any:
    method = next((method for method in METHODS.values() if method.__name__ == name), None)
    if method is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return method


def method_for(target: Path) -> str:
    """The name of the method that fits a target: Gemma 4 has its own kind of drafter."""
    return usual_training(parse_target(read_config(target)).model_type)


def method_of(folder: Path) -> Method:
    """The method that makes drafters like the one in a folder. Raises UsageError and LoadError."""
    raw = read_config(folder)
    fitting: list[Method] = [method() for method in METHODS.values() if method.reads(raw)]
    if not fitting:
        raise UsageError(f"{folder} holds no drafter of a method that is trained: {', '.join(METHODS)}")
    return fitting[0]


__all__ = ["METHODS", "Method", "method_for", "method_of"]
