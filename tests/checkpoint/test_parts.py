"""Checkpoints of which each worker writes its part: as exact and as safe as those that one worker writes."""

import json
import math
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop import backends, fit
from loop.checkpoint import array_files, checkpoint_files
from loop.checkpoint.array_files import InParts
from loop.checkpoint.writer import Snapshot, Writer
from tests.conftest import ROOT, needs_horovod, tfloop
from tests.sharded import Chosen

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=3)


def in_parts(array, workers):
    """What takes an array's place in a manifest, and the parts of the workers."""
    elements = -(-array.size // workers)
    flat = np.pad(array.reshape(-1), (0, elements * workers - array.size))
    return InParts(array.dtype, array.shape, elements), np.split(flat, workers)


def written(directory, arrays, workers, step=5):
    """A checkpoint of `whole`, and of arrays of which each worker has a part."""
    partial = checkpoint_files.begin(directory, step)
    places, cut = {}, {}
    for name, array in arrays.items():
        places[name], cut[name] = in_parts(array, workers)
    tensors = {"whole": np.arange(3.0)} | places
    files = array_files.write_arrays(partial / array_files.TENSORS, tensors)
    for rank in range(workers):
        own = {name: parts[rank] for name, parts in cut.items()}
        files |= array_files.write_arrays(partial / array_files.part_name(rank), own)
    return partial, lambda: checkpoint_files.finish(partial, step, files, tensors, {})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes=SHAPES, workers=st.integers(1, 4), dtype=st.sampled_from(["float32", "float64", "int8"]))
def test_parts_come_back_as_whole_arrays(shapes, workers, dtype, tmp_path_factory):
    arrays = {f"a{n}": (np.arange(math.prod(shape)) + n).astype(dtype).reshape(shape) for n, shape in enumerate(shapes)}
    _, finish = written(tmp_path_factory.mktemp("parts"), arrays, workers)
    path = finish()
    found = checkpoint_files.read(path, checkpoint_files.verify(path))
    assert list(found) == ["whole", *arrays]
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_a_checkpoint_whose_parts_alone_are_written_is_none(tmp_path):
    partial, _ = written(tmp_path, {"a": np.arange(5.0)}, 2)
    assert partial.is_dir()
    assert checkpoint_files.complete(tmp_path) == []
    checkpoint_files.write(tmp_path, 6, {"whole": np.arange(3.0)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


@pytest.mark.parametrize("victim", ["part-00000.npz", "part-00001.npz", "tensors.npz"])
def test_a_damaged_or_missing_part_is_found(victim, tmp_path):
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])):
        _, finish = written(tmp_path, {"a": np.arange(5.0)}, 2)
        path = finish()
        damage(path / victim)
        with pytest.raises(checkpoint_files.CheckpointError, match=f"{victim} (has changed|can't be read)"):
            checkpoint_files.verify(path)


@pytest.mark.parametrize("elements", [0, 2, -1, 4, 1 << 60, 3.0, True, None])
def test_a_manifest_that_lies_about_its_parts_is_refused(elements, tmp_path):
    _, finish = written(tmp_path, {"a": np.arange(5.0)}, 2)
    path = finish()
    manifest = checkpoint_files.verify(path)
    manifest["tensors"][1]["elements_of_part"] = elements
    text = json.dumps({**manifest, "sha256": checkpoint_files._digest(manifest)})
    (path / checkpoint_files.MANIFEST).write_text(text)
    with pytest.raises(checkpoint_files.CheckpointError):
        checkpoint_files.read(path, checkpoint_files.verify(path))


def test_a_worker_that_cannot_write_its_part_is_named(tmp_path):
    partial, _ = written(tmp_path, {"a": np.arange(5.0)}, 2)
    writer = Writer()
    missing = writer.write_part(tmp_path / "gone.tmp", 1, Snapshot("epoch", 5)).result()
    writer.finish(partial, Snapshot("epoch", 5), [{}, missing])
    writer.close()
    (error,) = writer.outcomes()
    problem = "worker 1 could not write its part: FileNotFoundError: .*gone.tmp"
    assert re.search(f"{tmp_path}/step-00000005: {problem}", str(error))
    assert not list(tmp_path.iterdir())


# Real workers


@needs_horovod
def test_workers_write_parts_and_any_number_goes_on(tmp_path, quiet):
    """A worker that is killed while it writes costs that checkpoint alone."""
    (tmp_path / "mine.py").write_text("from tests import sharded\n\n\nclass Chosen(sharded.Chosen):\n    pass\n")
    arguments = [
        "train", "mine.py:Chosen", "--backend", "horovod", "--workers", 2, "--shard-optimizer", "--ema", 0.9,
        "--batch-size", 20, "--checkpoint-every", "epoch", "--track", "off", "--epochs", 3, "--json",
    ]  # fmt: skip

    def train(name, fault=""):
        environment = {**os.environ, "TFLOOP_FAULT": fault, "PYTHONPATH": str(ROOT)}
        return tfloop(*arguments, "--run-dir", name, cwd=tmp_path, env=environment)

    def checkpoints(name):
        return [path.name for path in checkpoint_files.complete(tmp_path / name / "checkpoints")]

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr
    assert checkpoints("whole")[-1] == "step-00000018"
    last = tmp_path / "whole" / "checkpoints" / "step-00000018"
    assert sorted(file.name for file in last.glob("part-*")) == ["part-00000.npz", "part-00001.npz"]

    # Whichever worker fails to take its snapshot: no other one waits for it for ever.
    for rank in (0, 1):
        failed = train(f"failed-{rank}", f"snapshot:{rank}:6:raise")
        assert failed.returncode == 1
        assert re.search(f"rank {rank}: PlannedError: the fault snapshot", failed.stderr)
        assert checkpoints(f"failed-{rank}") == []

    assert train("cut", "write-part:1:12:kill").returncode == 1
    assert checkpoints("cut") == ["step-00000006"]
    again = train("cut")
    assert json.loads(again.stdout)["weights_sha256"] == json.loads(whole.stdout)["weights_sha256"]

    for replicas in (1, 3):
        backend = "single" if replicas == 1 else backends.create("mirrored", 3)
        options = {"epochs": 3, "batch_size": 20, "ema": 0.9, "backend": backend, "callbacks": quiet()}
        found = fit(Chosen(), resume=last, shard_optimizer=replicas > 1, run_dir=tmp_path / str(replicas), **options)
        assert found.weights_sha256 == json.loads(whole.stdout)["weights_sha256"]
