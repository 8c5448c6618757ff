"""Keeps secrets out of what is written down: values of suspicious names, and credentials within URIs."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_SECRET_NAME = re.compile(
    r"(?i)(^|_)(password|passwd|secret|api_?key|access_?key|credentials?)(_|$)"
    r"|(^|_)(access|api|auth|bearer|hub|refresh|session)_?token$|^token$"
)
_URI_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@")

HIDDEN = "***"
"""What stands in place of a secret."""
as_typed: list[str] = []
"""Texts NAME=value that were read from files, as if they had been typed."""
hidden: set[str] = set()
"""Secrets that somebody has been given: they are hidden wherever they stand."""


def redact(value: Any, name: str = "") -> Any:
    """`value` without its secrets: dicts and lists are walked through, other values are returned as they are."""
    if isinstance(value, str) and value and _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, HIDDEN)
        return _URI_CREDENTIALS.sub(r"\1***@", value)
    return value


def mask(text: str) -> str:
    """`text` without credentials in URIs, and without the secrets that environment and command line hold.

    Those are the values behind secret names, in `NAME=value`, if they are longer than six characters: a shorter one
    stands in too many other words.
    """
    typed = (argument.removeprefix("--set=").partition("=")[::2] for argument in [*sys.argv, *as_typed])
    named = [(name, value) for name, value in (*os.environ.items(), *typed) if len(value) > 6]
    secrets = {value for name, value in named if _SECRET_NAME.search(name) or name.upper().endswith("_TOKEN")}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return str(redact(text))
