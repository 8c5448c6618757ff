"""Engines beyond the first four: `central`, `tpu`, plug-ins, chosen devices; and what is inexact."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loop import UsageError, backends, fit, options
from loop.backends.base import Backend
from loop.commands import doctor
from loop.data import open_data
from loop.launch import machine, plugins
from loop.launch.backend_choice import choose_backend
from loop.options import with_defaults
from loop.step import approximations
from tests import conformance
from tests.conftest import ROOT, needs_horovod, tfloop
from tests.exactness import CASES, SETTINGS, by_hand, largest_difference, trained, weights_of
from tests.tasks import Conv, Legacy, Plain, Streamed
from tests.test_cli import command  # noqa: F401


def off_by_hand(backend, case, dtype):
    fields, options = CASES[case]
    fields = {**fields, "dtype": dtype}
    found = trained(backend, fields, options)
    weights, _ = by_hand(fields, options, **SETTINGS)
    return largest_difference([variable.numpy() for variable in weights_of(found.model)], weights)


# central


@pytest.mark.parametrize("check", conformance.CHECKS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_central_conforms(replicas, check):
    conformance.CHECKS[check](backends.create("central", replicas))


@pytest.mark.parametrize("case", CASES)
def test_central_is_the_same_as_by_hand(case):
    assert off_by_hand(backends.create("central", 3), case, "float64") <= 1e-12


class Pictures(Conv):
    """With an optimizer that makes no steps of rounding, which is all the gradient of a bias before BatchNorm."""

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1, momentum=0.9)


class LegacyPictures(Conv):
    """The same in tf_keras."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dropout(0.3)]
            + [layers.Dense(10)]
        )

    def build_optimizer(self):
        return tf_keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize("task", [Pictures, LegacyPictures, Legacy, Plain])
