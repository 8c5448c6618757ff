"""Measures a run in object storage: how long a save of 400 MB holds training up, and how fast it is brought back.

Run it as `python -m benchmarks.store URL [ROUNDS]`, with the URL of an empty folder; it is empty again afterwards. In
turns: the longest time between two steps beyond the median one, with a run directory on this disk and at the URL; and
the time until a checkpoint is on this disk, every byte verified, against a plain download of its objects by the library
that both use. The goals: held up as little as by a local one, and at most 1.2 of the plain download.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import keras
import obstore

import callbacks
from benchmarks.save_gap import EVERY, Clock, Trained
from loop import fit
from loop.checkpoint.store import address, copies
from loop.checkpoint.store.bucket import PART, Bucket
from loop.checkpoint.store.lease import believed


def longest_gap(run_dir: Path | str) -> float:
    """The longest time between two steps, beyond the median, in seconds, with two saves on the way."""
    clock = Clock()
    keras.backend.clear_session()
    chosen = callbacks.standard(mlflow=None, progress=None, checkpoint=callbacks.Checkpoint(every=EVERY))
    options = {"steps": 3 * EVERY, "batch_size": 4, "backend": "single"}
    fit(Trained(), **options, run_dir=run_dir, callbacks=chosen + [clock])
    gaps = [after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False)]
    return max(gaps) - statistics.median(gaps)


def plain(url: str) -> float:
    """The seconds of a plain download of all that a run has, onto the disk."""
    bucket = Bucket(url)
    state = believed(bucket)
    assert state is not None
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        for number, key in enumerate(sorted(state.object_keys())):
            with (Path(directory) / str(number)).open("wb") as file:
                for chunk in obstore.get(bucket._store, key).stream(min_chunk_size=PART):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - begun


def brought(url: str) -> float:
    """The seconds until another machine has a run, verified."""
    with tempfile.TemporaryDirectory() as machine:
        os.environ["XDG_STATE_HOME"] = machine
        begun = time.perf_counter()
        copies.copy(url)
        return time.perf_counter() - begun


def measure(run: str, number: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """One round: how long training is held up, here and at the URL; how long a run takes, plain and verified."""
    with tempfile.TemporaryDirectory() as machine:
        os.environ["XDG_STATE_HOME"] = machine
        gaps = longest_gap(Path(machine) / "local"), longest_gap(run)
        ways = [plain, brought] if number % 2 else [brought, plain]
        times = {way: way(run) for way in ways}
        os.environ["XDG_STATE_HOME"] = machine
        copies.remove(run)
    return gaps, (times[plain], times[brought])


def main(url: str, rounds: int) -> None:
    """Prints the medians and their ratios."""
    gaps, times = [], []
    for number in range(rounds + 1):  # the first one warms the machine up
        held, seconds = measure(f"{url}/round-{number}", number)
        if number:
            gaps.append(held)
            times.append(seconds)
            print(f"round {number}: held up {held[0]:.3f} and {held[1]:.3f} s", end="; ")
            print(f"brought in {seconds[0]:.2f} and {seconds[1]:.2f} s", flush=True)
    local, stored = (statistics.median(each) for each in zip(*gaps, strict=True))
    print(f"held up: {1000 * local:.0f} ms on this disk, {1000 * stored:.0f} ms at the URL, ratio {stored / local:.2f}")
    downloaded, ours = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = ours / downloaded
    print(f"brought back: plain {downloaded:.2f} s, verified {ours:.2f} s, ratio {ratio:.2f} (goal: at most 1.2)")


if __name__ == "__main__":
    main(address.read_url(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 3)
