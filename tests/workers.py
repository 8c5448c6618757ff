"""What is to hold in real workers, in one job: `python tests/workers.py ENGINE OUT DTYPE...`, started by `run`."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from loop.launch import machine

ROOT = Path(__file__).resolve().parent.parent
JOBS = {
    ("horovod", 2): ["float64"],
    ("horovod", 3): ["float32", "float64"],
    ("multiworker", 2): ["float64", "float32"],
}
"""Engines, numbers of workers, and the types in which they train the cases, in turn: each case in each type.

Of two Horovod workers, the type that hides least. `tests.campaigns.products` trains all cases in all types.
"""


@contextlib.contextmanager
def places(engine, workers):
    """What tells each worker its place, as an outside launcher would."""
    if engine == "horovod":
        from loop.launch.horovodrun import rendezvous

        with rendezvous(workers) as each:
            yield each
    else:
        addresses = [f"127.0.0.1:{port}" for port in machine.free_ports(workers)]
        tasks = [{"type": "worker", "index": rank} for rank in range(workers)]
        yield [{"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})} for task in tasks]


def run(engine, workers, out):
    """Runs a job; what each worker has printed."""
    command = [sys.executable, "-X", "warm", __file__, engine, str(out), *JOBS[engine, workers]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with places(engine, workers) as each:
        started = [
            subprocess.Popen(
                command, env=environment | place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for place in each
        ]
        outputs = [process.communicate(timeout=290) for process in started]
    assert [process.returncode for process in started] == workers * [0], outputs
    return [stdout for stdout, _ in outputs]


if __name__ == "__main__":
    from loop import backends
    from loop.backends import devices
    from tests import conformance, exactness, sharded

    if sys.argv[1] in exactness.SPLITTING:
        devices.own_several(sys.argv[1], 2)  # before TensorFlow starts, for the case that needs both
    made = backends.create(sys.argv[1])
    for name, check in conformance.CHECKS.items():
        check(made)
        print(name, "ok")
    exactness.train_all(made, Path(sys.argv[2]), sys.argv[3:])
    sharded.compare_all(made, Path(sys.argv[2]))
    made.exchange(0)  # no worker leaves before all are done
    made.close()
