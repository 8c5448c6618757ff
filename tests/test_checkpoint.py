"""Checkpoint files: complete or not there, and never believed when they have changed."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop import checkpoint

TENSORS = {
    "model/00000:dense/kernel": np.arange(12, dtype="float32").reshape(3, 4),
    "model/00001:half": np.arange(3).astype(ml_dtypes.bfloat16),
    "model/00002:seed": np.array([7, 9], "uint32"),
    "optimizer/00000:iterations": np.array(5, "int64"),
}


def write(directory, step=5):
    return checkpoint.write(directory, step, TENSORS, {"progress": {"step": step}})


def test_what_is_written_comes_back_bit_for_bit(tmp_path):
    path = write(tmp_path)
    manifest = checkpoint.verify(path)
    found = checkpoint.read(path, manifest)
    assert list(found) == list(TENSORS)
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert manifest["progress"] == {"step": 5}
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "tensors.npz"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_damage_is_found(data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("damage")
    older, newer = write(directory, 3), write(directory, 4)
    original = checkpoint.verify(newer)
    victim = newer / data.draw(st.sampled_from(["manifest.json", "tensors.npz"]))
    content = victim.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "truncate", "delete", "empty"]))
    if kind == "flip":
        place = data.draw(st.integers(0, len(content) - 1))
        flipped = bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))])
        victim.write_bytes(content[:place] + flipped + content[place + 1 :])
    elif kind == "truncate":
        victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "delete":
        victim.unlink()
    else:
        victim.write_bytes(b"")
    warnings = []
    path, manifest = checkpoint.newest(checkpoint.complete(directory), warnings.append)
    if path == newer:  # a flip from one white space to another
        assert victim.name == "manifest.json"
        assert manifest == original
    else:
        assert path == older
        assert "step-00000004" in warnings[0]


def test_none_good_is_an_error_not_a_fresh_start(tmp_path):
    for step in (3, 4):
        (write(tmp_path, step) / "tensors.npz").write_bytes(b"garbage")
    with pytest.raises(checkpoint.CheckpointError, match="none of its 2 checkpoints is good; not starting from step 0"):
        checkpoint.newest(checkpoint.complete(tmp_path), lambda text: None)


def test_half_written_ones_are_not_found_and_are_replaced(tmp_path):
    partial = tmp_path / "step-00000005.tmp"
    partial.mkdir()
    (partial / "tensors.npz").write_bytes(b"half")
    assert checkpoint.complete(tmp_path) == []
    assert checkpoint.complete(tmp_path / "nowhere") == []
    assert checkpoint.verify(write(tmp_path))["step"] == 5
    assert not partial.exists()


def test_full_disk_leaves_the_old_ones_and_no_litter(tmp_path, monkeypatch):
    old = write(tmp_path, 3)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    monkeypatch.undo()
    assert checkpoint.verify(old)["step"] == 3


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        write(tmp_path, step)
    assert [checkpoint.verify(path)["step"] for path in checkpoint.complete(tmp_path)] == [5, 99_999_999, 100_000_000]


def test_checkpoints_hold_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    path = write(tmp_path)
    manifest = checkpoint.verify(path)
    np.savez(path / "tensors.npz", **{name: np.array([Evil()], dtype=object) for name in TENSORS})
    manifest["files"]["tensors.npz"] = checkpoint._describe(path / "tensors.npz")
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._digest(manifest)}))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        checkpoint.read(path, checkpoint.verify(path))
