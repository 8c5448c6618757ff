"""`loop.compare`: several runs in a notebook or a shell: what came out, and what they differ in."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from callbacks.run_record import cell, comparison
from callbacks.run_record.record import Record, read
from loop.commands import runs, terminal
from loop.errors import UsageError
from loop.run.result import FitResult


class Comparison:
    """What `loop.compare` returns: a text in a shell, tables with curves in a notebook.

    Args:
        records: what the run directories say.

    Attributes:
        differences: a row for each setting that isn't the same in all runs: its name, and the value of each run.
        results: a row for each metric: its name, and the best value of each run with its step; or the last value where
            the name doesn't say which values are better. The best of all has a star.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records
        self.differences = comparison.differences(records)
        self.results = comparison.results(records)

    def __repr__(self) -> str:
        return "\n".join(map(terminal.as_text, runs.compare(self._records)))

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        names = list(map(attrgetter("name"), self._records))
        curves = {}
        for metric, *_ in self.results:  # a run that lacks the metric has an empty curve
            curves[metric] = [record.curves.get(metric, []) for record in self._records]
        return cell.comparison(names, self.results, curves, self.differences)


def compare(*results: FitResult | str | Path) -> Comparison:
    """Compares runs: what came out, and what they differ in.

    Args:
        *results: what `fit` returned, or run directories, their URLs, names in `runs/`, or `latest`; 2 to 12.

    Raises:
        UsageError: there is no such run, one is given twice, or there are too few or too many.
    """
    if len(results) < 2:
        raise UsageError(f"compare() of {len(results)} runs: give at least 2, such as compare(one, other)")
    names = []
    for result in results:
        if not isinstance(result, FitResult | str | Path):
            what = type(result).__name__
            raise UsageError(f"compare(): a {what} isn't a run: give results of fit, run directories or names")
        path = result.run_dir if isinstance(result, FitResult) else result
        names.append(str(path))
    # By name, as on the command line: `several` also refuses a run that is given twice.
    paths = runs.several(runs.ROOT, names)
    return Comparison(list(map(read, paths)))
