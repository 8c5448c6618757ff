"""A trainer in place of `tfloop train`: no TensorFlow, and a fault that can be planted, so that `chaos` can be tried.

It knows the arguments that `chaos` gives. Its weights are a hash of all examples in order. TARGET names the fault.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from loop.checkpoint import checkpoint_files

EXAMPLES, BATCH, EPOCHS = 40, 4, 6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    for name in ("callback", "run-dir", "track", "checkpoint-every"):
        parser.add_argument(f"--{name}", type=Path if name == "run-dir" else str)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    checkpoints = given.run_dir / "checkpoints"
    given.run_dir.mkdir(exist_ok=True)
    (given.run_dir / "run.json").write_text(json.dumps({"pid": os.getpid()}))
    found = checkpoint_files.newest(checkpoint_files.complete(checkpoints), print)
    step, weights = 0, b""
    if found:
        step, weights = found[1]["step"], checkpoint_files.read(*found)["weights"].tobytes()
    life = len(list(given.run_dir.glob("life-*")))
    (given.run_dir / f"life-{life}").touch()
    fault = given.fault if life else ""
    if fault == "fails":
        sys.exit("planted")
    if given.fault == "lingers":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if fault == "noise":
        weights += b"noise"
    examples = Path(given.callback.partition("=")[2])
    with (examples / f"{life:06d}-0.jsonl").open("ab", buffering=0) as log:
        per_epoch = EXAMPLES // BATCH
        log.write(json.dumps(divmod(step, per_epoch)).encode() + b"\n")
        step += fault == "forgets"
        while step < EPOCHS * per_epoch:
            epoch, number = divmod(step, per_epoch)
            order = np.random.default_rng(epoch).permutation(EXAMPLES).tolist()
            index = order[number * BATCH : (number + 1) * BATCH]
            if fault == "doubles":
                index = index[:-1] + index[:1]
            log.write(json.dumps([epoch, number, 0, index, [f"{i:x}" for i in index]]).encode() + b"\n")
            weights = hashlib.sha256(weights + repr(sorted(index)).encode()).digest()
            step += 1
            time.sleep(0.002)
            if step % int(given.checkpoint_every or per_epoch) == 0:
                tensors = {"weights": np.frombuffer(weights, np.uint8), "ballast": np.zeros(1_000_000)}
                checkpoint_files.write(checkpoints, step, tensors, {})
    result = {"weights_sha256": hashlib.sha256(weights).hexdigest(), "steps": step, "examples": step * BATCH}
    print(json.dumps(result | {"backend": "none", "replicas": 1}))


if __name__ == "__main__":
    main()
