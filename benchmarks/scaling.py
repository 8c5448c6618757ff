"""Predicts how efficiently training scales, from measured compute times and the alpha-beta model of an all-reduce.

Run it as `python -m benchmarks.scaling [ROUNDS]`. It measures the compute time of a step for five models on one
replica, and all-reduces of many sizes in 2, 3 and 4 processes; fits latency and bandwidth; checks the fit on other
sizes; and predicts from 2 to 4,096 replicas. Writes `docs/performance/scaling.json`, `.md` and `.png`.

Weak scaling: each replica keeps its batch. The efficiency is the time of a step on one replica, over that on p.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs

OUT = Path(__file__).parent.parent / "docs" / "performance"
REPLICAS = [2**k for k in range(1, 13)]
PROCESSES = (2, 3, 4)
FITTED, CHECKED = (1 << 12, 1 << 16, 1 << 20, 1 << 24), (1 << 14, 1 << 18, 1 << 22)
"""The sizes of messages in bytes from which the model is fitted, and on which it is checked."""
BACKWARD = 2 / 3
"""The part of a step's compute that is the backward pass: two products of matrices for one of the forward pass. All of
it can hide communication, at best: the first gradients are there soon after it begins, the last only at its end."""


@dataclasses.dataclass(frozen=True)
class Network:
    """What an all-reduce runs on.

    Attributes:
        alpha: seconds that a message takes whatever its size.
        beta: seconds a byte.
    """

    alpha: float
    beta: float


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a replica does in a step.

    Attributes:
        parameters: of the model: a gradient has as many numbers of 4 bytes.
        compute: seconds of a step on one replica, without communication.
    """

    parameters: float
    compute: float


ETHERNET = Network(alpha=30e-6, beta=8 / 25e9)
"""An assumption, not measured: 25 Gbit/s to each replica, and 30 microseconds a message over TCP."""

ELSEWHERE = {
    # 219 images/s on a P100, batch 64: TensorFlow's benchmarks (tensorflow.org/performance/benchmarks, 2017).
    "ResNet-50, P100": Workload(25.6e6, 64 / 219),
    # 6 operations a parameter and token (Kaplan et al. 2020), 32 x 128 tokens, at 40 % of a V100's 125 Tflop/s.
    "BERT-base, V100": Workload(110e6, 6 * 110e6 * 32 * 128 / (0.4 * 125e12)),
}
"""Workloads that can't be measured here."""

# 128 servers of 4 P100 each, "RoCE-capable 25 Gbit/s" (docs/benchmarks.rst of Horovod; Sergeev and Del Balso 2018): one
# ring through all GPUs crosses each server's link once in each direction. RDMA: 5 microseconds a message, assumed.
_HOROVOD = Network(alpha=5e-6, beta=8 / 25e9)
# 32 servers of 8 P100 each, 50 Gbit/s Ethernet; all-reduce by recursive halving and doubling between servers, gradients
# added up within a server before (Goyal et al. 2017, section 4). Its logarithmic latency is taken for that of a ring of
# 2 log2(32) = 10 messages: at 30 microseconds each that is 0.3 ms.
_GOYAL = Network(alpha=10 * 30e-6 / (2 * 31), beta=8 / 50e9)
PUBLISHED = {
    # Compute: images/s of one P100, batch 64, TensorFlow's benchmarks; parameters: the papers of the models.
    "Inception V3, 512 GPUs (Horovod)": (Workload(23.9e6, 64 / 142), _HOROVOD, 512, 0.90),
    # One of 16 GPUs makes 1656.82 / 16 images/s (Horovod's docs/benchmarks.rst): a little less than one alone.
    "ResNet-101, 512 GPUs (Horovod)": (Workload(44.5e6, 64 / (1656.82 / 16)), _HOROVOD, 512, 0.90),
    "VGG-16, 512 GPUs (Horovod)": (Workload(138.4e6, 64 / 154), _HOROVOD, 512, 0.68),
    # The backward pass takes 120 ms (the paper), here 2/3 of the step.
    "ResNet-50, 256 GPUs (Goyal et al.)": (Workload(25.6e6, 0.120 / BACKWARD), _GOYAL, 32, 0.90),
}
"""Published efficiencies: workload, network, members of the ring, efficiency."""


