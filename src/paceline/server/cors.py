"""Which pages of other origins may ask here, in a browser's words. Off unless an origin is named.

Credentials are never allowed: a page has to know the key itself, it cannot use what a browser has kept.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.responses import Response

_NAMES = re.compile(r"[A-Za-z0-9\-]+( *, *[A-Za-z0-9\-]+)*")
_KEPT = "600"  # seconds for which a browser remembers a preflight's answer


class Cors:
    def __init__(self, origins: tuple[str, ...]) -> None:
        """`origins`: as browsers write them, or `*`."""
        self._origins, self._all = frozenset(origins), "*" in origins

    def allows(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        return origin is not None and (self._all or origin in self._origins)

    def headers(self, headers: Headers) -> dict[str, str]:
        """For every answer to this request."""
        if not self._origins:
            return {}
        vary = (
            {} if self._all else {"Vary": "Origin"}
        )  # also where it is not allowed: caches must not mix them up
        if not self.allows(headers):
            return vary
        return vary | {"Access-Control-Allow-Origin": "*" if self._all else headers["origin"]}

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """The answer to a browser that asks before it asks, which comes without a key; None if this is no such."""
        if method != "OPTIONS" or "access-control-request-method" not in headers or not self.allows(headers):
            return None
        wanted = headers.get("access-control-request-headers", "")
        names = wanted if _NAMES.fullmatch(wanted) else "authorization, content-type"
        out = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": names,
            "Access-Control-Max-Age": _KEPT,
        }
        if headers.get("access-control-request-private-network") == "true":
            out["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=204, headers=out)
