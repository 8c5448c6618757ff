"""Measures what a step's communication costs in 2 processes: how many collectives, how large, with which settings.

Run it as `python -m benchmarks.communication [ROUNDS]`. All ways take turns, in the same processes; a number is the
median over the rounds of the mean time of a step. Writes `docs/performance/communication.json` and `.md`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import jobs

OUT = Path(__file__).parent.parent / "docs" / "performance"
MODELS = ("784-64-10", "784-8x512-10")
"""Dense models, by the widths of their layers."""
LARGE = [784 * 5900, 5900, 5900 * 5900, 5900, 59000, 10]
"""The sizes of the tensors of a dense model of 39.5 million numbers, 158 MB."""
BATCH, STEPS = 64, 40
EXAMPLES = 32_000
"""A batch of a fifth of them, the largest in `benchmarks.collectives`, makes whole epochs."""
STEP_WAYS: dict[str, dict[str, Any]] = {
    "one fused collective": {},
    "one per tensor": {"per_tensor": True},
    "2 groups": {"groups": 2},
    "4 groups": {"groups": 4},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "accumulate 4": {"accumulate": 4},
    "accumulate 4, one per tensor": {"accumulate": 4, "per_tensor": True},
}
BRIEF = ("one fused collective", "one per tensor")
"""The ways that are measured under each of Horovod's settings."""
EXAMPLE = "Horovod's documented loop"
THEIRS, OURS = "Horovod's own settings", "cycle time 0.5 ms, ours"
SETTINGS: dict[str, dict[str, str]] = {
    THEIRS: {},
    "cycle time 0.1 ms": {"HOROVOD_CYCLE_TIME": "0.1"},
    OURS: {"HOROVOD_CYCLE_TIME": "0.5"},
    "cycle time 2 ms": {"HOROVOD_CYCLE_TIME": "2"},
    "cycle time 5 ms": {"HOROVOD_CYCLE_TIME": "5"},
    "no response cache": {"HOROVOD_CACHE_CAPACITY": "0"},
}
THRESHOLDS = {
    "fusion threshold 64 KiB": {"HOROVOD_FUSION_THRESHOLD": str(1 << 16)},
    "fusion threshold 1 GiB": {"HOROVOD_FUSION_THRESHOLD": str(1 << 30)},
}
"""In processes of their own: Horovod crashes where a process joins a second job with another one."""

# In a worker


def step_ways(
    backend: Any, model: str, ways: Mapping[str, dict[str, Any]], sent: dict[str, Any], steps: int = STEPS
) -> dict[str, Callable[[], Any]]:
    """A function for each way, which makes these steps in one call; what a step sends is put in `sent`."""
    import keras

    from loop import ArrayData, TrainTask
    from loop.data import open_data
    from loop.options import with_defaults
    from loop.step.build import build
    from loop.step.communication import collectives
    from loop.step.train_step import TrainStep

    class Dense(TrainTask):
        def build_model(self) -> Any:
            return dense(model)

        def build_optimizer(self) -> Any:
            return keras.optimizers.SGD(0.01)

        def train_data(self) -> ArrayData:
            return ArrayData(*examples())

        def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
            images, labels = batch
            logits = model(images, training=training)
            return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}

    def way(name: str, per_tensor: bool = False, **chosen: Any) -> Callable[[], Any]:
        import tensorflow as tf

        options = with_defaults(Dense(), {"batch_size": BATCH, **chosen}) | {"backend": backend.name}
        data = open_data(Dense(), options)
        built = build(Dense(), backend, "float32", data.train.example)
        step = TrainStep(Dense(), built, backend, data.sharded(backend, "example"), options)
        backend.broadcast_variables(built.variables + step.variables)
        handle = step.data.train.start(0, 0)
        if per_tensor:
            fused = backend.all_reduce
            backend.all_reduce = lambda tensors: [each for tensor in tensors for each in fused([tensor])]
        step.train(handle, 0, 0, 1)
        backend.__dict__.pop("all_reduce", None)
        place = (tf.constant(number, tf.int64) for number in (0, 0, 1))
        sizes = collectives(step._train.get_concrete_function(handle, *place))
        sent[f"{model}: {name}"] = {"collectives": len(sizes), "bytes": sum(sizes)}
        return lambda: step.train(handle, 0, 0, steps)

    return {
        f"{model}: {name}": way(name, **chosen)
        for name, chosen in ways.items()
        if chosen.get("compression") not in backend.cannot_send
    }


