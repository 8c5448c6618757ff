"""Pages that show what can't be opened in a browser: a terminal, and a notebook."""

from __future__ import annotations

import contextlib
import fcntl
import html
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

from browser import ROOT, ScreenshotError

COLUMNS, LINES = 112, 50  # of the terminal


def in_terminal(command: list[str], directory: Path, until: str) -> str:
    """What a terminal shows of a command, with its colours: at its end, or where it has printed `until`."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PYTHONIOENCODING": "utf-8"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=directory, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    output = b""
    with contextlib.suppress(OSError):  # what a terminal says when no process writes any more
        while some := os.read(ours, 1 << 16):
            output += some
            above, _, bar = output.decode(errors="replace").rpartition("\n")
            if until and until in above and "|" in bar:
                os.killpg(process.pid, signal.SIGKILL)
    os.close(ours)
    if (code := process.wait()) and not until:
        raise ScreenshotError(f"{' '.join(command[1:])} ended with exit code {code}")
    return "\n".join(map(last_drawn, output.decode(errors="replace").split("\n")))


def last_drawn(line: str) -> str:
    """What is seen of a line that was drawn several times, without the place of this checkout."""
    drawn = [part for part in line.split("\r") if part.strip()]
    shown = drawn[-1] if drawn else ""
    padding = " " * (len(f"{ROOT}/") * shown.count(f"{ROOT}/"))
    shown = shown.replace(f"{ROOT}/", "")
    return f"{shown[:-1]}{padding}{shown[-1]}" if padding and shown.endswith("\u2502") else shown


PALETTE = ["#6e7681", "#ff7b72", "#7ee787", "#e3b341", "#79b8ff", "#d2a8ff", "#56d4dd", "#e6edf3"]
"""Of a terminal: black (here gray, since it stands on black), red, green, yellow, blue, magenta, cyan, white."""


def as_page(title: str, output: str) -> str:
    """A page that shows what was written on a terminal."""
    text, style = "", {}
    for part in re.split(r"(\x1b\[[0-9;]*m)", output.replace("\r", "")):
        if not part.startswith("\x1b"):
            css = ";".join(f"{name}:{value}" for name, value in style.items())
            part = re.sub("[\u2800-\u28ff]", lambda found: dots(found[0]), html.escape(part))
            text += f'<span style="{css}">{part}</span>' if part else ""
            continue
        codes = [int(code or 0) for code in part[2:-1].split(";")]
        while codes:
            code = codes.pop(0)
            if code == 38 and codes[:1] == [5]:
                code, codes = 30 + codes[1] % 8, codes[2:]
            if code == 0:
                style = {}
            elif code == 1:
                style["font-weight"] = "700"
            elif 30 <= code <= 37 or 90 <= code <= 97:
                style["color"] = PALETTE[code % 10]
            elif code == 39:
                style.pop("color", None)
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;background:#0d1117;color:#c9d1d9;'
        "padding:22px 26px;width:max-content}pre{margin:0;font:14px/17px 'DejaVu Sans Mono',monospace}b{color:#7ee787}"
        "svg{width:1ch;height:17px;vertical-align:top;fill:currentColor}"
        f"</style><pre><b>$</b> {html.escape(title)}\n{text}</pre>"
    )


def dots(character: str) -> str:
    """A Braille character, of which plots are made, as a picture: not every fixed-width font has them."""
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    there = [place for bit, place in enumerate(places) if ord(character) - 0x2800 >> bit & 1]
    circles = "".join(f'<circle cx="{x + 0.5}" cy="{y + 0.5}" r=".36"/>' for x, y in there)
    return f'<svg viewBox="0 0 2 4" preserveAspectRatio="none">{circles}</svg>'


def executed(path: Path, directory: Path) -> str:
    """A page that shows a notebook with the outputs of its cells, which are executed in a directory."""
    import nbformat
    from markdown_it import MarkdownIt
    from nbclient import NotebookClient

    print("executing", path.name, file=sys.stderr)
    notebook = nbformat.read(path, as_version=4)
    first = nbformat.v4.new_code_cell(f"import sys\nsys.path.insert(0, {str(ROOT)!r})")
    notebook.cells.insert(0, first)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(directory)}}).execute()
    shown = next(index for index, cell in enumerate(notebook.cells) if cell.get("outputs")) - 1
    body = ""
    for cell in notebook.cells[shown:]:  # without imports and the task, of which the picture would be too high
        if cell.cell_type == "markdown":
            body += MarkdownIt().render(cell.source)
            continue
        body += f'<pre class="in">{html.escape(cell.source)}</pre>'
        for output in cell.outputs:
            data = output.get("data", {})
            body += (
                data.get("text/html") or f"<pre>{html.escape(output.get('text') or data.get('text/plain', ''))}</pre>"
            )
    return (
        '<!doctype html><meta charset="utf-8"><style>body{margin:0;padding:8px 28px 20px;width:900px;'
        "font:14px/1.45 'DejaVu Sans',sans-serif;color:#1f2328}"
        "pre{font:12px/1.4 'DejaVu Sans Mono',monospace;margin:6px 0;white-space:pre-wrap}"
        "pre.in{background:#f6f8fa;border:1px solid #d0d7de;border-radius:4px;padding:8px 12px}"
        f"table{{border-collapse:collapse;font-size:12px}}tbody tr:nth-child(odd){{background:#f6f8fa}}</style>{body}"
    )
