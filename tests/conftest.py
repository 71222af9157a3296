"""What all tests share: nothing that start-up measures goes into the user's own cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


@pytest.fixture(scope="session", autouse=True)
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PACELINE_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield
