"""Redaction: keeps secrets out of all that is written, shown and sent. Every output goes through this module.

The name of a value says whether it is a secret: `is_secret`. `redact` hides the values of such names in a structure;
`mask` hides known secrets, credentials in URIs and values in `name=value` in a text; `tell` prints a text, masked.

Known secrets are the values of secret names in the environment, on the command line, in files of options and in the
fields of tasks. One of at least `LEAST` characters is hidden wherever it stands. A shorter one, and a number of fewer
than `LEAST_DIGITS` digits, would hide harmless text too: these are hidden only after their names.
"""

from __future__ import annotations

import contextlib
import functools
import html
import io
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TextIO
from urllib.parse import quote, quote_plus, unquote

from callbacks import notebook
from callbacks.types import Json

HIDDEN = "***"
"""The text that replaces a secret."""
LEAST = 7
"""The fewest characters of a secret that is hidden wherever it stands."""
LEAST_DIGITS = 12
"""The fewest digits of such a secret, if it is a number."""
as_typed: list[str] = []
"""Texts NAME=value that were read from files; they count as typed."""
hidden: set[str] = set()
"""Known secrets, hidden wherever they stand."""

_PASSWORDS = {"password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "cred"}
_ALWAYS = _PASSWORDS | {"cookie", "bearer", "jwt", "webhook", "dsn", "apikey"}  # anywhere in a name
_LAST = {"auth", "pat", "oauth", "otp"}  # at the end of a name
_PASSWORD_ENDINGS = ("password", "passwd", "passphrase", "secret")
_ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "privatekey", "secretkey", "accesskey", "authtoken",
            "accesstoken", "apitoken", "dbpass", "dbpwd", "userpass", "userpwd")  # fmt: skip
# The words before "key", "token" and "pass" that make a name one of a secret, or keep it from being one: `api_key` is a
# secret; `sort_key`, `pad_token` and `forward_pass` are none.
_OF_KEYS = {
    "access", "account", "api", "app", "auth", "client", "consumer", "deploy", "encryption", "gpg", "hmac", "license",
    "master", "pgp", "private", "rsa", "secret", "service", "session", "shared", "signing", "ssh", "ssl", "storage",
    "subscription", "tls", "anthropic", "aws", "azure", "comet", "gcp", "github", "gitlab", "google", "hf", "kaggle",
    "huggingface", "neptune", "openai", "sendgrid", "sentry", "slack", "stripe", "twilio", "wandb",
}  # fmt: skip
_OF_TOKENS = {"access", "api", "auth", "bearer", "hub", "refresh", "session"}  # other `tokens` are parts of texts
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
"""The last word of names such as `token_count`, which hold something about a secret and not the secret."""
_PLURALS = {"secrets", "cookies", "keys", "tokens", "webhooks"} | {f"{word}s" for word in _PASSWORDS}
# Common words aren't secrets, whatever name they have: hiding them everywhere would make outputs unreadable.
_COMMON = {"default", "disabled", "enabled", "required", "optional", "anonymous", "localhost", "unknown"}
_NOTHING = {"", "none", "null", "true", "false", HIDDEN}

_STANDS_IN = re.compile(r"(?:\*{3}\d{0,6}(?:,\*{3}\d{0,6})*)?|nan|-?inf")
"""Values of secret names that are shown: "", the placeholders of a secret in a sweep, floats as JSON has them."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")
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

    Names are read word by word, in snake_case and camelCase alike: `path`, `author`, `max_tokens` aren't secrets.
    """
    words = list(map(str.lower, _WORD.findall(name[:500])))
    # Asked before plurals are removed: a `token` is mostly a secret, `tokens` are mostly parts of a text.
    ends_in_tokens = bool(words) and words[-1].endswith("tokens")
    words = list(map(_singular, words))
    if words and words[-1] == "value":
        words.pop()
    if not words or words[-1] in _ABOUT:
        return False
    return _is_password(words) or (not number and _is_key_or_token(words, ends_in_tokens))


def _singular(word: str) -> str:
    return word.removesuffix("s") if word in _PLURALS else word


def _word_before(words: Sequence[str]) -> str:
    """The word before the last one; "" if there is none."""
    return words[-2] if len(words) > 1 else ""


def _is_password(words: Sequence[str]) -> bool:
    last = words[-1]
    before = _word_before(words)
    # Two words may be one: `pass_word`, `passWord`.
    if _PASSWORDS & {*words, before + last} or last.endswith(_PASSWORD_ENDINGS):
        return True
    return last == "pass" and before not in _OF_PASSES


def _is_key_or_token(words: Sequence[str], several_tokens: bool) -> bool:
    last = words[-1]
    if _ALWAYS & {*words, _word_before(words) + last} or last in _LAST or last.endswith(_ENDINGS):
        return True
    if last.endswith("token"):
        return _is_secret_token(words, several_tokens)
    return _has_secret_pair(words)


