"""Triton's interpreter, which runs kernels on a CPU: switched on before the first import of triton."""

from __future__ import annotations

import os
from typing import Any


def switch_on() -> None:
    """Raises ImportError where there is no triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # numpy from 2.4 on makes no int of an array of one element
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
