"""Checkpoint files: complete or absent, and never accepted when they have changed."""

import errno
import inspect
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.checkpoint import array_files, checkpoint_files
from loop.monitor import fault_injection
from tests.campaigns import writer
from tests.conftest import ROOT, needs_mounts

TENSORS = {
    "model/00000:dense/kernel": np.arange(12, dtype="float32").reshape(3, 4),
    "model/00001:half": np.arange(3).astype(ml_dtypes.bfloat16),
    "model/00002:seed": np.array([7, 9], "uint32"),
    "optimizer/00000:iterations": np.array(5, "int64"),
}


def write(directory, step=5):
    return checkpoint_files.write(directory, step, TENSORS, {"progress": {"step": step}})


def test_what_is_written_comes_back_bit_for_bit(tmp_path):
    path = write(tmp_path)
    manifest = checkpoint_files.verify(path)
    found = checkpoint_files.read(path, manifest)
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
    original = checkpoint_files.verify(newer)
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
    path, manifest = checkpoint_files.newest(checkpoint_files.complete(directory), warnings.append)
    if path == newer:  # a flip from one white space to another
        assert victim.name == "manifest.json"
        assert manifest == original
    else:
        assert path == older
        assert "step-00000004" in warnings[0]


def test_none_good_is_an_error_not_a_fresh_start(tmp_path):
    for step in (3, 4):
        (write(tmp_path, step) / "tensors.npz").write_bytes(b"garbage")
    with pytest.raises(
        checkpoint_files.CheckpointError, match="none of its 2 checkpoints is good: bring a good one back, or give"
    ):
        checkpoint_files.newest(checkpoint_files.complete(tmp_path), lambda text: None)


def test_half_written_ones_are_not_found_and_are_replaced(tmp_path):
    partial = tmp_path / "step-00000005.tmp"
    partial.mkdir()
    (partial / "tensors.npz").write_bytes(b"half")
    assert checkpoint_files.complete(tmp_path) == []
    assert checkpoint_files.complete(tmp_path / "nowhere") == []
    assert checkpoint_files.verify(write(tmp_path))["step"] == 5
    assert not partial.exists()


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        write(tmp_path, step)
    assert [checkpoint_files.verify(path)["step"] for path in checkpoint_files.complete(tmp_path)] == [
        5,
        99_999_999,
        100_000_000,
    ]