def _is_secret_token(words: Sequence[str], several: bool) -> bool:
    """Whether a name that ends in "token" means an access token, and not a token of a text."""
    last = words[-1]
    before = _word_before(words)
    gives_access = before in _OF_TOKENS if several else before not in _OF_TEXT
    return gives_access and (last == "token" or last.removesuffix("token") in _OF_KEYS)


def _has_secret_pair(words: Sequence[str]) -> bool:
    for first, second in itertools.pairwise(words):
        if second == "key" and first in _OF_KEYS:
            return True
        if (first, second) in (("connection", "string"), ("conn", "str")):
            return True
    return False


def remember(value: object, name: str = "") -> None:
    """Hides the secrets of a value, or of a structure, from now on: by name, and credentials in URIs."""
    hidden.update(_secrets(value, name))


def _secrets(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # All that lies within a value of a secret name is secret, whatever its own name is.
            yield from _secrets(item, name if is_secret(name) else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _secrets(item, name)
    elif value is not None and not isinstance(value, bool):
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        if is_secret(name, isinstance(value, int | float)):  # a number of a `token` or `key` is most often a count
            yield text
        if "://" in text:
            yield from _in_uri(text)


def _in_uri(text: str) -> Iterator[str]:
    """The passwords in a text that is a URI or has URIs in it: as they stand there, and unescaped."""
    # If the text is one URI, its password may hold any character, even those that end a URI.
    passwords = [text.partition("://")[2].rpartition("@")[0].partition(":")[2]]
    for authority in _AUTHORITY.finditer(text):
        user_and_password, _ = _split_user(authority[1])
        passwords.append(user_and_password.partition(":")[2])
    for query in _QUERY.finditer(text):
        if _is_secret_in_query(query[2]):
            passwords.append(query[3])
    for password in passwords:
        yield password
        yield unquote(password)


def _split_user(text: str) -> tuple[str, str]:
    """Splits what follows `://` into "user:password" ("" if there is none) and the rest, which starts with the @.

    The last @ counts, since a password may have @ and / in it; but not one in a path.
    """
    at = text.rfind("@")
    host = re.match(r"[^/?#:]*", text)
    if host and text[host.end() : host.end() + 1] in ("/", "?", "#"):
        at = text.rfind("@", 0, host.end())
    return (text[:at], text[at:]) if at > 0 else ("", text)


def _is_secret_in_query(name: str) -> bool:
    return name.lower() in _IN_QUERIES or is_secret(name)


@functools.lru_cache(1)
def _outside(second: int, variables: int, words: tuple[str, ...]) -> frozenset[str]:
    """The secrets of the environment and of what was typed; looking is slow, so the cache keeps them for a second."""
    return frozenset(_given(words))


def _given(words: Iterable[str]) -> Iterator[str]:
    for name, value in os.environ.items():
        # `pwd` means a password elsewhere.
        if name not in ("PWD", "OLDPWD"):  # the working directories
            yield from _secrets(value, name)
    for argument in words:
        # `--set=NAME=value` and `NAME=value` are read alike.
        name, _, value = re.sub(r"^--[a-z][a-z-]*=", "", argument).partition("=")
        yield from _secrets(value, name)
        yield from _secrets(argument)


def _pattern() -> re.Pattern[str] | None:
    """What finds all secrets that this process knows."""
    # The arguments are the cache's key: it looks again after a second, or when there are other variables or arguments.
    given = _outside(int(time.monotonic()), len(os.environ), (*sys.argv, *as_typed))
    return _compiled(frozenset(hidden) | given)


@functools.lru_cache(16)
def _compiled(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """What finds these secrets in a text, also as other texts escape them."""
    forms: set[str] = set()
    for secret in secrets:
        # A secret of several lines, such as a private key, may be shown line by line.
        for part in (secret, secret.strip(), *secret.splitlines()):
            if _is_hidden_anywhere(part):
                forms |= _forms(part)
    if not forms:
        return None

    patterns = []
    for form in sorted(forms, key=len, reverse=True):  # the longest first: a part of it must not match before it
        pattern = re.escape(form)
        # A number is hidden as a whole number only, not as the digits of another one.
        patterns.append(rf"(?<![\w.]){pattern}(?![\w.])" if reads_as_number(form) else pattern)
    return re.compile("|".join(patterns))


def _is_hidden_anywhere(secret: str) -> bool:
    """Whether a known secret is long and rare enough to be hidden wherever it stands."""
    if len(secret) < LEAST or secret.lower() in _COMMON or not secret.strip():
        return False
    return not reads_as_number(secret) or len(secret) >= LEAST_DIGITS


def reads_as_number(text: str) -> bool:
    """Whether a text is that of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _forms(secret: str) -> set[str]:
    """A secret as it stands in plain texts, Python literals, JSON, URIs and HTML."""
    plain = secret.encode(errors="replace").decode()  # surrogates can't be quoted
    backslashes = secret.replace("\\", "\\\\")
    # In a text with both quotes, `repr` escapes the single ones. They are added for that, and cut off again.
    single_quotes_escaped = repr(secret + "'\"")[1:-4]
    in_shell = secret.replace("'", "'\"'\"'")  # as `shlex.quote` writes it
    forms = [
        secret, backslashes, backslashes.replace("'", "\\'"), repr(secret)[1:-1], single_quotes_escaped, in_shell,
        json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(plain), quote(plain, safe=""),
        quote_plus(plain), html.escape(secret), printable(secret),
    ]  # fmt: skip
    return set(filter(None, forms))


def redact(value: Json) -> Json:
    """`value` without its secrets. Dicts and lists are walked through; other values are returned as they are."""
    return _redacted(value, "", _pattern())


def _redacted(value: Json, name: str, known: re.Pattern[str] | None) -> Json:
    if isinstance(value, Mapping):
        return _redacted_items(value, name, known)
    if isinstance(value, list | tuple):
        return [_redacted(item, name, known) for item in value]
    if value is None or isinstance(value, bool | float):  # a float is a measurement, whatever its name is
        return value
    if is_secret(name, isinstance(value, int)):
        return value if isinstance(value, str) and _STANDS_IN.fullmatch(value) else HIDDEN
    return _masked(value, known) if isinstance(value, str) else value


def _redacted_items(values: Mapping[Json, Json], name: str, known: re.Pattern[str] | None) -> dict[Json, Json]:
    within_secret = is_secret(name)
    redacted = {}
    for key, item in values.items():
        shown_key = _masked(key, known) if isinstance(key, str) else key
        redacted[shown_key] = _redacted(item, name if within_secret else str(key), known)
    return redacted


def mask(text: str) -> str:
    """`text` without secrets: known ones, credentials in URIs, and values after secret names."""
    return _masked(text, _pattern())


def _masked(text: str, known: re.Pattern[str] | None, names: bool = True) -> str:
    # The tests for single characters are for speed: most texts have none of these forms.
    if known is not None:
        text = known.sub(HIDDEN, text)
    if "://" in text:
        text = _AUTHORITY.sub(_mask_authority, text)
    if "=" in text:
        text = _QUERY.sub(_mask_query, text)
        text = _without_assigned(text) if names else text
    if names and ":" in text:
        text = _QUOTED.sub(_mask_quoted, text)
    return _HEADER.sub(rf"\1{HIDDEN}", text) if "uthorization" in text else text


def _mask_authority(authority: re.Match[str]) -> str:
    if "@" not in authority[1]:
        return authority[0]
    user, rest = _split_user(authority[1])
    return f"://{HIDDEN if user else ''}{rest}"


def _mask_query(query: re.Match[str]) -> str:
    return f"{query[1]}{query[2]}={HIDDEN}" if _is_secret_in_query(query[2]) else query[0]


def _without_assigned(text: str) -> str:
    """`text` without the values in `name=value`, where the name is one of a secret."""
    parts = []
    end = 0
    for name in _NAME.finditer(text):
        if name.end() <= end or not is_secret(name[1]):  # a name within a hidden value was hidden with it
            continue
        value = _VALUE.match(text, name.end())
        if value is not None and value[0].lower() not in _NOTHING:
            parts += [text[end : name.end()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])


def _mask_quoted(pair: re.Match[str]) -> str:
    quote_of_name, name, colon, value = pair.groups()
    if not is_secret(name) or value[1:-1].lower() in _NOTHING:
        return pair[0]
    return f"{quote_of_name}{name}{quote_of_name}{colon}{value[0]}{HIDDEN}{value[0]}"


def printable(text: str) -> str:
    """The text with all characters escaped that can control a terminal, or that a file may not take."""
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def shown(text: object) -> str:
    """A text as it may be shown within a line: without secrets and control characters."""
    return printable(mask(str(text)))


def tell(text: str, stream: TextIO | None = None) -> None:
    """Prints a text, of one line or several, without secrets and control characters; by default on stderr.

    In a notebook it is stdout: stderr would look like an error. A text that can't be printed is lost.
    """
    lines = "\n".join(map(printable, mask(text).split("\n")))
    with contextlib.suppress(OSError):  # a terminal that is gone, a log on a full disk: nothing fails because of it
        print(lines, file=stream or notebook.stream(), flush=True)


class Masked(io.TextIOWrapper):
    """A text stream that hides known secrets in all that is written to it, such as the task's own prints."""

    def write(self, text: str) -> int:
        # Not those in `name=value`: the text may be JSON, which hiding a part of it would break.
        super().write(_masked(text, _pattern(), names=False))
        return len(text)


def guard_streams() -> None:
    """Sends all that this process prints on stdout and stderr through `Masked`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            masked = Masked(
                stream.buffer, stream.encoding, stream.errors,
                line_buffering=stream.line_buffering, write_through=stream.write_through,
            )  # fmt: skip
            setattr(sys, name, masked)
