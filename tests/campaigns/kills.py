"""60 kills of digits, a third of them in checkpoint writes. `python -m tests.campaigns.kills [SHARE [ENGINE ...]]`

On three engines, and with a sharded optimizer, whose workers write a checkpoint together. Takes some 25 minutes on two
cores; with SHARE=0.1, a tenth of the kills.
"""

import functools
import sys
import tempfile
from collections import Counter
from pathlib import Path

from loop.commands.chaos import Plan, chaos, lines
from loop.commands.killed_run import WRITING

ENGINES = {
    "single": (18, ["--backend=single"]),
    "horovod": (16, ["--backend=horovod", "--workers=2"]),
    "multiworker": (16, ["--backend=multiworker", "--workers=2"]),
    "horovod, sharded": (10, ["--backend=horovod", "--workers=2", "--shard-optimizer", "--ema=0.9"]),
}


def main(share=1.0, engines=tuple(ENGINES), seed=0):
    total, failed = Counter(), []
    for engine in engines:
        kills, options = ENGINES[engine]
        with tempfile.TemporaryDirectory(prefix="tfloop-kills-") as directory:
            plan = Plan(max(2, round(kills * share)), seed, checkpoint_every="15")
            arguments = ["digits", "--epochs=8", "--seed=1", *options]
            tell = functools.partial(print, f"{engine}:", flush=True)
            report = chaos(arguments, plan, Path(directory), tell)
        print("\n".join(text for text, _ in lines(report)), flush=True)
        total.update(report.kills)
        if not report.exact:
            failed.append(engine)
    print(
        f"kills: {sum(total.values())} on {', '.join(engines)} ({', '.join(f'{n} {k}' for k, n in total.items())}): "
        + (f"NOT the same on {', '.join(failed)}" if failed else "the same weights, and each example once per epoch")
    )
    if share == 1.0 and engines == tuple(ENGINES) and total[WRITING] < 15:
        failed.append(f"only {total[WRITING]} {WRITING}")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]) if sys.argv[1:] else 1.0, tuple(sys.argv[2:]) or tuple(ENGINES))))
