"""Each launcher's variables, set by hand for two real processes on this machine. `python -m tests.campaigns.launchers`

Their weights must be those of `--workers 2`, to the bit. SkyPilot and Kubernetes start one worker on a host: for them
tests/launch/test_hosts.py has two network namespaces. Takes some 2 minutes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import launchers


def main():
    for backend in ("multiworker", "horovod"):
        with tempfile.TemporaryDirectory(prefix="tfloop-launchers-") as directory:
            command = [sys.executable, "-m", "cli", *launchers.STEPS, "--workers", "2", "--backend", backend]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
        expected = json.loads(done.stdout)["weights_sha256"]
        print(f"{backend:12} {'--workers 2':12} {expected[:16]}", flush=True)
        for launcher in launchers.SHARED:
            with tempfile.TemporaryDirectory(prefix="tfloop-launchers-") as directory:
                result, _ = launchers.train(launcher, Path(directory), backend)
            weights = result["weights_sha256"]
            assert weights == expected, (launcher, result)
            print(f"{result['backend']:12} {launcher:12} {weights[:16]}", flush=True)


if __name__ == "__main__":
    main()
