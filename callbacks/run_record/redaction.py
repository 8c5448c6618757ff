"""Keeps secrets out of all that is written, shown and sent. Every way out goes through this module.

What a secret is, its name says: `is_secret`. `redact` hides the values behind such names in a structure, `mask` hides
known values, credentials in URIs and `name=value` in a text, `tell` prints a text so.

Known values are those behind secret names in the environment, on the command line, in files of options and in the
fields of tasks. A known value of at least `LEAST` characters is hidden wherever it stands. A shorter one, and a number
of fewer than `LEAST_DIGITS` digits, would hide too much else: these are hidden only behind their names.
"""

from __future__ import annotations

import functools
import html
import io
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
"""What stands in place of a secret."""
LEAST, LEAST_DIGITS = 7, 12
"""So many characters has a value, so many digits a number, that is hidden wherever it stands."""
as_typed: list[str] = []
"""Texts NAME=value that were read from files, as if they had been typed."""
hidden: set[str] = set()
"""Known secrets: they are hidden wherever they stand."""

_PASSWORDS = {"password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "cred"}
_ALWAYS = _PASSWORDS | {"cookie", "bearer", "jwt", "webhook", "dsn", "apikey"}  # wherever they stand in a name
_LAST = {"auth", "pat", "oauth", "otp"}  # at the end of a name
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "privatekey", "secretkey", "accesskey", "authtoken",
            "accesstoken", "apitoken", "dbpass", "dbpwd", "userpass", "userpwd")  # fmt: skip
_OF_KEYS = {
    "access", "account", "api", "app", "auth", "client", "consumer", "deploy", "encryption", "gpg", "hmac", "license",
    "master", "pgp", "private", "rsa", "secret", "service", "session", "shared", "signing", "ssh", "ssl", "storage",
    "subscription", "tls", "anthropic", "aws", "azure", "comet", "gcp", "github", "gitlab", "google", "hf", "kaggle",
    "huggingface", "neptune", "openai", "sendgrid", "sentry", "slack", "stripe", "twilio", "wandb",
}  # fmt: skip
_OF_TOKENS = {"access", "api", "auth", "bearer", "hub", "refresh", "session"}  # of which there may be several
_OF_TEXT = {
    "bos", "blank", "class", "cls", "decoder", "encoder", "end", "eos", "first", "image", "last", "mask", "max", "min",
    "n", "next", "num", "oov", "pad", "padding", "per", "prev", "previous", "query", "register", "sep", "special",
    "start", "stop", "target", "text", "unk", "unknown", "vision", "vocab", "word",
}  # fmt: skip
_OF_PASSES = {
    "all", "backward", "band", "by", "each", "first", "forward", "high", "last", "low", "max", "min", "multi", "n",
    "no", "num", "one", "per", "second", "single", "two",
}  # fmt: skip
_ABOUT = {
    "column", "count", "dim", "dims", "dir", "dropout", "embedding", "enabled", "expiry", "file", "index", "len",
    "length", "mode", "path", "rate", "required", "size", "timeout", "ttl", "type",
}  # fmt: skip
"""A name that ends so tells something about a secret, and not the secret."""
_PLURALS = {"secrets", "cookies", "keys", "tokens", "webhooks"} | {f"{each}s" for each in _PASSWORDS}
_COMMON = {"default", "disabled", "enabled", "required", "optional", "anonymous", "localhost", "unknown"}
_NOTHING = {"", "none", "null", "true", "false", HIDDEN}

_STANDS_IN = re.compile(r"(?:\*{3}\d{0,6}(?:,\*{3}\d{0,6})*)?|nan|-?inf")
"""Not hidden behind a name: nothing at all, the numbers of a secret's values in a sweep, floats as JSON has them."""

_QUERY = re.compile(r"(?i)([?&;#])([\w.%-]+)=([^&;#\s\"'<>\\]+)")
_IN_QUERIES = {"key", "sig", "signature", "x-amz-signature", "x-amz-credential"}
_AUTHORITY = re.compile(r"://((?:(?!://)[^\s\"<>])*)")
_NAME = re.compile(r"(?<!\w)([A-Za-z_]\w*)=")
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&()\[\]{}'\"\\]+")
_QUOTED = re.compile(r"([\"'])(\w+)\1(\s*:\s*)(\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token)\s+)?)[^\s'\"\\]+")