# The model


def ring(replicas: int, size: float, network: Network) -> float:
    """Seconds of a ring all-reduce: 2 (p - 1) messages of n / p bytes, one after the other."""
    p = replicas
    return 2 * (p - 1) * network.alpha + 2 * (p - 1) / p * size * network.beta


def tree(replicas: int, size: float, network: Network) -> float:
    """Seconds of a sum up one binomial tree and a broadcast down it, not cut into pieces: 2 ceil(log2 p) messages."""
    return 2 * math.ceil(math.log2(replicas)) * (network.alpha + size * network.beta)


def efficiency(compute: float, communication: float, overlap: float = 0.0) -> float:
    """The part of a step that is compute, where so much of the compute can hide communication."""
    return compute / (compute + max(0.0, communication - overlap * compute))


def predicted(workload: Workload, network: Network, replicas: int) -> dict[str, float]:
    """The efficiencies by way of communication."""
    size = 4 * workload.parameters
    by_ring, by_tree = (reduce(replicas, size, network) for reduce in (ring, tree))
    half = min(ring(replicas, size / 2, network), tree(replicas, size / 2, network))
    return {
        "ring": efficiency(workload.compute, by_ring),
        "tree": efficiency(workload.compute, by_tree),
        "ring, overlap": efficiency(workload.compute, by_ring, BACKWARD),
        "better of both, overlap": efficiency(workload.compute, min(by_ring, by_tree), BACKWARD),
        "better of both, 16 bits": efficiency(workload.compute, half),
        "better of both, overlap, 16 bits": efficiency(workload.compute, half, BACKWARD),
    }


def fit(measured: Sequence[tuple[int, int, float]]) -> Network:
    """Latency and bandwidth of a ring from (replicas, bytes, seconds): least squares of relative errors, none < 0."""
    import numpy as np
    from scipy.optimize import nnls

    rows = [
        [ring(p, size, Network(1, 0)) / seconds, ring(p, size, Network(0, 1)) / seconds]
        for p, size, seconds in measured
    ]
    scale = np.max(rows, 0)  # the two columns differ by ten orders of magnitude
    alpha, beta = nnls(np.array(rows) / scale, np.ones(len(rows)))[0] / scale
    return Network(float(alpha), float(beta))


# Measuring


