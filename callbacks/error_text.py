"""Error text: the line of an error's message that says what is wrong."""

from __future__ import annotations

import re

LONGEST = 400
"""Characters of a message that are shown."""
_AROUND = ("Graph execution error:", "[[{{node", "in user code:", "Exception encountered when calling")
"""What the messages have that TensorFlow, AutoGraph and Keras put around another one."""


def recorded(text: str) -> str:
    r"""An error that was written down, as type and message, in one line if libraries have put more around it.

    Args:
        text: what a journal has, with ``\n`` for the end of a line.
    """
    if not any(mark in text for mark in _AROUND):  # all of it may matter
        return text
    text = text.replace(r"\n", "\n").replace(r"\t", "\t")
    kind, colon, message = text.partition(": ")
    return f"{kind}: {in_a_line(message)}" if colon and kind.isidentifier() else in_a_line(text)


def in_a_line(text: str) -> str:
    """The message of an error in one line, without what TensorFlow, AutoGraph and Keras put around it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # Keras writes in bold

    if "in user code:" in text:
        text = _without_autograph(text)
    if "[[{{node" in text or text.startswith("Graph execution error"):
        text = _without_graph(text)
    text = re.sub(r"\{\{function_node [^{}]*\}\} ?| ?\[Op:\w+\]( name:)?", "", text)
    text = text.partition("\nArguments received by")[0]  # after it, Keras shows the arguments of the layer

    lines = _lines(text)
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]  # the first line names the layer, the second one says what is wrong
    whole = " ".join(lines[:3])
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 4] + " ..."


def _without_autograph(text: str) -> str:
    """The message within one of AutoGraph's, which shows a traceback first."""
    lines = _lines(text)
    # The message begins at the last line "SomeError: ...", after the lines of code.
    start = None
    for index, line in enumerate(lines):
        if re.match(r"[A-Za-z_.]*(Error|Exception|Warning): ", line):
            start = index
    if start is None:
        return lines[-1]
    return "\n".join(lines[start:]).partition(": ")[2]


def _without_graph(text: str) -> str:
    """The cause within an error of a compiled function: the last line before the operation's name."""
    causes = []
    for line in _lines(text.partition("[[{{node")[0]):
        # Above the cause stands where the operation was defined.
        is_frame = line.startswith(("File ", "Detected at", "<stack traces"))
        if not is_frame and line not in ("Graph execution error:", "(most recent call last):"):
            causes.append(line)
    return causes[-1] if causes else text


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
