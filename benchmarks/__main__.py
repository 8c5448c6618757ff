"""The benchmark suite: `uv run --group bench python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection

from benchmarks import measure, report
from benchmarks.environments import PEERS, set_up
from benchmarks.more import MORE
from benchmarks.workloads import WORKLOADS

TOLERANCE = 0.15
"""How far from the median a contender's loss may be in `check`, relative to it: weights and orders are other ones."""


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    mode = modes.add_parser("setup", help="makes the environments of the peers, all of which are optional")
    mode.add_argument("names", nargs="*", type=one_of(PEERS), metavar="PEER", help=f"{', '.join(PEERS)}")
    mode = modes.add_parser("run", help="measures workloads, and writes docs/performance/")
    mode.add_argument("names", nargs="*", type=one_of(WORKLOADS), metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}")
    add_extent(mode)
    mode = modes.add_parser("more", help="measures something else of ours, and writes docs/performance/")
    mode.add_argument("names", nargs="*", type=one_of(MORE), metavar="WHAT", help=f"{', '.join(MORE)}")
    add_extent(mode)
    mode = modes.add_parser("check", help="whether all contenders train: their losses after the same number of steps")
    mode.add_argument("names", nargs="*", type=one_of(WORKLOADS), metavar="WORKLOAD")
    for each in (modes.choices["run"], mode):
        each.add_argument("--only", help="contenders whose name has one of these in it, by commas; nothing is written")
    mode = modes.add_parser("data", help="measures how many examples a second are read, beside other libraries")
    mode.add_argument("rounds", nargs="?", type=at_least_one, default=5, help="5")
    mode.add_argument("--only", default="", help="kinds of data whose name has this in it: JPEG, records, token")
    modes.add_parser("report", help="writes Markdown and plots anew, from the JSON")
    given = parser.parse_args()
    return globals()[f"mode_{given.mode}"](given)


def add_extent(mode: argparse.ArgumentParser) -> None:
    """The options that say how much is measured."""
    mode.add_argument("--rounds", type=at_least_one, default=5, help="5")
    mode.add_argument("--seconds", type=float, default=1.5, help="of training, by each contender in a round; 1.5")
    mode.add_argument(
        "--starts", type=at_least_one, default=1, help="how often all rounds are made, with new processes; 1"
    )


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """The type of an argument that is one of these names; `choices` would have to have the empty list, too."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}: give {', '.join(names)}")
        return text

    return name


def at_least_one(text: str) -> int:
    """A number of rounds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def mode_setup(given: argparse.Namespace) -> int:
    """`setup`."""
    for peer in given.names or PEERS:
        measure.say(f"{peer}: {' '.join(' '.join(each) for each in PEERS[peer])}")
        set_up(peer)
    return 0


def mode_run(given: argparse.Namespace) -> int:
    """`run`: what is found is kept after each workload."""
    for name in given.names or WORKLOADS:
        found = measure.measure(name, contenders(name, given.only), given.rounds, given.seconds, given.starts)
        if not found:
            continue
        print(f"{name}\n\n{report.speed_table(found)}\n", flush=True)
        if not given.only:
            report.write(report.merged(report.load(), "workloads", name, {"starts": given.starts, "contenders": found}))
    if not given.only:
        print(report.goals_table(report.load()))
    return 0


def mode_more(given: argparse.Namespace) -> int:
    """`more`."""
    for name in given.names or MORE:
        found = {"about": MORE[name].about, **MORE[name].make(given.rounds, given.seconds, given.starts)}
        report.write(report.merged(report.load(), "more", name, found))
    print(report.markdown(report.load()))
    return 0


def mode_check(given: argparse.Namespace) -> int:
    """`check`: all of them learn, and are about as far after the same number of steps."""
    bad = 0
    for name in given.names or WORKLOADS:
        losses = measure.check(name, contenders(name, given.only), WORKLOADS[name].check_steps)
        middle = statistics.median(last for _, last in losses.values())
        for contender, (first, last) in losses.items():
            trains = last < first and abs(last / middle - 1) <= TOLERANCE
            bad += not trains
            print(f"{name}: {contender}: {first:.3f}, then {last:.3f}{'' if trains else ': not like the others'}")
    return min(bad, 1)


def mode_data(given: argparse.Namespace) -> int:
    """Measures reading alone."""
    from benchmarks import data

    data.measure(given.rounds, given.only)
    return 0


def mode_report(given: argparse.Namespace) -> int:
    """`report`."""
    report.write(report.load())
    print(report.goals_table(report.load()))
    return 0


def contenders(workload: str, only: str | None) -> list[str]:
    """The contenders of a workload that are asked for."""
    wanted = [part.strip().lower() for part in (only or "").split(",")]
    return [name for name in WORKLOADS[workload].contenders if any(part in name.lower() for part in wanted)]


if __name__ == "__main__":
    sys.exit(main())
