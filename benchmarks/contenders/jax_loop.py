"""JAX: a compiled step, and `lax.scan` over the same super-batch as everybody's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.worker import Port, drive
from benchmarks.workloads import Workload

Weights = dict[str, jax.Array]


def dense(weights: Weights, x: jax.Array, name: str) -> jax.Array:
    """A dense layer."""
    return x @ weights[name] + weights[f"{name} bias"]


def mlp(weights: Weights, x: jax.Array) -> jax.Array:
    """784-64-10."""
    return dense(weights, jax.nn.relu(dense(weights, x, "hidden")), "out")


def cnn(weights: Weights, x: jax.Array) -> jax.Array:
    """As `workloads.cnn`."""
    x = jax.lax.conv_general_dilated(x, weights["filters"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(x + weights["filters bias"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return dense(weights, x.reshape(len(x), -1), "out")


MODELS = {
    "mlp": (mlp, {"hidden": (784, 64), "out": (64, 10)}),
    "cnn": (cnn, {"filters": (3, 3, 1, 32), "out": (13 * 13 * 32, 10)}),
}


def initial(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Initial weights as Keras has them."""
    weights, key = {}, jax.random.key(0)
    for name, shape in shapes.items():
        key, own = jax.random.split(key)
        weights[name] = jax.nn.initializers.glorot_uniform()(own, shape)
        weights[f"{name} bias"] = jnp.zeros(shape[-1])
    return weights


def serve(workload: Workload, port: Port, scan: int) -> None:
    """Trains with so many steps in a call."""
    assert workload.optimizer == "adam"
    model, shapes = MODELS[workload.build.__name__]
    inputs, labels = (jnp.asarray(array) for array in workload.arrays())
    size, per_epoch = workload.batch_size, len(inputs) // workload.batch_size

    def loss_of(weights: Weights, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(weights, x)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
        return -picked.mean(), (logits.argmax(-1) == y).mean()

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        weights, first, second, count = state
        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, *batch)
        count = count + 1
        # Adam as Keras has it: Kingma and Ba 2014, the formula before section 2.1.
        rate = workload.learning_rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-7), weights, first, second)
        return (weights, first, second, count), jnp.stack([loss, accuracy])

    @jax.jit(donate_argnums=0)
    def one(state: Any, inputs: jax.Array, labels: jax.Array, order: jax.Array, at: Any) -> tuple[Any, jax.Array]:
        rows = jax.lax.dynamic_slice_in_dim(order, at * size, size)
        return step(state, (inputs[rows], labels[rows]))

    @jax.jit(donate_argnums=0)
    def many(state: Any, inputs: jax.Array, labels: jax.Array, order: jax.Array, at: Any) -> tuple[Any, jax.Array]:
        rows = jax.lax.dynamic_slice_in_dim(order, at * size, scan * size).reshape(scan, size)
        state, values = jax.lax.scan(step, state, (inputs[rows], labels[rows]))
        return state, values.sum(0)

    weights = initial(shapes)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state: Any = (weights, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(()))
    order, at, key, train = jnp.arange(len(inputs)), per_epoch, jax.random.key(1), one if scan == 1 else many

    def run(steps: int) -> tuple[int, float]:
        nonlocal state, order, at, key
        totals = jnp.zeros(2)
        for _ in range(0, steps, scan):
            if at + scan > per_epoch:
                key, own = jax.random.split(key)
                order, at = jax.random.permutation(own, len(inputs)), 0
            state, values = train(state, inputs, labels, order, at)
            totals, at = totals + values, at + scan
        made = -(-steps // scan) * scan
        return made, float(totals[0]) / made

    drive(port, {"": (run, scan)})
