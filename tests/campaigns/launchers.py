"""Each launcher has the weights of `--workers N`, to the bit. `python -m tests.campaigns.launchers [NAME]`

With NAME that launcher alone. Where Horovod is built with MPI, `mpirun` lets MPI add: three numbers, in another order
than Gloo adds them. There the weights are the same to rounding, which float64 shows. In float32, Adam makes steps of
full size out of the gradient of a bias before a normalization, which is nothing but rounding.

Two tasks, digits and a CNN with BatchNorm and dropout, on 2 and 3 workers of this machine, with Horovod and
`multiworker`. Launchers that only set variables have them set by hand; `mpirun`, `horovodrun` and Ray are themselves,
where they are installed. SkyPilot and Kubernetes start one worker on a host: for them tests/launch/test_hosts.py has
two network namespaces. Takes some 30 minutes on two cores.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from loop.launch import schedulers
from tests import launchers
from tests.campaigns.elastic import distance, last_weights
from tests.conftest import ROOT, TFLOOP
from tests.ray_nodes import nodes

TARGETS = ("digits", f"{ROOT / 'tests' / 'tasks.py'}:Conv")
BY_VARIABLES = ("Slurm", *launchers.SHARED)
OPTIONS = ("--steps", "5", "--seed", "1", "--track", "off", "--run-dir", "run", "--json")
ROUNDING = 1e-10
"""How far variables of float64 may be apart, for the same reason."""
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np")


def result_of(command, directory):
    """What the chief prints at its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "weights_sha256" in line]
    assert done.returncode == 0, done.stderr
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0][lines[0].index("{") :])


def commands(address, workers, train):
    """The commands of launchers that are themselves here, by name."""
    found = {
        "--hosts": [*train, f"--hosts=localhost:{workers}"],
        "Ray": [*train, f"--workers={workers}", "--launcher=ray", f"--address={address}"],
    }
    if shutil.which("mpirun"):
        found["mpirun"] = [*MPIRUN, str(workers), *train]
    return found


def compare(target, backend, workers, address, only=None):
    """Trains by each launcher; yields the name of each, and what it printed."""
    arguments = ["train", target, *OPTIONS]
    train = [*TFLOOP, *arguments, f"--backend={backend}"]
    started = {"--workers": [*train, f"--workers={workers}"], **commands(address, workers, train)}
    for name, command in started.items():
        if only not in (None, name) and name != "--workers":
            continue
        with tempfile.TemporaryDirectory(prefix="tfloop-launchers-") as directory:
            yield name, result_of(command, directory)
    for launcher in BY_VARIABLES if only is None else set(BY_VARIABLES) & {only}:
        if (launcher, backend) == ("jsrun", "horovod") and schedulers.horovod_has_mpi():
            continue  # the variables alone aren't MPI
        with tempfile.TemporaryDirectory(prefix="tfloop-launchers-") as directory:
            result, _ = launchers.train(launcher, Path(directory), backend, workers, arguments)
            yield launcher, result


def apart_in_float64(target, backend, workers):
    """How far the variables of `--workers` and `mpirun` are apart, with layers of float64."""
    train = [*TFLOOP, "train", target, *OPTIONS, f"--backend={backend}", "--precision=float64"]
    found = []
    for command in ([*train, f"--workers={workers}"], [*MPIRUN, str(workers), *train]):
        with tempfile.TemporaryDirectory(prefix="tfloop-launchers-") as directory:
            result_of(command, directory)
            found.append(last_weights(Path(directory) / "run"))
    return distance(*found)


def main(only=None):
    different = 0
    with nodes() as cluster:
        for target in TARGETS:
            for backend in ("multiworker", "horovod"):
                for workers in (2, 3):
                    print(f"{target.rpartition(':')[2]}, {backend}, {workers} workers", flush=True)
                    expected = None
                    for name, result in compare(target, backend, workers, cluster.address, only):
                        weights = result["weights_sha256"]
                        expected = expected or weights
                        assert (result["backend"], result["replicas"]) == (backend, workers), (name, result)
                        verdict = "the same"
                        if weights != expected and name == "mpirun" and schedulers.horovod_has_mpi():
                            apart = apart_in_float64(target, backend, workers)
                            different += apart > ROUNDING
                            verdict = f"the same to rounding: {apart:.1e} apart in float64"
                        elif weights != expected:
                            different += 1
                            verdict = "OTHER WEIGHTS"
                        print(f"  {name:12} {weights[:16]}  {verdict}", flush=True)
    return different


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(*sys.argv[1:]))
