"""Secrets in real processes: runs, jobs of two workers, sweeps, reports, MLflow's store, a webhook, commands that show.

`python -m tests.campaigns.secrets [ROUNDS] [SEED]` draws secrets, gives them to a task by `--set`, by a file of
options, by the environment, as defaults of the class, within URIs and in a sweep. The task prints them, and fails with
them. Then every byte of every file that was written, of every stream and of what the webhook got is searched for them.
"""

import base64
import json
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent.parent
TFLOOP = [sys.executable, "-P", "-m", "cli"]
TASK = """
import os, sys
from dataclasses import dataclass
import numpy as np
import keras, tensorflow as tf
from callbacks import LambdaCallback, Notify
from loop import ArrayData, TrainTask

@dataclass
class Secretive(TrainTask):
    db_password: str = ""
    hf_token: str = ""
    openaiApiKey: str = ""
    passphrase: str = {default!r}
    url: str = ""
    hook: str = ""
    fails: bool = False

    def build_model(self):
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        return ArrayData(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"))

    def compute(self, model, batch, training):
        return {{"loss": tf.reduce_sum((model(batch[0]) - batch[1]) ** 2, -1)}}

    def told(self):
        others = [self.hf_token, os.environ["SOME_TOKEN"]]
        return f"{{self}} {{self.db_password}} {{self.url}} {{others}} {{self.passphrase}}"

    def build_callbacks(self):
        def tell(run, metrics):
            print("told:", self.told(), self.openaiApiKey, flush=True)
            print(repr(self.told()), file=sys.stderr, flush=True)
            if self.fails:
                raise RuntimeError(self.told())
        return [LambdaCallback(epoch_end=tell, runs_on="all"), Notify(self.hook)]
"""


def drawn(draw, length=20):
    """A secret that a shell, a URI and JSON write otherwise than it is."""
    return "".join(draw.choices(string.ascii_letters + string.digits + "@/:#%&+'\"\\{}<> äß", k=length)).strip() + "x9"


class Round:
    """One set of secrets, and what became of it in a directory."""

    def __init__(self, seed, place):
        draw = random.Random(seed)
        names = ("db_password", "hf_token", "openaiApiKey", "passphrase", "SOME_TOKEN", "first", "second", "uri")
        self.secrets = {name: drawn(draw) for name in names}
        self.secrets |= {name: quote(self.secrets[name], safe="") for name in ("uri",)}
        self.place, self.streams, self.got = place, {}, []
        (place / "given").mkdir()
        (place / "given" / "task.py").write_text(TASK.format(default=self.secrets["passphrase"]))
        options = f"[set]\nopenaiApiKey = {json.dumps(self.secrets['openaiApiKey'])}\n"
        (place / "given" / "options.toml").write_text(options)
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "SOME_TOKEN": self.secrets["SOME_TOKEN"], "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def run(self, name, *arguments, code=None, **environment):
        """Runs a command, and keeps what it prints."""
        done = subprocess.run(
            [*TFLOOP, *map(str, arguments)], cwd=self.place, capture_output=True, timeout=1800, check=False,
            env={**self.environment, **environment},
        )  # fmt: skip
        self.streams[f"{name} stdout"], self.streams[f"{name} stderr"] = done.stdout, done.stderr
        if code is not None and done.returncode != code:
            sys.exit(f"{name}: exit code {done.returncode}, not {code}:\n{done.stderr.decode()[-3000:]}")

    def sets(self, hook, **more):
        """The fields of the task, as they are typed."""
        uri = f"mysql+pymysql://me:{self.secrets['uri']}@host/db?password={self.secrets['uri']}"
        fields = {"hf_token": self.secrets["hf_token"], "url": uri, "hook": hook, **more}
        return ["--config=given/options.toml", *(f"--set={name}={value}" for name, value in fields.items())]

    def commands(self, hook):
        """All ways out."""
        task, store = "given/task.py:Secretive", f"sqlite:///{self.place}/mlflow.db"
        fields = self.sets(hook, db_password=self.secrets["db_password"])
        train = ["train", task, "--batch-size=4", *fields]
        tracked = ["--run-dir=runs/a", f"--track={store}", f"--tag=token={self.secrets['first']}"]
        self.run("train", *train, *tracked, "--epochs=2", "--json", code=0)
        self.run("resume", *train, *tracked, "--epochs=3", "--set=fails=true", code=2)
        self.run("fail", *train, *tracked, "--epochs=3", "--set=fails=true", "--accept-changes", code=1)
        two = ["--workers=2", "--backend=multiworker", "--epochs=1", "--track=off"]
        self.run("workers", *train, *two, "--run-dir=runs/b", "--json", code=0)
        self.run("workers fail", *train, *two, "--run-dir=runs/c", "--set=fails=true", code=1)
        grid = f"db_password={json.dumps(self.secrets['first'])},{json.dumps(self.secrets['second'])}"
        swept = ["--batch-size=4", "--epochs=1", "--metric=loss", f"--track={store}", "--sweep-dir=runs/swept"]
        self.run("sweep", "sweep", task, *swept, "--jobs=2", "--grid", grid, *self.sets(hook), code=0)
        for words in (
            ["runs"], ["runs", "--json"], ["runs", "show", "a"], ["runs", "show", "a", "--json"],
            ["runs", "compare", "a", "b"], ["tail", "c", "--no-follow"], ["report", "a"],
            ["export", "runs/a", "out.npz"],
        ):  # fmt: skip
            self.run(" ".join(words), *words, code=0)
        self.run("evaluate", "evaluate", "runs/a", "--target", task)
        self.run("doctor", "doctor", MLFLOW_TRACKING_URI=f"mysql://me:{self.secrets['uri']}@127.0.0.1:9/x")
        self.run("sync", "sync", "runs/a", "--track", f"http://me:{self.secrets['uri']}@127.0.0.1:9/x")
        self.run("wrong", "train", task, *fields, "--set", f"pwd={self.secrets['second']}", code=2)

    def found(self):
        """Where a secret stands, as it is or as something writes it."""
        contents = dict(self.streams) | {f"webhook {number}": body for number, body in enumerate(self.got)}
        for path in self.place.rglob("*"):
            if path.is_file() and "given" not in path.relative_to(self.place).parts:
                contents[str(path.relative_to(self.place))] = path.read_bytes()
                contents[f"the name {path}"] = os.fsencode(path)
        for name, secret in self.secrets.items():
            forms = {
                secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1],
                quote(secret), quote(secret, safe=""), base64.b64encode(secret.encode()).decode(),
            }  # fmt: skip
            for where, content in contents.items():
                for form in forms:
                    if form.encode() in content:
                        yield f"{name} is in {where}: {form!r}"


def listening(got):
    """A webhook."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(rounds=3, seed=None):
    seed = int(time.time()) if seed is None else seed
    for number in range(seed, seed + rounds):
        place = Path(tempfile.mkdtemp(prefix="tfloop-secrets-"))
        try:
            one = Round(number, place)
            server = listening(one.got)
            one.commands(f"http://127.0.0.1:{server.server_port}/hook")
            server.shutdown()
            server.server_close()
            found = sorted(one.found())
            searched = sum(path.is_file() for path in place.rglob("*")) + len(one.streams) + len(one.got)
            masked = sum(b"***" in content for content in [*one.streams.values(), *one.got])
            print(f"seed {number}: {searched} files, streams and messages searched, {masked} have masks", flush=True)
            if found:
                sys.exit("\n".join(found))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{rounds} rounds: no secret found")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
