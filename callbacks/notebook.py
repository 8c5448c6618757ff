"""What is different in a notebook: where texts go, how progress is shown, and how an interrupt ends."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import TextIO

from callbacks.types import Foreign


class Interrupted(KeyboardInterrupt):
    """An interrupt, which a notebook shows as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def active() -> bool:
    """Whether this process is the kernel of a notebook. A shell of IPython on a terminal is none."""
    # Asked without importing IPython, which would take long: a notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def stream() -> TextIO:
    """Where texts for people go: stderr, which a notebook would show as an error; there it is stdout."""
    return sys.stdout if active() else sys.stderr


@contextlib.contextmanager
def short_interrupt() -> Iterator[None]:
    """Within it, an interrupt of a notebook's cell is raised as `Interrupted`."""
    try:
        yield
    except KeyboardInterrupt:
        if not active():
            raise
        # A kernel prints the traceback of any error, unless the error has one of its own.
        raise Interrupted("interrupted before training began: nothing is lost") from None


def bar(total: int | None, initial: int) -> Foreign:
    """A bar of tqdm as a widget, if ipywidgets is installed; else one line that is updated in place."""
    if importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm

        return tqdm(total=total, initial=initial, unit="step")
    return Line(total, initial)


class Line:
    """One line of a cell's output, with the part of the interface of tqdm's bars that `Display` uses.

    Attributes:
        n: the steps made so far.
    """

    def __init__(self, total: int | None, initial: int) -> None:
        from IPython.display import display

        self.n = initial
        self._total = total
        self._before = ""
        self._behind = ""
        # With an id, so that `update` replaces the output and adds none.
        self._handle = display(self._data(), raw=True, display_id=True)

    def set_description_str(self, text: str, refresh: bool = True) -> None:
        """Sets what stands before the steps."""
        self._before = text

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Sets what stands behind the steps."""
        self._behind = text

    def update(self, steps: int) -> None:
        """Counts steps, and shows the line."""
        self.n += steps
        self._handle.update(self._data(), raw=True)

    def write(self, text: str, file: TextIO) -> None:
        """Prints a line of its own."""
        print(text, file=file, flush=True)

    def close(self) -> None:
        """The line stays as it is."""

    def _data(self) -> dict[str, str]:
        share = f"{self.n / self._total:4.0%} " if self._total else ""
        total = f"/{self._total:,}" if self._total else ""
        return {"text/plain": f"{self._before}{share}step {self.n:,}{total}  {self._behind}".rstrip()}
