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


interpreter._patch_lang_tensor = _patched
