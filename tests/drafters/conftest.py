"""A small target, and both runners."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoders import build_decoder
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "target"
    build_decoder("llama", folder)
    return folder


@pytest.fixture(params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "torch":
        return EagerRunner()
    if not native.available():
        pytest.skip("needs the compiled kernels")
    return native.NativeRunner(1, exact=True)
