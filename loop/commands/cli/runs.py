"""`tfloop runs`, `tail`, `report`, `watch` and `sync`: what can be done with runs."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from callbacks import files
from callbacks.formats import size
from callbacks.run_record.record import printable, read
from callbacks.run_record.redaction import tell
from loop.checkpoint.store import address
from loop.commands import command_line, runs, terminal, tracking
from loop.commands.cli import options as typed
from loop.commands.cli import runs_options as listing
from loop.errors import PREEMPTED, TrainingError, UsageError

runs_app = typer.Typer(help="List, show, compare and remove runs.", rich_markup_mode=None)


@runs_app.callback(invoke_without_command=True)
def list_runs(
    context: typer.Context,
    filter_: listing.Filter = typed.UNTYPED,
    sort: listing.Sort = None,
    metric: listing.Metric = None,
    as_json: typed.AsJson = False,
    root: typed.Root = runs.ROOT,
) -> None:
    """List runs; with a command, show, compare or remove them."""
    context.obj = root  # for the commands of the group: `runs --root DIR show RUN`
    if context.invoked_subcommand is not None:
        if filter_ or sort or metric or as_json:
            raise UsageError(f"runs {context.invoked_subcommand}: give its options after it")
        return
    records = runs.listed(root, filter_, sort, metric)
    if as_json:
        print(runs.as_json(records))
    elif records:
        terminal.write([runs.table(records, metric)])
    else:
        tell("no such runs" if filter_ else "no runs here yet: tfloop train digits makes one")


@runs_app.command("show")
def show_run(
    context: typer.Context,
    run: typed.Name,
    metric: listing.Drawn = None,
    as_json: typed.AsJson = False,
    root: typed.GroupRoot = None,
) -> None:
    """Show a run: curves, parameters, checkpoints, and where its time went."""
    record = runs.reader(runs.locate(root or context.obj, run, checkpoints=False)).read()
    if as_json:
        print(runs.shown_as_json(record))
    else:
        terminal.write(runs.show(record, metric))


@runs_app.command("compare")
def compare_runs(
    context: typer.Context, names: typed.Names, metric: listing.Metric = None, root: typed.GroupRoot = None
) -> None:
    """Show what runs differ in, and their curves in one plot."""
    records = [read(runs.locate(root or context.obj, name, checkpoints=False)) for name in names]
    terminal.write(runs.compare(records, metric))


@runs_app.command("diff")
def diff_runs(context: typer.Context, first: typed.Name, second: typed.Name, root: typed.GroupRoot = None) -> None:
    """Show what two runs differ in: settings, versions, data, commit, and the lines of their code."""
    folder = root or context.obj
    one = read(runs.locate(folder, first, checkpoints=False))
    other = read(runs.locate(folder, second, checkpoints=False))
    terminal.write(runs.diff(one, other))


@runs_app.command("rm")
def remove_runs(
    context: typer.Context, names: typed.Names, yes: listing.Yes = False, root: typed.GroupRoot = None
) -> None:
    """Remove runs with all that is in their directories; asks first. What MLflow has stays."""
    folder = root or context.obj
    # Two names may mean the same run, which is removed once.
    found = list(dict.fromkeys(runs.to_remove(folder, name) for name in names))
    # All are checked before the first one is removed.
    for run in found:
        runs.check_removable(run, folder)
    if not yes:
        _confirm_removal(found)
    # What can't be removed is reported at the end, after the other runs are removed.
    left: list[str] = []
    for run in found:
        left += runs.remove(run)
    if left:
        some = "; ".join(left[:3])
        if len(left) > 3:
            some += ", ..."
        raise TrainingError(f"not all could be removed; left: {some}")


def _confirm_removal(found: list[Path | str]) -> None:
    """Shows what is to be removed, and asks; ends the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise UsageError("runs rm asks first, and there is no terminal: give --yes")
    # A directory that came from elsewhere may have control characters in its name.
    for run in found:
        bytes_here = "" if isinstance(run, str) else f"  {size(runs.size(run))}"
        terminal.write([f"{printable(str(run))}{bytes_here}"])
    try:
        is_sure = typer.confirm(f"Remove {'it' if len(found) == 1 else f'these {len(found)}'}?")
    except typer.Abort:  # Ctrl-C or Ctrl-D, which leave the cursor behind the question
        tell("\nnothing is removed")
        raise KeyboardInterrupt from None
    if not is_sure:
        raise typer.Exit(0)


def tail(
    run: typed.Name, count: listing.Count = 10, follow: listing.Follow = True, root: typed.Root = runs.ROOT
) -> None:
    """Follow a run: a line for each event, until it ends."""
    try:
        for line in runs.tail(runs.locate(root, run, checkpoints=False), count, follow):
            terminal.write([line])
    except KeyboardInterrupt:  # the usual end of watching, not an error
        tell("the run goes on without being watched")
        raise typer.Exit(130) from None


def report(names: listing.ReportNames, out: listing.ReportOut = None, root: typed.Root = runs.ROOT) -> None:
    """Make the page of a run anew, or one that compares several. It has curves, settings, time and faults."""
    from callbacks.run_record import page

    if out is None and len(names) > 1 and names[-1].endswith(".html"):
        out = Path(names.pop())
    paths = runs.several(root, names)
    if out is None:
        out = paths[0] / "report.html" if len(paths) == 1 else Path("comparison.html")
    shown = printable(str(out))
    try:
        # Only a page that tfloop has made is written over.
        if out.exists() and not page.is_page(out):
            raise UsageError(f"{shown} exists already, and isn't a report: give another name")
        records = [runs.reader(path).read() for path in paths]
        files.write_text(out, runs.page_of(records))
    except OSError as error:
        if error.errno in files.FULL:  # another name doesn't help: `report_error` says what does
            raise
        raise UsageError(f"{shown} can't be written ({error.strerror}): give another name") from None
    tell(f"wrote {shown}")


def watch(names: typed.Names, port: listing.WatchPort = 8080, root: typed.Root = runs.ROOT) -> None:
    """Show the page of a run in a browser while it trains. It is served on this machine, and updates by itself."""
    from loop.commands import watch as watch_

    with watch_.served(runs.several(root, names), port) as server:
        tell(f"see it in the browser: {server.address}  (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("the run goes on without being watched" if server.is_under_way() else "no longer watched")
            raise typer.Exit(130) from None


def sync(run: typed.Name, track: listing.SyncTrack = None, trust: typed.Trust = False) -> None:
    """Deliver what is still missing: to MLflow, or to the store of a URL. The run must be over; it may be a sweep."""
    if address.is_url(run):
        _deliver_to_store(address.read_url(run))
        if track is None:  # the run of a URL is delivered to MLflow only on request
            return
    tracking.deliver(runs.named(run), track, trust)


def _deliver_to_store(url: str) -> None:
    """Delivers what this machine has of a run that is kept in a store; ends the command if something remains."""
    from loop.checkpoint.store import copies
    from loop.checkpoint.store.bucket import StoreError

    try:
        delivered = copies.deliver(url)
    except StoreError as error:
        command_line.say(str(error))
        delivered = False
    if not delivered:
        raise typer.Exit(PREEMPTED)  # as after an interrupted run: the same command goes on
