"""Measures PyTorch's ZeRO beside `shard_optimizer`: `python -m benchmarks.sharding_peers [WORKERS] [BATCH]`.

The net of `benchmarks.sharding`, with Adam, in `DistributedDataParallel`: with all of the optimizer's state on each
worker, and with `ZeroRedundancyOptimizer`. Its environment is made by `python -m benchmarks setup torch`. Each worker
prints its resident memory after some steps, its peak, and the median time of a step.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks import environments

STEPS = 8
WIDTHS = (8000, 4000, 2000, 500, 300, 1)
PORT = 29_517


def work(sharded: bool, batch: int) -> None:
    """In a worker: trains, and prints what it has measured."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from benchmarks.memory_peers import status_field

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]))
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    rows = torch.randn(batch // dist.get_world_size(), WIDTHS[0])
    labels = torch.sign(rows[:, :1] + rows[:, 1:2])
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        optimizer.zero_grad()
        ((model(rows) - labels) ** 2).mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    found = {"setting": "ZeRO" if sharded else "DDP", "rank": dist.get_rank()}
    found |= {"resident_mb": round(status_field("VmRSS")), "peak_mb": round(status_field("VmHWM"))}
    print(json.dumps(found | {"step_s": round(statistics.median(times[2:]), 3)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Runs both."""
    if arguments[:1] == ["--worker"]:
        work(arguments[1] == "ZeRO", int(arguments[2]))
        return
    workers, batch = [*map(int, arguments), *(2, 256)[len(arguments) :]]
    interpreter, environment = environments.command("torch")
    for setting in ("DDP", "ZeRO"):
        command = [*interpreter, "-m", "benchmarks.sharding_peers", "--worker", setting, str(batch)]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(workers)}
        job["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
        places = [environment | job | {"RANK": str(rank)} for rank in range(workers)]
        processes = [subprocess.Popen(command, env=place) for place in places]
        exits = [process.wait() for process in processes]
        if any(exits):
            sys.exit("a worker has failed")


if __name__ == "__main__":
    main(sys.argv[1:])