def sign(path, **changes):
    """Changes a checkpoint as an attacker would who computes its digests again."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["tensors.npz"] = array_files.describe(path / "tensors.npz")
    manifest = {name: value for name, value in {**manifest, **changes}.items() if name != "sha256"}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint_files._digest(manifest)}))
    return path


class Evil:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def savez(**tensors):
    return lambda path: np.savez(path, **(TENSORS | tensors))


def zipped(compression, edit=lambda content: content, size=None):
    def write(path):
        with zipfile.ZipFile(path) as before:
            members = {name: before.read(name) for name in before.namelist()}
        with zipfile.ZipFile(path, "w", compression) as after:
            for name, content in members.items():
                after.writestr(name, edit(content))
        if size:  # in the central directory at the end of the file, which no other field contradicts
            content = bytearray(path.read_bytes())
            place = content.index(b"PK\x01\x02")
            content[place + 20 : place + 28] = struct.pack("<II", size, size)
            path.write_bytes(content)

    return write


KERNEL = "model/00000:dense/kernel"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (savez(**{KERNEL: np.array([Evil()], object)}), "'model/00000:dense/kernel' is object"),
        (savez(**{KERNEL: np.zeros((3, 4), "float64")}), r"is float64\[3, 4\], not float32\[3, 4\]"),
        (savez(**{KERNEL: np.zeros((4, 3), "float32")}), r"is float32\[4, 3\], not float32\[3, 4\]"),
        (savez(**{KERNEL: np.zeros((3, 4), ">f4")}), "is >f4"),
        (lambda path: np.savez(path, other=np.zeros(3)), "There is no item named 'model/00000:dense/kernel.npy'"),
        (lambda path: np.save(path.open("wb"), np.zeros(3)), "File is not a zip file"),
        (lambda path: path.write_bytes(b""), "File is not a zip file"),
        (zipped(zipfile.ZIP_DEFLATED), "is compressed"),
        (zipped(zipfile.ZIP_STORED, size=1 << 31), "it says that it is longer than it is"),
        (zipped(zipfile.ZIP_STORED, lambda content: content[:-1]), "bytes, which is not its size"),
        (zipped(zipfile.ZIP_STORED, lambda content: content[:7]), "ValueError"),
        (zipped(zipfile.ZIP_STORED, lambda content: b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535), "ValueError"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_tensors_of_a_stranger(make, why, tmp_path):
    path = write(tmp_path)
    make(path / "tensors.npz")
    manifest = checkpoint_files.verify(sign(path))
    with pytest.raises(checkpoint_files.CheckpointError, match=rf"step-00000005: tensors.npz can't be read \(.*{why}"):
        checkpoint_files.read(path, manifest)
    assert not (tmp_path / "unpickled").exists()


def test_declared_sizes_are_not_believed(tmp_path):
    path = write(tmp_path)
    entries = [{"name": KERNEL, "dtype": "float32", "shape": [1 << 40]}]
    with pytest.raises(checkpoint_files.CheckpointError, match=r"not float32\[1099511627776\]"):
        checkpoint_files.read(path, checkpoint_files.verify(sign(path, tensors=entries)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"files": {"../tensors.npz": {}, "tensors.npz": {"bytes": 1}}},
            "'../tensors.npz' isn't a name of a file in it",
        ),
        ({"files": {"/etc/passwd": {}, "tensors.npz": {"bytes": 1}}}, "'/etc/passwd' isn't a name of a file in it"),
        ({"files": {}}, "KeyError: 'tensors.npz'"),
        ({"files": {"tensors.npz": {"bytes": 1.0}}}, "bytes of tensors.npz is 1.0"),
        ({"step": "5"}, "step is '5'"),
        ({"step": 6}, "is of step 6"),
        ({"format": 1}, "format 1, this version reads 2 and 3"),
        ({"tensors": [{"name": "a", "dtype": "object", "shape": []}]}, "'object' isn't a type of numbers"),
        ({"tensors": [{"name": "a", "dtype": "int8", "shape": [-1]}]}, "tensors has"),
        ({"tensors": None}, "TypeError"),
    ],
)
def test_manifests_of_a_stranger(changes, why, tmp_path):
    with pytest.raises(checkpoint_files.CheckpointError, match=why):
        checkpoint_files.verify(sign(write(tmp_path), **changes))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([1, 5, "tensors.npz", "int8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("bytes"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(changes=st.dictionaries(st.sampled_from(["format", "step", "files", "tensors", "progress"]), JSON), whole=JSON)
def test_any_json_is_a_good_manifest_or_an_error(changes, whole, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("json"))
    for text in (None, json.dumps(whole)):
        sign(path, **changes) if text is None else (path / "manifest.json").write_text(text)
        try:
            manifest = checkpoint_files.verify(path)
        except checkpoint_files.CheckpointError:
            continue
        assert (manifest["format"], manifest["step"]) == (checkpoint_files.FORMAT, 5)
        try:
            found = checkpoint_files.read(path, manifest)
        except checkpoint_files.CheckpointError:
            continue
        assert all(np.array_equal(found[name], TENSORS[name]) for name in found)


@pytest.mark.parametrize(
    "content", ["[" * 1_000_000, '{"a":' * 900 + "1" + "}" * 900, "1" * 10_000, "NaN", "[]", "\udcff"]
)
def test_json_that_breaks_parsers(content, tmp_path):
    path = write(tmp_path)
    (path / "manifest.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(checkpoint_files.CheckpointError, match=r"its manifest\.json can't be read"):
        checkpoint_files.verify(path)


@pytest.mark.parametrize("victim", ["manifest.json", "tensors.npz"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: None])
def test_what_is_no_file_is_not_read(make, victim, tmp_path):
    path = write(tmp_path)
    (path / victim).unlink()
    make(path / victim)
    with pytest.raises(checkpoint_files.CheckpointError, match=f"{victim} can't be read"):
        checkpoint_files.verify(path)


def test_every_type_of_numbers_comes_back(tmp_path):
    names = [np.dtype(code).name for code in "?bhilBHILefdFD"]
    names += [name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint"))]
    tensors = {f"{name}/{n}": np.ones([2] * n).astype(name) for name in names for n in (0, 1, 2)}
    path = checkpoint_files.write(tmp_path, 1, tensors | {"empty": np.zeros((0, 3))}, {})
    found = checkpoint_files.read(path, checkpoint_files.verify(path))
    assert all((found[n].dtype, found[n].tobytes()) == (t.dtype, t.tobytes()) for n, t in tensors.items())
    assert found["empty"].shape == (0, 3)


def test_the_same_step_again_keeps_a_good_one_and_replaces_a_damaged_one(tmp_path):
    path = write(tmp_path)
    before = (path / "manifest.json").stat().st_ino
    assert write(tmp_path) == path
    assert (path / "manifest.json").stat().st_ino == before
    (path / "tensors.npz").write_bytes(b"garbage")
    assert checkpoint_files.verify(write(tmp_path))
    (tmp_path / "step-00000006").write_text("in the way")
    assert checkpoint_files.verify(write(tmp_path, 6))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_the_same_step_with_more_to_tell_takes_the_old_ones_place_or_leaves_it(tmp_path, monkeypatch):
    checkpoint_files.write(tmp_path, 5, TENSORS, {"told": 1})
    fault = checkpoint_files.fault_injection.Fault("write-aside", "*", 0, "raise")
    monkeypatch.setattr(checkpoint_files.fault_injection, "_faults", [fault])
    with pytest.raises(checkpoint_files.fault_injection.PlannedError):
        checkpoint_files.write(tmp_path, 5, TENSORS, {"told": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert checkpoint_files.verify(tmp_path / "step-00000005")["told"] == 1
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old.tmp")  # as a kill would leave it
    checkpoint_files.mend(tmp_path)
    assert checkpoint_files.verify(tmp_path / "step-00000005")["told"] == 1
    checkpoint_files.write(tmp_path, 5, TENSORS, {"told": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert checkpoint_files.verify(tmp_path / "step-00000005")["told"] == 2


def test_needs_no_tensorflow():
    code = "import sys; import loop.checkpoint.checkpoint_files; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


POINTS = re.findall(r'fault_injection.reached\("(write-[a-z]+)"', inspect.getsource(checkpoint_files))


@pytest.mark.parametrize(("point", "before"), [*((p, b) for p in POINTS for b in ("1", "1 2")), ("write-manifest", "")])
def test_a_kill_at_any_stage_loses_nothing(point, before, tmp_path):
    """`before`: the existing checkpoints; the one of step 2 is damaged."""
    for step in before.split():
        written = writer.write(tmp_path, int(step))
        if step == "2":
            (written / "tensors.npz").write_bytes(b"garbage")
    if point == "write-aside" and before == "1":
        return  # no checkpoint is replaced
    environment = os.environ | {fault_injection.VARIABLE: f"{point}:0:2:kill"}
    command = [sys.executable, "-P", "-m", "tests.campaigns.writer", tmp_path, "2"]
    assert subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    renamed = point in ("write-rename", "write-done")
    assert writer.find(tmp_path) == (2 if renamed else 1 if before else None)
    writer.write(tmp_path, 3)
    assert writer.find(tmp_path) == 3
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "replace"])
def test_a_disk_that_fails_at_any_call_keeps_the_old_ones(call, tmp_path, monkeypatch):
    real = getattr(os, call)
    for place in itertools.count(1):
        directory, calls = tmp_path / str(place), 0
        writer.write(directory, 1)
        (writer.write(directory, 3) / "tensors.npz").write_bytes(b"garbage")

        def failing(*arguments, place=place, **more):
            nonlocal calls
            calls += 1
            if calls == place:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                writer.write(directory, 3)
                break
            except OSError as raised:
                error = raised
        assert error.errno == errno.ENOSPC
        assert not (directory / "step-00000003.tmp").exists()
        assert writer.find(directory) in (1, 3)
    assert calls == place - 1 > 0
    assert writer.find(directory) == 3


@needs_mounts
def test_a_full_disk_keeps_the_old_ones(tmp_path):
    command = ["unshare", "-m", sys.executable, "-P", "-m", "tests.campaigns.full", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 10
