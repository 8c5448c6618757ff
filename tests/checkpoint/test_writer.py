"""Checkpoints that are written in the background: what of a tensor is written."""

import numpy as np
import pytest
import tensorflow as tf

from loop.checkpoint import checkpoint_files
from loop.checkpoint.writer import Snapshot, Writer

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "float64", "complex64"]


@pytest.mark.parametrize("shape", [(), (3,), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_variable_of_any_type_and_shape_comes_back(dtype, shape, tmp_path):
    variable = tf.Variable(tf.cast(tf.ones(shape), dtype))
    writer = Writer()
    writer.write(tmp_path / "checkpoints", [Snapshot("test", 5, {"value": variable.read_value()})])
    writer.close()
    assert list(writer.outcomes()) == [None]
    [path] = checkpoint_files.complete(tmp_path / "checkpoints")
    value = checkpoint_files.read(path, checkpoint_files.verify(path))["value"]
    assert value.dtype == variable.dtype.as_numpy_dtype
    np.testing.assert_array_equal(value, np.ones(shape, value.dtype))
