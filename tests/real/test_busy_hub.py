"""A hub that is busy: asked again after a pause, as often as says so."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub import errors

from paceline.hub import repository


def test_a_hub_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, after a pause; what is wrong for good is said at once."""
    monkeypatch.setattr(repository, "PAUSES", (0.0, 0.0))
    calls = list[int]()

    def ask(*statuses: int) -> str:
        status = statuses[len(calls)] if len(calls) < len(statuses) else 200
        calls.append(status)
        if status == 200:
            return "got"
        answer = httpx2.Response(status, request=httpx2.Request("GET", "http://hub/x"))
        try:
            raise errors.HfHubHTTPError("busy", response=answer)
        except errors.HfHubHTTPError as error:
            raise errors.LocalEntryNotFoundError("not here") from error

    for statuses, tries in (((), 1), ((429,), 2), ((500, 503), 3)):
        calls.clear()
        assert repository.patiently(lambda given=statuses: ask(*given)) == "got"
        assert len(calls) == tries
    for statuses, tries in (((404,), 1), ((429, 429, 500), 3)):
        calls.clear()
        with pytest.raises(errors.LocalEntryNotFoundError):
            repository.patiently(lambda given=statuses: ask(*given))
        assert len(calls) == tries