def test_central_trains_each_family_to_the_same_weights(task, quiet):
    """Batch 32 of 200 or 101 examples on 3 replicas: no share is even, the last batch least."""
    found = [
        fit(task(), epochs=2, backend=backend, callbacks=quiet(), clip_norm=1.0)
        for backend in ("single", backends.create("central", 3))
    ]
    for one, other in zip(*(weights_of_any(each.model) for each in found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def weights_of_any(model):
    return [
        variable.numpy() for variable in model.variables if "float" in getattr(variable.dtype, "name", variable.dtype)
    ]


def test_central_stores_variables_once_and_goes_on_from_checkpoints(tmp_path, quiet):
    def engine():
        return backends.create("central", 2)

    whole = fit(Conv(), epochs=2, backend=engine(), callbacks=quiet(), run_dir=tmp_path / "whole")
    for variable in whole.model.variables:
        assert len(engine().strategy.experimental_local_results(variable.value)) == 1
    for epochs in (1, 2):
        found = fit(Conv(), epochs=epochs, backend=engine(), callbacks=quiet(), run_dir=tmp_path / "parts")
    assert found.weights_sha256 == whole.weights_sha256


def test_central_has_no_statistics_of_each_replica(quiet):
    with pytest.raises(UsageError, match=r"sync_batch_norm=False with backend='central'.*use backend='mirrored'"):
        fit(Conv(), backend=backends.create("central", 2), sync_batch_norm=False, callbacks=quiet())


def test_central_compiles_nothing_with_xla(quiet):
    """XLA reads no variable of another device: each replica but the first would fail in the middle of a run."""
    with pytest.raises(UsageError, match=r"compile='xla' with backend='central'.*use backend='mirrored'"):
        fit(Conv(), backend=backends.create("central", 2), compile="xla", callbacks=quiet())


# Chosen devices


@pytest.mark.parametrize("engine", ["mirrored", "central"])
def test_chosen_devices_share_what_cannot_be_divided(engine):
    """Batches of 20, and one of 1, on 3 devices."""
    backend = backends.create(engine, devices=["cpu:2", "/device:CPU:0", "CPU:3"])
    assert [name[-5:] for name in backend.strategy.extended.worker_devices] == ["CPU:2", "CPU:0", "CPU:3"]
    assert off_by_hand(backend, "accumulate", "float64") <= 1e-12


def test_devices_that_are_not_there_are_named():
    with pytest.raises(UsageError, match=r"there is no gpu:1; there are cpu:0, cpu:1, cpu:2, cpu:3$"):
        backends.create("mirrored", devices=["cpu:0", "gpu:1"])


def test_devices_are_chosen_on_the_command_line(command):  # noqa: F811
    code, out, _ = command(
        "train", "mine.py:Mine", "--devices", "cpu:1,cpu:3", "--steps", 2, "--track", "off", "--json"
    )
    result = json.loads(out)
    assert (code, result["backend"], result["replicas"]) == (0, "mirrored", 2)


# Communication


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_way_of_communication_has_the_same_numbers(replicas):
    """Two replicas to the bit: there is one order in which two numbers can be added."""
    usual = weights_of(trained(backends.create("mirrored", replicas), {}, {}).model)
    expected = [variable.numpy() for variable in usual]
    for how in ("one-device", "hierarchical"):
        backend = backends.create("mirrored", replicas, communication=how)
        found = [variable.numpy() for variable in weights_of(trained(backend, {}, {}).model)]
        assert largest_difference(found, expected) <= (0 if replicas == 2 or how == "one-device" else 5e-6)
        assert off_by_hand(backend, "accumulate", "float64") <= 1e-12


def test_a_hierarchy_of_an_odd_number_is_refused():
    """TensorFlow's would leave the gradients of one replica out."""
    with pytest.raises(UsageError, match=r"'hierarchical' adds up two halves of the devices, .* are 3: use an even"):
        backends.create("mirrored", 3, communication="hierarchical")


@pytest.mark.parametrize(
    ("backend", "communication", "fix"),
    [
        ("mirrored", "nccl", "works between GPUs alone, and the devices are /cpu:0, /cpu:1: leave it out, or give"),
        (
            "mirrored",
            "ring",
            "with backend='mirrored': give auto, nccl, hierarchical, one-device, or use backend=",
        ),
        ("multiworker", "gloo", "with backend='multiworker': give auto, ring, nccl$"),
        ("horovod", "nccl", "with backend='horovod': leave it out, or use backend='multiworker' or 'mirrored'$"),
        ("central", "none", "with backend='central': leave it out$"),
    ],
)
def test_communication_that_a_backend_does_not_have_is_refused(backend, communication, fix):
    with pytest.raises(UsageError, match=f"communication={communication!r} {fix}"):
        backends.create(backend, 2, communication=communication)


def test_communication_is_chosen_on_the_command_line(command):  # noqa: F811
    short = ("train", "mine.py:Mine", "--steps", 2, "--track", "off", "--json", "--workers", 2)
    code, out, _ = command(*short, "--backend", "mirrored", "--communication", "hierarchical")
    assert (code, json.loads(out)["replicas"]) == (0, 2)
    code, out, err = command(*short, "--backend", "horovod", "--communication", "ring")
    assert (code, out) == (2, "")
    assert "communication='ring' with backend='horovod': leave it out" in err


def test_central_on_one_device_has_its_variables_there():
    backend = backends.create("central", devices=["cpu:1"])
    with backend.scope():
        assert tf.Variable(1.0).device.endswith("CPU:1")
    assert off_by_hand(backend, "accumulate", "float64") <= 1e-12


# tpu


@pytest.mark.parametrize(
    ("backend", "environment", "chosen"),
    [
        ("auto", {"TPU_NAME": "my-tpu"}, "tpu"),
        ("tpu", {"TPU_NAME": "local"}, "tpu"),
        ("tpu", {"TPU_NAME": "grpc://10.0.0.2:8470"}, "tpu"),
        ("single", {"TPU_NAME": "my-tpu"}, "single"),
        ("auto", {"TPU_NAME": "my-tpu", "HOROVOD_RANK": "0"}, "horovod"),
    ],
)
def test_a_named_tpu_is_chosen(backend, environment, chosen, monkeypatch):
    monkeypatch.setattr(machine, "horovod_missing", lambda: None)
    assert choose_backend(backend, None, environment)[0] == chosen


def test_a_tpu_that_does_not_answer_is_bad_input(monkeypatch):
    monkeypatch.setenv("TPU_NAME", f"grpc://127.0.0.1:{machine.free_ports(1)[0]}")
    with pytest.raises(UsageError, match=r"no TPU 'grpc://127.*refused.*give --tpu the name of one in your Google"):
        backends.create("tpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "tpu"], "backend='tpu': which one\\? give --tpu NAME .* or set TPU_NAME"),
        (["--tpu", "My_TPU"], "TPU_NAME='My_TPU' isn't a TPU's name: give --tpu NAME"),
        (["--tpu", "mine", "--workers", "2"], "workers=2 with backend='tpu': .* leave --workers out"),
        (["--tpu", "mine", "--backend", "single"], "--tpu mine with --backend single: leave one out, or use tpu"),
        (
            ["--devices-per-replica", "2", "--backend", "multiworker", "--workers", "2"],
            "--devices-per-replica 2 with --backend multiworker: leave one out, or use single or horovod",
        ),
        (["--devices", "cpu"], "devices: 'cpu' isn't a device: give names such as cpu:0"),
        (["--devices", "cpu:0,/CPU:0"], "devices: cpu:0 comes twice"),
        (["--devices", "cpu:0,cpu:1", "--workers", "3"], "--workers 3 with 2 devices: leave --workers out"),
        (
            ["--devices", "cpu:0", "--backend", "single"],
            "--devices cpu:0 with --backend single: .* mirrored or central",
        ),
        (["--local-steps", "0"], "local_steps=0: give a whole number >= 1"),
        (["--reduction", "mean"], "reduction='mean': give sum or adasum"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, message, command, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TPU_NAME", "x")  # to be taken back, whatever is set
    monkeypatch.delenv("TPU_NAME")
    code, out, err = command("train", "digits", *arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert re.match(f"tfloop: error: {message}", line)


# Plug-ins


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory into which the package in `tests/plugin` is installed."""
    source, site = tmp_path_factory.mktemp("plugin") / "source", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "tests" / "plugin", source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=240)
    [wheel] = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_plugins_are_listed_without_loading_them(site):
    code = "import sys; from loop.launch import plugins; print(*plugins.entry_points(), 'tensorflow' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout.split() == ["broken", "onedevice", "False"], done.stderr


def test_auto_takes_a_plugin_that_is_available_and_trains_with_it(site, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "ONEDEVICE": "cpu:0"}
    done = tfloop("train", "digits", "--steps", 5, "--track", "off", "--json", env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["backend"], result["replicas"], result["steps"]) == ("onedevice", 1, 5)
    warning, choice, *_ = done.stderr.splitlines()
    broken = "warning: the plug-in 'broken' (tfloop-onedevice 1.0, tfloop_onedevice.missing:Engine) is broken: "
    assert warning.startswith(broken + "ModuleNotFoundError: ")
    assert choice == "backend: onedevice (this plug-in is available)"


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(site)


def test_doctor_lists_plugins(installed, monkeypatch):
    def states():
        return {each["what"]: (each["state"], each["found"]) for each in map(doctor._plugin, plugins.entry_points())}

    state, found = states()["Backend onedevice"]
    assert (state, found.split(": ")[1][:13]) == ("missing", "set ONEDEVICE")
    monkeypatch.setenv("ONEDEVICE", "cpu:0")
    assert states()["Backend onedevice"] == ("ok", "tfloop-onedevice 1.0, tfloop_onedevice:OneDevice")
    state, found = states()["Backend broken"]
    assert state == "broken"
    assert "No module named 'tfloop_onedevice.missing'" in found


def test_a_plugin_conforms_and_is_exact(installed, monkeypatch):
    monkeypatch.setenv("ONEDEVICE", "cpu:1")
    for check in conformance.CHECKS.values():
        check(backends.create("onedevice"))
    assert off_by_hand("onedevice", "clip", "float64") <= 1e-12


def test_what_a_plugin_gathers_by_its_sum_has_all_bits():
    values = np.array([[-0.0, 0.0, np.inf], [-1.5, -0.0, -0.0]], "float32")
    tables = []
    for rank, own in enumerate(values):
        backend = Backend()
        backend.rank, backend.workers = rank, 2
        tables += backend.all_gather([tf.constant(own)])  # what each adds: the sum of one alone is its own
    assert (tables[0] + tables[1]).numpy().tobytes() == values.tobytes()


def test_a_plugin_that_is_asked_for_must_be_there_and_whole(installed, quiet):
    with pytest.raises(UsageError, match="backend='onedevice': set ONEDEVICE to the device"):
        fit(Plain(), backend="onedevice", callbacks=quiet())
    with pytest.raises(UsageError, match=r"the plug-in 'broken' .* is broken: ModuleNotFoundError.*mend it, or uninst"):
        fit(Plain(), backend="broken", callbacks=quiet())
    with pytest.raises(UsageError, match=r"backend='onedevices': give one of auto, .* or the name of a plug-in"):
        fit(Plain(), backend="onedevices", callbacks=quiet())


class Eager(Backend):
    name, priority = "eager", 20


class Shy(Backend):
    name, priority = "shy", None


class Nameless(Backend):
    """Has the name of its base."""


class Careless(Backend):
    name = "careless"

    @classmethod
    def available(cls, workers=1):
        raise OSError("planted")


def test_auto_asks_plugins_by_priority_after_the_job_and_before_our_own(monkeypatch, capsys):
    made = ["Shy", "Careless", "Nameless", "Eager"]
    entries = [importlib.metadata.EntryPoint(each.lower(), f"{__name__}:{each}", options.PLUGIN_GROUP) for each in made]
    entries += [importlib.metadata.EntryPoint("single", f"{__name__}:Shy", options.PLUGIN_GROUP)]
    entries += [importlib.metadata.EntryPoint("function", f"{__name__}:off_by_hand", options.PLUGIN_GROUP)]
    monkeypatch.setattr(options, "entry_points", lambda group: entries)
    monkeypatch.setattr(machine, "count_gpus", lambda: 4)
    assert choose_backend("auto", None, {})[0] == "eager"
    warnings = capsys.readouterr().err
    for each in ("'careless' .* OSError: planted", "'nameless' .* has the name 'single'", "'single' ", "a subclass"):
        assert len([line for line in warnings.splitlines() if re.search(each, line)]) == 1, each
    assert choose_backend("auto", 2, {})[0] in ("horovod", "multiworker")  # it has one worker
    assert choose_backend("auto", None, {"TPU_NAME": "x"})[0] == "tpu"
    assert choose_backend("shy", None, {}) == ("shy", "asked for")


# Inexact


def test_what_local_steps_cannot_go_with_is_refused(quiet):
    pair = Backend()
    pair.workers = 2  # as one of two workers
    with pytest.raises(UsageError, match="local_steps=4 with backend='mirrored': the replicas of one process"):
        fit(Plain(), backend=backends.create("mirrored", 2), local_steps=4, callbacks=quiet())
    for task, chosen, message in [
        (Streamed(), {}, "with a tf.data.Dataset"),
        (Plain(), {"compression": "fp16"}, "with compression='fp16': give one of the two"),
        (Plain(), {"on_nonfinite": "skip"}, "with on_nonfinite='skip': give one of the two"),
        (Plain(), {"reduction": "adasum"}, "with reduction='adasum': give one of the two"),
        (Plain(), {"precision": "mixed_float16"}, "use bfloat16"),
    ]:
        options = with_defaults(task, {"local_steps": 4, **chosen})
        with pytest.raises(UsageError, match=f"local_steps=4 {message}|local_steps=4 .* {message}"):
            approximations.check(pair, options, open_data(task, options).train)


def test_one_replica_has_nothing_to_average(capsys):
    plain, local = (trained("single", {}, options) for options in ({}, {"local_steps": 4}))
    assert plain.weights_sha256 == local.weights_sha256
    assert "inexact" not in capsys.readouterr().err


def test_a_plugin_may_override_the_former_names_of_two_methods():
    class Former(Backend):
        def outlives(self, error):
            return isinstance(error, KeyError)

    assert Former().is_recoverable(KeyError())
    assert not Former().is_recoverable(ValueError())


@needs_horovod
def test_threads_that_horovod_starts_wait_for_cores_unless_the_user_has_chosen():
    from loop.backends import horovod

    end = threading.Event()

    def started(policy=None):
        ready = threading.Event()

        def wait():
            if policy is not None:
                os.sched_setscheduler(0, policy, os.sched_param(0))
            ready.set()
            end.wait()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        ready.wait()
        return thread.native_id

    try:
        before = started()
        with horovod._waiting_for_cores():
            threads = [started(), started(os.SCHED_IDLE)]
        policies = [os.sched_getscheduler(thread) for thread in (before, *threads)]
        assert policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE]
    finally:
        end.set()