@functools.lru_cache(4096)
def is_secret(name: str, number: bool = False) -> bool:
    """Whether a value of this name is a secret; a number is one only where the name means a password.

    Names are read word by word, in snake_case and camelCase alike: `path`, `author`, `max_tokens` are no secrets.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+", name[:500])]
    several = bool(words) and words[-1].endswith("tokens")
    words = [word.removesuffix("s") if word in _PLURALS else word for word in words]
    if words and words[-1] == "value":
        words.pop()
    if not words or words[-1] in _ABOUT:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if (
        _PASSWORDS & {*words, before + last}
        or last.endswith(_ENDINGS[:4])
        or (last == "pass" and before not in _OF_PASSES)
    ):
        return True
    if number:
        return False
    if _ALWAYS & {*words, before + last} or last in _LAST or last.endswith(_ENDINGS):
        return True
    if last.endswith("token"):
        own = before in _OF_TOKENS if several else before not in _OF_TEXT
        return own and (last == "token" or last.removesuffix("token") in _OF_KEYS)
    pairs = set(itertools.pairwise(words))
    return any((of, "key") in pairs for of in _OF_KEYS) or bool({("connection", "string"), ("conn", "str")} & pairs)


def remember(value: Any, name: str = "") -> None:
    """Has the secrets of a value, or of a structure, hidden from now on: by name, and credentials in URIs."""
    hidden.update(_secrets(value, name))


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _secrets(item, name)
    elif value is not None and not isinstance(value, bool):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if is_secret(name, isinstance(value, int | float)):
            yield text
        if "://" in text:
            yield from _in_uri(text)


def _in_uri(text: str) -> Iterator[str]:
    """The passwords of a text that is a URI, or has some in it."""
    whole = text.partition("://")[2].rpartition("@")[0].partition(":")[2]  # with whatever it has in it
    found = [whole, *(_user(each[1])[0].partition(":")[2] for each in _AUTHORITY.finditer(text))]
    found += [each[3] for each in _QUERY.finditer(text) if _in_query(each[2])]
    for each in found:
        yield each
        yield unquote(each)


def _user(text: str) -> tuple[str, str]:
    """What follows `://`, as user and password ("" if there are none), and all from the @ behind them on.

    The last @ counts, since a password may have @ and / in it; but not one in a path.
    """
    at = text.rfind("@")
    before = re.match(r"[^/?#:]*", text)
    if before and text[before.end() : before.end() + 1] in ("/", "?", "#"):
        at = text.rfind("@", 0, before.end())
    return (text[:at], text[at:]) if at > 0 else ("", text)


def _in_query(name: str) -> bool:
    return name.lower() in _IN_QUERIES or is_secret(name)


@functools.lru_cache(1)
def _outside(second: int, variables: int, words: tuple[str, ...]) -> frozenset[str]:
    """The secrets of the environment and of what was typed; looking takes a while, so it is done once a second."""
    return frozenset(_given(words))


def _given(words: Iterable[str]) -> Iterator[str]:
    for name, value in os.environ.items():
        if name not in ("PWD", "OLDPWD"):  # the working directories
            yield from _secrets(value, name)
    for argument in words:
        name, _, value = re.sub(r"^--[a-z][a-z-]*=", "", argument).partition("=")
        yield from _secrets(value, name)
        yield from _secrets(argument)


def _pattern() -> re.Pattern[str] | None:
    """What finds all secrets that this process knows."""
    given = _outside(int(time.monotonic()), len(os.environ), (*sys.argv, *as_typed))
    return _compiled(frozenset(hidden) | given)


@functools.lru_cache(16)
def _compiled(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """What finds these secrets in a text, also as they are escaped in other texts."""
    parts = {part for secret in secrets for part in (secret, secret.strip(), *secret.splitlines())}
    forms: set[str] = set()
    for part in parts:
        long = len(part) >= LEAST and part.lower() not in _COMMON
        if long and part.strip() and not (_is_number(part) and len(part) < LEAST_DIGITS):
            forms |= _forms(part)
    ordered = sorted(forms, key=len, reverse=True)
    if not ordered:
        return None
    return re.compile(
        "|".join(rf"(?<![\w.]){re.escape(f)}(?![\w.])" if _is_number(f) else re.escape(f) for f in ordered)
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _forms(secret: str) -> set[str]:
    """A secret as it stands in texts, in representations of Python, in JSON, in URIs and in HTML."""
    plain = secret.encode(errors="replace").decode()  # what has no character can't be in a URI
    backslashes = secret.replace("\\", "\\\\")
    forms = [
        secret, backslashes, backslashes.replace("'", "\\'"), repr(secret)[1:-1], repr(secret + "'\"")[1:-4],
        json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(plain), quote(plain, safe=""),
        quote_plus(plain), html.escape(secret), printable(secret), secret.replace("'", "'\"'\"'"),
    ]  # fmt: skip
    return {form for form in forms if form}


def redact(value: Any, name: str = "") -> Any:
    """`value` without its secrets: dicts and lists are walked through, other values are returned as they are."""
    return _redacted(value, name, _pattern())


def _redacted(value: Any, name: str, known: re.Pattern[str] | None) -> Any:
    if isinstance(value, Mapping):
        of_secret = is_secret(name)
        return {
            _masked(key, known) if isinstance(key, str) else key: _redacted(
                item, name if of_secret else str(key), known
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, name, known) for item in value]
    if value is None or isinstance(value, bool | float):  # a float is a measurement, whatever its name is
        return value
    if is_secret(name, isinstance(value, int)):
        return value if isinstance(value, str) and _STANDS_IN.fullmatch(value) else HIDDEN
    return _masked(value, known) if isinstance(value, str) else value


def mask(text: str) -> str:
    """`text` without secrets: those that are known, credentials in URIs, and values behind secret names."""
    return _masked(text, _pattern())


def _masked(text: str, known: re.Pattern[str] | None, names: bool = True) -> str:
    if known is not None:
        text = known.sub(HIDDEN, text)
    if "://" in text:
        text = _AUTHORITY.sub(_authority, text)
    if "=" in text:
        text = _QUERY.sub(lambda found: f"{found[1]}{found[2]}={HIDDEN}" if _in_query(found[2]) else found[0], text)
        text = _without_assigned(text) if names else text
    if names and ":" in text:
        text = _QUOTED.sub(_quoted, text)
    return _HEADER.sub(rf"\1{HIDDEN}", text) if "uthorization" in text else text


def _authority(found: re.Match[str]) -> str:
    if "@" not in found[1]:
        return found[0]
    user, rest = _user(found[1])
    return f"://{HIDDEN if user else ''}{rest}"


def _without_assigned(text: str) -> str:
    """`text` without the values in `name=value`, where the name is one of a secret."""
    parts, end = [], 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end()) if found.end() > end and is_secret(found[1]) else None
        if value is not None and value[0].lower() not in _NOTHING:
            parts += [text[end : found.end()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])


def _quoted(found: re.Match[str]) -> str:
    if not is_secret(found[2]) or found[4][1:-1].lower() in _NOTHING:
        return found[0]
    return f"{found[1]}{found[2]}{found[1]}{found[3]}{found[4][0]}{HIDDEN}{found[4][0]}"


def printable(text: str) -> str:
    """A text in which nothing can control a terminal, or fail to be written: such characters are escaped."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown(text: Any) -> str:
    """A text as it may be shown within a line: without secrets, and without what could control a terminal."""
    return printable(mask(str(text)))


def tell(text: str, stream: TextIO | None = None) -> None:
    """Prints a text, of one line or several, as it may be shown; on stderr if no stream is given."""
    lines = "\n".join(map(printable, mask(text).split("\n")))
    print(lines, file=stream or sys.stderr, flush=True)


class Masked(io.TextIOWrapper):
    """A stream of text that masks known secrets in all that is written to it, such as the task's own prints."""

    def write(self, text: str) -> int:
        # Without `name=value`, since this may be JSON: it must stay JSON.
        super().write(_masked(text, _pattern(), names=False))
        return len(text)


def guard_streams() -> None:
    """Has all that this process prints on stdout and stderr go through `Masked`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            masked = Masked(
                stream.buffer, stream.encoding, stream.errors,
                line_buffering=stream.line_buffering, write_through=stream.write_through,
            )  # fmt: skip
            setattr(sys, name, masked)