def dense(model: str) -> Any:
    """A model such as those of `MODELS`."""
    import keras

    widths: list[int] = []
    for part in model.split("-")[1:-1]:
        count, _, width = part.rpartition("x")
        widths += int(count or 1) * [int(width)]
    hidden = [keras.layers.Dense(width, "relu") for width in widths]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def examples() -> tuple[Any, Any]:
    """Images and labels, drawn."""
    import numpy as np

    random = np.random.default_rng(0)
    return random.normal(size=(EXAMPLES, 784)).astype("float32"), random.integers(0, 10, EXAMPLES)


def documented_loop(model: str, rank: int, size: int) -> Callable[[], Any]:
    """Horovod's `examples/tensorflow2/tensorflow2_mnist.py`: a call a step, a collective a tensor."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    built, loss, optimizer = dense(model), keras.losses.SparseCategoricalCrossentropy(True), keras.optimizers.SGD(0.01)
    weights = [variable.value for variable in built.trainable_variables]
    dataset = tf.data.Dataset.from_tensor_slices(tuple(each[rank::size] for each in examples()))
    batches = iter(dataset.repeat().shuffle(10000).batch(BATCH // size))

    @tf.function
    def training_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, built(images, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(value, weights)
        optimizer.apply(gradients, built.trainable_variables)
        return value

    def steps() -> None:
        for number in range(STEPS):
            value = training_step(*next(batches))
            if number % 10 == 0:
                value.numpy()  # the example prints it

    steps()
    return steps


def raw_ways(backend: Any) -> dict[str, Callable[[], Any]]:
    """A function for each way to add up the tensors of a large model, alone."""
    import tensorflow as tf

    tensors = [tf.ones([size]) for size in LARGE]

    def compiled(reduce: Callable[[list[Any]], Any]) -> Callable[[], Any]:
        function = tf.function(lambda *given: backend.first(backend.run(lambda *each: reduce(list(each)), *given)))
        return lambda: function(*tensors)[0].numpy()

    def flat(tensors: list[Any]) -> Any:
        [total] = backend.all_reduce([tf.concat(tensors, 0)])
        return tf.split(total, LARGE)

    ways = {"our all_reduce": backend.all_reduce, "one per tensor": lambda ts: [backend.all_reduce([t])[0] for t in ts]}
    if backend.name == "horovod":
        ways["laid flat"] = flat
    else:
        kind = tf.distribute.experimental.CommunicationImplementation

        def with_options(**chosen: Any) -> Callable[[list[Any]], Any]:
            options = tf.distribute.experimental.CommunicationOptions(**chosen)
            context = tf.distribute.get_replica_context
            # Copies, because a tensor that comes from elsewhere may have no device.
            return lambda tensors: context().all_reduce("SUM", [tf.identity(each) for each in tensors], options)

        ways["its own list, AUTO"] = with_options(implementation=kind.AUTO)
        ways["its own list, RING"] = with_options(implementation=kind.RING)
        ways["its own list, RING, packs of 32 MB"] = with_options(implementation=kind.RING, bytes_per_pack=32 << 20)
    return {f"158 MB: {name}": compiled(reduce) for name, reduce in ways.items()}


def measure(backend: Any, ways: dict[str, Callable[[], Any]], times: dict[str, list[float]], setting: str) -> None:
    """Makes each way once, and notes the milliseconds of a step."""
    for name, way in ways.items():
        backend.exchange(0)
        begun = time.perf_counter()
        way()
        steps = 1 if name.startswith("158 MB") else STEPS
        times[f"{setting} | {name}"].append((time.perf_counter() - begun) / steps * 1e3)


def all_ways(backend: Any, sent: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What is measured under the setting that comes first."""
    small, deep = MODELS
    return {
        **step_ways(backend, small, STEP_WAYS, sent),
        **step_ways(backend, deep, dict(itertools.islice(STEP_WAYS.items(), 5)), sent),
        **raw_ways(backend),
    }