def worker(plan: str, rank: int) -> None:
    """Measures all-reduces of each size, in jobs of 2, 3 and 4."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    @tf.function
    def reduced(tensor: Any, times: Any) -> Any:
        for _ in tf.range(times):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            tensor = hvd.allreduce(tensor, op=hvd.Sum) * 0.25
        return tensor

    found: dict[str, list[float]] = defaultdict(list)
    for processes in jobs.joined(plan, rank):
        for size in sorted(FITTED + CHECKED):
            tensor, times = tf.ones([size // 4]), 20 if size < 1 << 21 else 3
            reduced(tensor, tf.constant(1)).numpy()
            begun = time.perf_counter()
            reduced(tensor, tf.constant(times)).numpy()
            found[f"{processes} {size}"].append((time.perf_counter() - begun) / times)
    if rank == 0:
        jobs.leave(plan, {name: statistics.median(each) for name, each in found.items()})


def local_workloads(rounds: int) -> dict[str, Workload]:
    """Models of five kinds, and the compute time of a step of each on one replica, of 32 examples."""
    found = {}
    for name, model, batch in _models():
        step = _compute_step(model, *batch)
        step()
        times = []
        for _ in range(max(rounds, 3)):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        found[name] = Workload(float(model.count_params()), statistics.median(times))
    return found


def _compute_step(model: Any, inputs: Any, labels: Any) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(0.01)
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(inputs, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return loss

    given = tf.constant(inputs), tf.constant(labels)
    return lambda: step(*given).numpy()


def _models() -> Iterator[tuple[str, Any, tuple[Any, Any]]]:
    import keras
    import numpy as np

    from examples.charlm import CharLM

    layers, random = keras.layers, np.random.default_rng(0)

    def images(*shape: int) -> tuple[Any, Any]:
        return random.normal(size=(32, *shape)).astype("float32"), random.integers(0, 10, 32)

    def dense(*widths: int) -> Any:
        return keras.Sequential(
            [keras.Input((784,)), *(layers.Dense(each, "relu") for each in widths), layers.Dense(10)]
        )

    yield "MLP 784-64-10", dense(64), images(784)
    convolutions = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    yield "small CNN", keras.Sequential([keras.Input((28, 28, 1)), *convolutions, layers.Dense(10)]), images(28, 28, 1)
    task = CharLM(characters=100_000)
    rows = task.windows[:32].astype("int32")
    yield "character Transformer", task.build_model(), (rows[:, :-1], rows[:, 1:])
    yield "ResNet-20", resnet20(), images(32, 32, 3)
    yield "MLP 784-5900-5900-10", dense(5900, 5900), images(784)


def resnet20() -> Any:
    """ResNet-20 for images of 32 x 32 (He et al. 2016, section 4.2), shortcuts by a convolution."""
    import keras

    layers = keras.layers

    def normed(x: Any, width: int, stride: int = 1, size: int = 3) -> Any:
        return layers.BatchNormalization()(layers.Conv2D(width, size, stride, "same", use_bias=False)(x))

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(normed(inputs, 16))
    for width in (16, 32, 64):
        for block in range(3):
            stride = 2 if width > 16 and block == 0 else 1
            y = normed(layers.ReLU()(normed(x, width, stride)), width)
            x = layers.ReLU()(y + (normed(x, width, stride, 1) if stride > 1 else x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


# Writing it down


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, here = result["machine"], result["fit"]
    lines = [
        "# Scaling",
        "",
        f"Measured on {about['date']}, {about['cores']} cores ({about['cpu']}), load {about['load']} at the start; "
        "`python -m benchmarks.scaling` makes this page. All numbers for more than 4 processes are predictions of a "
        "model.",
        "",
        "Weak scaling: each replica keeps its batch, and efficiency is the time of a step on one replica divided by "
        "that on p. A ring all-reduce of n bytes takes 2 (p - 1) alpha + 2 (p - 1) / p n beta. A tree (one binomial "
        "tree up and down, not cut into pieces; not NCCL's double tree) takes 2 ceil(log2 p) (alpha + n beta). With "
        "overlap, communication is hidden by the backward pass, 2/3 of compute. That is an upper bound, because the "
        "last gradients are ready only at its end. 16 bits halve n. The model leaves out input, stragglers and the "
        "slowdown of compute by communication.",
        "",
        "## The fit, and what it is worth",
        "",
        f"Horovod with gloo over loopback, 2 to 4 processes: alpha = {here['alpha'] * 1e6:.0f} us, 1 / beta = "
        f"{1e-9 / here['beta'] if here['beta'] else math.inf:.2f} GB/s, from messages of "
        f"{', '.join(f'{size:,}' for size in FITTED)} bytes. On sizes that were not used for the fit:",
        "",
        "| processes | bytes | measured ms | predicted ms | error |",
        "|---|---|---|---|---|",
        *(
            f"| {p} | {size:,} | {took * 1e3:.2f} | {said * 1e3:.2f} | {said / took - 1:+.0%} |"
            for p, size, took, said in result["check"]
        ),
        "",
        f"The median absolute error is {result['median_error']:.0%}. This checks how the formula depends on the "
        "message size, on processes that share two cores: 3 or more processes wait for a core as well as for each "
        "other. It doesn't check networks or hundreds of replicas.",
        "",
        "## Published results",
        "",
        "The model's predictions for published networks and compute times (parameters and sources are in "
        "`benchmarks/scaling.py`):",
        "",
        "| | published | model, no overlap | model, full overlap |",
        "|---|---|---|---|",
        *(
            f"| {name} | {published:.0%} | {none:.0%} | {full:.0%} |"
            for name, (published, none, full) in result["published"].items()
        ),
        "",
        "The published value should lie between the two columns. Overlap is never full, because the last gradients are "
        "ready only at the end of the backward pass; for VGG-16, the reduction takes longer than the whole backward "
        "pass. Links below their nominal speed, stragglers and input explain the difference where the model says "
        "100 %.",
        "",
        "## Predictions",
        "",
        f"Assumed: {8e-9 / ETHERNET.beta:.0f} Gbit/s, {ETHERNET.alpha * 1e6:.0f} us per message, 32 examples per "
        "replica. Compute times are measured here on CPUs (those of ResNet-50 and BERT-base are published or derived, "
        "on GPUs):",
        "",
        "![Efficiency over replicas](scaling.png)",
    ]
    shown = [2, 8, 64, 512, 4096]
    for way in next(iter(result["predictions"].values()))["2"]:
        lines += ["", f"### {way}", "", f"| | gradient MB | compute ms | {' | '.join(map(str, shown))} |"]
        lines.append("|" + "---|" * (3 + len(shown)))
        for name, by_replicas in result["predictions"].items():
            each = result["workloads"][name]
            numbers = " | ".join(f"{by_replicas[str(p)][way]:.0%}" for p in shown)
            size, compute = 4e-6 * each["parameters"], 1e3 * each["compute"]
            lines.append(f"| {name} | {size:.2f} | {compute:.1f} | {numbers} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Efficiency over replicas, without and with overlap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for panel, way in zip(panels, ("ring", "better of both, overlap"), strict=True):
        for name, by_replicas in result["predictions"].items():
            panel.plot(
                REPLICAS, [100 * by_replicas[str(p)][way] for p in REPLICAS], marker="o", markersize=3, label=name
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(REPLICAS, [f"{p:,}" for p in REPLICAS], rotation=45)
        panel.set(
            title={"ring": "ring, no overlap"}.get(way, "better of ring and tree, full overlap"), xlabel="replicas"
        )
        panel.set_ylim(0, 103)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("predicted weak-scaling efficiency, %")
    panels[1].legend(loc="center", fontsize=9)
    figure.suptitle("The alpha-beta model on 25 Gbit/s, 30 us a message: a prediction, not a measurement")
    figure.savefig(path, dpi=110)


def main(rounds: int) -> None:
    """Measures, predicts and writes."""
    about = jobs.machine()
    plan: list[jobs.Job] = [(str(p), p, {}) for _ in range(rounds) for p in PROCESSES]
    times = jobs.run("benchmarks.scaling", plan)
    measured = [(*map(int, name.split()), seconds) for name, seconds in times.items()]
    network = fit([each for each in measured if each[1] in FITTED])
    check = [(p, size, took, ring(p, size, network)) for p, size, took in measured if size in CHECKED]
    workloads = {**local_workloads(rounds), **ELSEWHERE}
    result = {
        "machine": about,
        "measured_seconds": times,
        "fit": dataclasses.asdict(network),
        "check": check,
        "median_error": statistics.median(abs(said / took - 1) for _, _, took, said in check),
        "assumed_network": dataclasses.asdict(ETHERNET),
        "workloads": {name: dataclasses.asdict(each) for name, each in workloads.items()},
        "predictions": {
            name: {str(p): predicted(each, ETHERNET, p) for p in REPLICAS} for name, each in workloads.items()
        },
        "predictions_on_this_machine's_loopback": {
            name: {str(p): predicted(each, network, p) for p in REPLICAS} for name, each in workloads.items()
        },
        "published": {
            name: (said, *(predicted(workload, wires, p)[way] for way in ("ring", "ring, overlap")))
            for name, (workload, wires, p, said) in PUBLISHED.items()
        },
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    (OUT / "scaling.md").write_text(report(result))
    plot(result, OUT / "scaling.png")
    print(report(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
