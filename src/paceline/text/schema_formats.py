"""Formats of JSON schemas as regular expressions: what fits one of them has the format, and its length is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NARROWER = {
    "idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri", "uri-reference": "uri",
    "uri-template": "uri",
}  # fmt: skip
_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_DAY = (
    r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8])"
)
_DATE = rf"({_YEAR}-({_DAY})|{_LEAP}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_N = r"[0-9]{1,6}"
_SPAN = rf"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_HOURS = rf"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_POINTER = r"(/[A-Za-z0-9_.-]{0,64}){0,16}"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9a-fA-F]{1,4}"
_NAME = r"[A-Za-z0-9]{1,15}(-[A-Za-z0-9]{1,15}){0,3}"
_HOST = rf"{_NAME}(\.{_NAME}){{0,4}}"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]{0,200}"
FORMATS: Mapping[str, str] = {
    "email": rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,30}}){{0,2}}@{_NAME}(\.{_NAME}){{1,4}}",
    "hostname": _HOST, "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": rf"(({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,6}}:{_GROUP}|::({_GROUP})?)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"(https?|ftp|file)://{_HOST}(:[1-9][0-9]{{0,3}})?(/{_PATH})?(\?{_PATH})?(#{_PATH})?",
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_N}W|{_SPAN}({_HOURS})?|{_HOURS})",
    "json-pointer": _POINTER, "relative-json-pointer": f"(0|[1-9][0-9]?)(#|{_POINTER})",
}  # fmt: skip


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    """`format` by a pattern of our own, by llguidance, or left out as an annotation."""
    name = schema.get("format")
    name = _NARROWER.get(name, name) if isinstance(name, str) else None
    if "format" not in schema:
        return schema
    rest = {k: v for k, v in schema.items() if k != "format"}
    if name is None or name not in FORMATS:
        return rest
    pattern = f"^({FORMATS[name]})$"
    if "pattern" in rest:
        return rest | {"allOf": [*rest.get("allOf", []), {"pattern": pattern}]}
    return rest | {"pattern": pattern}
