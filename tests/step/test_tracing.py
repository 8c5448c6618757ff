"""How Python becomes a graph, and what that leaves behind."""

import sys
import tempfile
import threading

import tensorflow as tf

from loop.launch import signals
from loop.step import tracing


def test_what_autograph_has_written_is_removed_when_the_process_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)

    def positive(x):
        if x < 0:
            x = -x
        return x

    assert tf.function(tracing.as_written(positive), autograph=False)(tf.constant(-2.0)) == 2.0
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()]
    signals.remove_generated_code()
    assert not list(tmp_path.iterdir())


def test_a_trace_leaves_the_gradients_to_another_one_that_is_under_way():
    began, registered, ended = (threading.Event() for _ in range(3))

    @tf.custom_gradient
    def tripled(x):
        return 2 * x, lambda gradient: 3 * gradient

    def other():
        began.set()
        registered.wait()
        return tf.constant(0.0)

    def step():
        x = tf.constant(1.0)
        y = tripled(x)
        registered.set()
        ended.wait()
        return tf.gradients(y, x)[0]

    def trace_other():
        tracing.compiled(other)()
        ended.set()

    before = set(tracing.ops.gradient_registry._registry)
    thread = threading.Thread(target=trace_other)
    thread.start()
    began.wait()
    assert tracing.compiled(step)() == 3.0
    thread.join()
    assert set(tracing.ops.gradient_registry._registry) == before
