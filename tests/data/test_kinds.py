"""The same examples from any kind of file end in the same bits, also after kill -9."""

import json
import os
import signal

import pytest

from tests.conftest import ROOT, tfloop
from tests.data import kinds


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kinds")
    kinds.write(directory)
    return directory


def _arguments(files, kind, run_dir, *more):
    return [
        "train", f"{ROOT / 'tests' / 'data' / 'kinds.py'}:Digits", "--set", f"kind={kind}", "--set", f"files={files}",
        "--run-dir", run_dir, "--steps", "80", "--track", "off", "--json", "--eval-every", "never", *more,
    ]  # fmt: skip


def _train(files, kind, run_dir, *more, fault=""):
    environment = {**os.environ, "TFLOOP_FAULT": fault, "TFLOOP_CACHE": str(files / "cache")}
    return tfloop(*_arguments(files, kind, run_dir, *more), env=environment)


@pytest.fixture(scope="module")
def expected(files, tmp_path_factory):
    done = _train(files, "arrays", tmp_path_factory.mktemp("expected") / "run", "--backend", "single")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["weights_sha256"]


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_any_kind_of_file_ends_in_the_bits_of_arrays_after_a_kill(
    kind, files, expected, tmp_path, command, monkeypatch
):
    killed = _train(
        files, kind, tmp_path / "run", "--backend", "single", "--checkpoint-every", "9", fault="call:0:50:kill"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved, "it was killed before its first checkpoint"
    monkeypatch.setenv("TFLOOP_CACHE", str(files / "cache"))
    code, output, error = command(
        *_arguments(files, kind, tmp_path / "run", "--backend", "single", "--checkpoint-every", "9")
    )
    assert code == 0, error
    assert json.loads(output)["weights_sha256"] == expected
