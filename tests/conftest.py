"""What all tests share: start-up measures a little only, and nothing of it goes into the user's own cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


@pytest.fixture(scope="session", autouse=True)
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PACELINE_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        # seconds of each engine: 2 are a tenth of all tests' time
        patch.setattr("paceline.startup.MEASURING", 0.2)
        yield


class OneRay(LoadScopeScheduling):
    """Files go to whichever process is free, so that models are made once; those with a Ray to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith("tests/cluster/") else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneRay:
    return OneRay(config, log)
