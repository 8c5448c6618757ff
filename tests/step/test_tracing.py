"""How Python becomes a graph, and what that leaves behind."""

import sys
import tempfile

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
