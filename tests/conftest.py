"""What all tests share: nothing that start-up measures goes into the user's own cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PACELINE_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield
