"""Import it where a test runs kernels in Triton's interpreter, which tests/conftest.py switches on: loops whose ends are
numbers of the device run then. Numpy from 2.4 on makes no int of an array of one element, as the interpreter asks it to.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _masked(real: Any, at: int) -> Any:
    """With masks that are booleans: the interpreter's own `&` of a row and a number gives integers."""

    def run(self: Any, *args: Any) -> Any:
        mask = args[at]
        mask = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
        return real(self, *args[:at], mask, *args[at + 1 :])

    return run


interpreter._patch_lang_tensor = _patched
_builder = interpreter.InterpreterBuilder
_builder.create_masked_load = _masked(_builder.create_masked_load, 1)
_builder.create_masked_store = _masked(_builder.create_masked_store, 2)
