"""A sweep on a Ray cluster, through the loss of a node and of the sweep itself: each trial comes once.

`python -m tests.campaigns.ray_sweep [TRIALS]` sweeps 24 trials of digits over three nodes; some ten minutes on two
cores.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.campaigns.sweep import Life, check, progress
from tests.conftest import TFLOOP
from tests.ray_nodes import nodes


def through_kills(cluster, place, trials):
    """Sweeps, while a raylet and then the sweep are killed; what the second start has printed.

    Args:
        cluster: `tests.ray_nodes.Nodes`.
        place: the directory for the sweep's, and for MLflow's database.
        trials: how many.
    """
    directory = place / "swept"
    uri = f"sqlite:///{place}/mlflow.db"
    values = ",".join(str(8 + number) for number in range(trials))
    command = [
        *TFLOOP, "sweep", "digits", f"--grid=hidden={values}", "--jobs=3", "--epochs=2", f"--sweep-dir={directory}",
        f"--track={uri}", "--launcher=ray", f"--address={cluster.address}", "--json",
    ]  # fmt: skip
    life = Life(command)
    assert life.wait_for(lambda: progress(directory) >= 3), life.result()
    cluster.replace_one()
    enough = progress(directory) + trials
    assert life.wait_for(lambda: progress(directory) >= enough), life.result()
    life.kill(everything=False)
    life = Life(command)
    code, shown = life.result()
    assert code == 0, shown
    check(directory, uri, trials)
    return shown


def lives(directory):
    """How often each trial was gone on with."""
    restored = []
    for path in sorted(directory.glob("trial-*")):
        events = [json.loads(line)["event"] for line in (path / "journal.jsonl").open()]
        restored.append(events.count("restore"))
    return restored


def main(trials=24):
    with tempfile.TemporaryDirectory(prefix="tfloop-ray-") as place, nodes() as cluster:
        print(through_kills(cluster, Path(place), trials))
        print(f"{trials} trials, none twice, under one parent in MLflow; gone on with: {lives(Path(place) / 'swept')}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
