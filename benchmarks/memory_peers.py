"""Measures `remat` beside its peers: `python -m benchmarks.memory_peers [ROUNDS]`.

The Transformer of `examples/bigger.py`, plain and with each of its blocks computed again: here, by Keras's `RematScope`
in its own training, by `tf.recompute_grad` in a loop by hand, and by `checkpoint` in PyTorch, if its environment is
there (`python -m benchmarks setup torch`). Each measurement is a process of its own; those of a round come one after
the other. Activations are the peak less that of a batch of one example. There is no dropout: two of the peers leave it
out the second time, as `--gradients` shows, which compares their gradients with and without blocks computed again.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import environments
from benchmarks.memory import STEPS, measure_one

PEERS = ("tfloop", "Keras fit", "by hand", "PyTorch")


def status_field(field: str) -> float:
    """The resident memory of this process (VmRSS), or its peak (VmHWM), in MB."""
    with open("/proc/self/status") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith(f"{field}:"))
    return int(kilobytes) * 1024 / 1e6


def waits(step: Callable[[int], None]) -> dict[str, float]:
    """The peak in MB, and the median time of a step in seconds, without the first one."""
    times = []
    for number in range(STEPS):
        begun = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - begun)
    return {"peak": status_field("VmHWM"), "step": statistics.median(times[1:])}


NO_DROPOUT = ("dropout=0",)


def keras_parts(batch_size: int, assignments: Sequence[str] = NO_DROPOUT) -> tuple[Any, Any, Any]:
    """The task; inputs and labels of the steps."""
    from loop.target import task_loader

    task = task_loader.load(f"{task_loader.shipped_path('bigger')}:Transformer", assignments)
    symbols = task.train_data().arrays[: STEPS * batch_size]
    return task, symbols[:, :-1], symbols[:, 1:]


def keras_fit(batch_size: int, again: bool) -> dict[str, float]:
    """Keras's `fit`, with `RematScope`."""
    import keras

    task, inputs, labels = keras_parts(batch_size)
    with keras_scope(task.blocks) if again else contextlib.nullcontext():
        model = task.build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(task.build_optimizer(), loss, jit_compile=False)
    return waits(
        lambda n: model.train_on_batch(inputs[n * batch_size :][:batch_size], labels[n * batch_size :][:batch_size])
    )


def keras_scope(blocks: int) -> Any:
    """Keras's scope, in which blocks are computed again."""
    import keras

    return keras.RematScope(mode="list_of_layers", layer_names=[f"block_{number}" for number in range(blocks)])


def recompute(model: Any) -> None:
    """Has the blocks of a model computed again, by hand."""
    import tensorflow as tf

    for block in model.layers:
        if block.name.startswith("block_"):
            block.call = tf.recompute_grad(block.call)


def by_hand(batch_size: int, again: bool) -> dict[str, float]:
    """A loop as the guides have it, with `tf.recompute_grad`."""
    import keras
    import tensorflow as tf

    task, inputs, labels = keras_parts(batch_size)
    model = task.build_model()
    optimizer = task.build_optimizer()
    variables = model.trainable_variables
    optimizer.build(variables)
    if again:
        recompute(model)

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss

    def made(n: int) -> None:
        step(
            tf.constant(inputs[n * batch_size :][:batch_size]), tf.constant(labels[n * batch_size :][:batch_size])
        ).numpy()

    return waits(made)


def pytorch(batch_size: int, again: bool) -> dict[str, float]:
    """The same net in PyTorch, with `checkpoint`."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    blocks, width, heads, length, symbols = 12, 128, 4, 128, 64
    embedding = nn.Embedding(symbols, width)
    places = nn.Parameter(torch.zeros(length, width))
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in range(blocks)
    )
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))
    parameters = [places, *embedding.parameters(), *layers.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    half = torch.randint(symbols, (batch_size, length // 2 + 1))
    batch = torch.cat([half, half], 1)[:, : length + 1]

    def made(n: int) -> None:
        hidden = embedding(batch[:, :-1]) + places
        for layer in layers:
            hidden = checkpoint(layer, hidden, mask, use_reentrant=False) if again else layer(hidden, mask)
        loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return waits(made)


def one(peer: str, batch_size: int, again: bool) -> dict[str, float]:
    """One measurement, in this process."""
    if peer == "tfloop":
        options = {"batch_size": batch_size, **({"remat": "block_*"} if again else {})}
        return measure_one("Transformer", options, NO_DROPOUT)
    return {"Keras fit": keras_fit, "by hand": by_hand, "PyTorch": pytorch}[peer](batch_size, again)


def in_its_process(peer: str, batch_size: int, again: bool) -> dict[str, float]:
    """`one` in a new process, in the environment of the peer."""
    command, environment = environments.command("torch" if peer == "PyTorch" else "")
    request = json.dumps([peer, batch_size, again])
    done = subprocess.run(
        [*command, "-m", "benchmarks.memory_peers", "--one", request],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def gradients(kind: str, dropout: float) -> list[Any]:
    """The gradients of two blocks for a batch of 8, with the same draws for each kind: by what SGD changes weights."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    task, inputs, labels = keras_parts(8, ("blocks=2", f"dropout={dropout}"))
    with keras_scope(task.blocks) if kind == "Keras fit" else contextlib.nullcontext():
        model = task.build_model()
    if kind == "by hand":
        recompute(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=False)
    before = [np.array(weight) for weight in model.trainable_weights]
    model.train_on_batch(inputs[:8], labels[:8])
    return [np.array(weight) - old for weight, old in zip(model.trainable_weights, before, strict=True)]


def compare_gradients() -> None:
    """Prints by how much gradients differ where blocks are computed again: the norm of the difference, of theirs."""
    import numpy as np

    for dropout in (0.0, 0.1, 0.3):
        plain = np.concatenate([each.ravel() for each in gradients("plain", dropout)])
        for kind in ("Keras fit", "by hand"):
            again = np.concatenate([each.ravel() for each in gradients(kind, dropout)])
            difference = np.linalg.norm(again - plain) / np.linalg.norm(plain)
            print(f"  dropout {dropout}  {kind:10} {difference:.1e}", flush=True)


def measure(rounds: int, batch_size: int = 64) -> None:
    """Prints a row for each peer, plain and with blocks that are computed again."""
    peers = [peer for peer in PEERS if peer != "PyTorch" or environments.there("torch")]
    kinds = [(peer, again) for peer in peers for again in (False, True)]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            found[kind].append(in_its_process(kind[0], batch_size, kind[1]))
    print("peak in MB, activations in MB and of the peer's plain, time of a step in s and of the peer's plain")
    for peer, again in kinds:
        floor = in_its_process(peer, 1, again)["peak"]
        activations = statistics.median(each["peak"] for each in found[peer, again]) - floor
        step = statistics.median(each["step"] for each in found[peer, again])
        if not again:
            plain = activations
        pairs = zip(found[peer, again], found[peer, False], strict=True)
        ratio = statistics.median(mine["step"] / plain_["step"] for mine, plain_ in pairs)
        name = f"{peer}, again" if again else peer
        numbers = f"{activations + floor:8,.0f} {activations:8,.0f} {activations / plain:5.2f} {step:6.2f} {ratio:5.2f}"
        print(f"  {name:18} {numbers}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*json.loads(sys.argv[2]))))
    elif sys.argv[1:] == ["--gradients"]:
        compare_gradients()
    else:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
