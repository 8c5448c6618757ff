"""Keeps secrets out of what is written down: values of suspicious names, and credentials within URIs."""

from __future__ import annotations

import re
from typing import Any

_SECRET_NAME = re.compile(
    r"(?i)(^|_)(password|passwd|secret|api_?key|access_?key|credentials?)(_|$)"
    r"|(^|_)(access|api|auth|bearer|hub|refresh|session)_?token$|^token$"
)
_URI_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@")

HIDDEN = "***"
"""What stands in place of a secret."""


def redact(value: Any, name: str = "") -> Any:
    """`value` without its secrets: dicts and lists are walked through, other values are returned as they are."""
    if isinstance(value, str) and value and _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return _URI_CREDENTIALS.sub(r"\1***@", value)
    return value
