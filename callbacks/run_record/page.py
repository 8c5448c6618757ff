"""Page: what all pages about runs have in common: templates, style, scripts, tables, and the policy for browsers."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks import files, formats
from callbacks.run_record.redaction import redact
from callbacks.types import Json

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
_MARK = '<meta name="generator" content="tfloop">'

# The most of each on a page, so that a browser can show the page of any run:
_ROWS = 400  # of a table
_LONGEST = 2000  # characters of a text


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, and the number of rows that it leaves out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Names with their values as texts, and the number of those left out."""

    items: list[tuple[str, str]]
    left_out: int


def rendered(template: str, live: bool = False, **content: object) -> str:
    """A page. All texts are escaped and without secrets; it loads nothing, and works from file://.

    A live one asks the server that it comes from for what is new: see `live.js`.
    """
    style = _asset("page.css")
    # `live.js` first: it keeps a copy of the page as the server sent it, before `charts.js` changes what is shown.
    names = ["live.js", "charts.js"] if live else ["charts.js"]
    scripts = list(map(_asset, names))
    # The style and the scripts are allowed by their hashes: the browser runs nothing that a run's texts smuggle in.
    allowed = " ".join(map(_sha, scripts))
    connections = "; connect-src 'self'" if live else ""
    policy = (
        f"default-src 'none'; style-src {_sha(style)}; script-src {allowed}{connections}; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(mark=_MARK, policy=policy, style=style, scripts=scripts, live=live, **content)
    )


def is_page(path: Path) -> bool:
    """Whether a file is such a page."""
    with files.reading(path, shared=True) as file:
        return _MARK.encode() in file.read(1000)


def table(heads: Iterable[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of at most the first `_ROWS` rows."""
    return Table(list(heads), rows[:_ROWS], len(rows) - _ROWS)


def newest(heads: Iterable[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of at most the last `_ROWS` rows, for what is sorted by time."""
    return Table(list(heads), rows[-_ROWS:], len(rows) - _ROWS)


def pairs(values: Mapping[str, Json]) -> Pairs:
    """Names and values, without secrets. They are redacted together, since the name says what is a secret."""
    shown = list(redact(dict(values)).items())[:_ROWS]
    return Pairs([(name, _value(value)) for name, value in shown], len(values) - len(shown))


def _value(value: Json) -> str:
    """A value as a text; "" for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


@functools.cache
def _environment() -> Environment:
    """The templates. All that they print is redacted, cut and escaped, except what they mark as `safe`."""
    import jinja2  # here, since only a report needs it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_printed,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    for function in (formats.number, formats.lasting, formats.moment, formats.part_name):
        environment.filters[function.__name__] = function
    return environment


def _printed(value: object) -> object:
    """A value as a template prints it, before it is escaped: without secrets, not too long, and valid UTF-8."""
    if hasattr(value, "__html__"):  # a part of the page, from a macro or marked as safe
        return value
    text = str(redact(str(value)))
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + " …"
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _asset(name: str) -> str:
    """The style sheet or the script, exactly as in the page: the policy has its hash."""
    return "\n" + (TEMPLATES / name).read_text()


def _sha(text: str) -> str:
    """The hash by which a Content-Security-Policy allows a style or a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