def horovod_worker(plan: str, rank: int) -> None:
    """Measures under each setting in turn."""
    from loop import backends

    ways: dict[str, Callable[[], Any]] = {}
    times: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, Any] = {}
    for setting in jobs.joined(plan, rank):
        backend = backends.create("horovod")
        if not ways and setting in THRESHOLDS:
            brief_ways = {name: STEP_WAYS[name] for name in BRIEF}
            ways = {**step_ways(backend, MODELS[0], brief_ways, sent), **raw_ways(backend)}
        elif not ways:
            ways = all_ways(backend, sent)
            for model in MODELS:
                ways[f"{model}: {EXAMPLE}"] = documented_loop(model, backend.rank, backend.workers)
                sent[f"{model}: {EXAMPLE}"] = {**sent[f"{model}: one per tensor"]}
                sent[f"{model}: {EXAMPLE}"]["collectives"] -= 1  # it doesn't reduce its loss
        if not times:
            for way in ways.values():
                way()
        brief = {name: way for name, way in ways.items() if name.endswith(BRIEF) and name.startswith(MODELS[0])}
        whole = setting == THEIRS or setting in THRESHOLDS
        measure(backend, ways if whole else brief, times, setting)
        backend.exchange(0)
    if rank == 0:
        jobs.leave(plan, {"times": times, "sent": sent})


def multiworker_worker(out: str, rounds: int) -> None:
    """Measures under `tf.distribute`, whose settings are those of each call."""
    from loop import backends

    backend = backends.create("multiworker")
    times: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, Any] = {}
    ways = all_ways(backend, sent)
    for way in ways.values():
        way()
    for _ in range(rounds):
        measure(backend, ways, times, "multiworker")
    if backend.is_chief:
        Path(out).write_text(json.dumps({"times": times, "sent": sent}))
    backend.exchange(0)
    backend.close()


# In the launcher


def multiworker(rounds: int) -> Any:
    """Runs the workers of `tf.distribute`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        command = [sys.executable, "-m", "benchmarks.communication", "--multiworker", str(out), str(rounds)]
        jobs.finish([subprocess.Popen(command, env={**os.environ, **place}) for place in jobs.tf_places(2)])
        return json.loads(out.read_text())


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, goal = result["machine"], result["goal"]
    lines = [
        "# Communication",
        "",
        f"Measured on {about['date']}, {about['cores']} cores ({about['cpu']}), load {about['load']} at the start, 2 "
        f"processes, global batch {BATCH}; medians of {result['rounds']} interleaved rounds. `python -m "
        "benchmarks.communication` makes this page.",
        "",
        f"On the 784-64-10 model, a step of {EXAMPLE} takes {goal['example_ms']:.2f} ms with {THEIRS}. A step of "
        f"tfloop, with its own cycle time, takes {goal['ours_ms']:.2f} ms: **{goal['ratio']:.2f} times as fast** "
        "(goal: at least 1.5). In all of it, Horovod's threads wait for a core, as they do in tfloop.",
    ]
    for engine in ("horovod", "multiworker"):
        part = result[engine]
        lines += [
            "",
            f"## {engine}",
            "",
            "| setting | what | collectives | bytes | ms a step |",
            "|---|---|---|---|---|",
        ]
        for name, times in part["times"].items():
            setting, what = name.split(" | ")
            sent = part["sent"].get(what, {"collectives": "", "bytes": ""})
            size = f"{sent['bytes']:,}" if sent["bytes"] else ""
            lines.append(f"| {setting} | {what} | {sent['collectives']} | {size} | {statistics.median(times):.2f} |")
    return "\n".join(lines) + "\n"


def main(rounds: int) -> None:
    """Measures, and writes both files."""
    about = jobs.machine()
    plan = [(name, 2, variables) for _ in range(rounds) for name, variables in SETTINGS.items()]
    result = {"machine": about, "rounds": rounds, "batch_size": BATCH}
    result["horovod"] = jobs.run("benchmarks.communication", plan)
    for name, variables in THRESHOLDS.items():
        found = jobs.run("benchmarks.communication", rounds * [(name, 2, variables)])
        result["horovod"]["times"] |= found["times"]
    print("Horovod is measured; now tf.distribute", file=sys.stderr, flush=True)
    result["multiworker"] = multiworker(rounds)
    times = {name: statistics.median(each) for name, each in result["horovod"]["times"].items()}
    small = MODELS[0]
    ours, theirs = times[f"{OURS} | {small}: {BRIEF[0]}"], times[f"{THEIRS} | {small}: {EXAMPLE}"]
    result["goal"] = {"ours_ms": ours, "example_ms": theirs, "ratio": theirs / ours}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "communication.json").write_text(json.dumps(result, indent=1) + "\n")
    (OUT / "communication.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        horovod_worker(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--multiworker"]:
        multiworker_worker(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
