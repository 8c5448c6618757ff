"""A trainer in place of `tfloop train`: no TensorFlow, so that sweeps can be killed often. It knows what `sweep` gives.

It makes 20 steps, or what `--epochs` says, of TRIAL_SECONDS each, and is best with x (or rate) = 0.3. With x >= 1 it
makes steps until it is pruned; `--set kind=fails` fails, `nan` has no finite loss. Each step is noted in `witness`, so
that steps show that were lost, or made again after they had been saved.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from loop.checkpoint.lock import locked
from loop.launch.worker import die_with_parent

SECONDS = float(os.environ.get("TRIAL_SECONDS", "0.01"))


def main():
    die_with_parent()
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run-dir", type=Path)
    given, _ = parser.parse_known_args()
    fields = dict(text.split("=") for text in given.set)
    directory, kind, x = given.run_dir, fields.get("kind", "plain"), float(fields.get("x") or fields["rate"])

    def write(name, value):
        (directory / f"{name}.tmp").write_text(json.dumps(value))
        (directory / f"{name}.tmp").replace(directory / name)

    def note(name, value):
        with (directory / name).open("ab", buffering=0) as file:
            file.write(json.dumps(value).encode() + b"\n")

    def end(status, code):
        write("run.json", {"status": status, "task": "Trial"})
        sys.exit(code)

    with locked(directory):
        write("run.json", {"status": "running", "task": "Trial"})
        state = directory / "state.json"
        step = json.loads(state.read_text()) if state.exists() else 0
        note("lives", [step, sorted(fields.items())])
        if kind == "fails":
            sys.exit("tfloop: error: planted")
        while step < given.epochs or x >= 1:
            time.sleep(SECONDS)
            step += 1
            loss = "nan" if kind == "nan" else (x - 0.3) ** 2 + 1 / step
            note("witness", step)
            for event in ("eval_end", "epoch_end"):
                metrics = {"loss": loss, "eval_loss": loss}
                note("journal.jsonl", {"time": time.time(), "event": event, "step": step, "metrics": metrics})
            write("state.json", step)
            if (directory / "prune").exists():
                end("stopped", 0)
            if stops:
                end("preempted", 75)
        end("finished", 0)


if __name__ == "__main__":
    main()
