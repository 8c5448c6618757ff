"""The command line: what is typed wrong is one line and exit code 2; what is typed right does what it says."""

import json
import subprocess
import sys

import numpy as np
import pytest

import cli
from tests.conftest import ROOT, tfloop

TASK = """
from dataclasses import dataclass
from loop import ArrayData, TrainTask
from tests.tasks import Plain, Weighted

@dataclass
class Mine(Weighted):
    name: str = "x"
    deep: bool = False
    ratio: float | None = None
    shape: tuple = (1, 2)

class Scalar(Plain):
    def compute(self, model, batch, training):
        import tensorflow as tf
        return {"loss": tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)}

class Other:
    pass
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, where TensorFlow is warm; gives exit code, stdout and stderr."""
    (tmp_path / "mine.py").write_text(TASK)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tfloop", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capfd.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "digits", "--batch-size", "0"], ["train"]]
)
def test_help_and_wrong_arguments_load_no_tensorflow(arguments):
    code = (
        f"import sys; sys.argv = ['tfloop', *{arguments!r}]; import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print(sorted({'tensorflow', 'keras', 'mlflow', 'horovod', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


BEFORE_TENSORFLOW = [
    (["train", "digits", "--checkpoint-every", "0"], "--checkpoint-every 0: every=0 is no schedule: give"),
    (["train", "digits", "--start-timeout", "-1"], "--start-timeout -1.0: give a number of seconds > 0"),
    (["train", "digits", "--stall-timeout", "0"], "stall_timeout=0.0: give a number of seconds > 0"),
    (["train", "digits", "--profile", "5:2"], "profile='5:2': give the first and the last step to trace, such as"),
    (["train", "digits", "--profile", "x"], "profile='x': give the first and the last step"),
    (["train", "digits", "--profile", "0:3"], "profile='0:3': give .*; steps count from 1"),
    (["chaos", "digits", "--checkpoint-every", "never"], "--checkpoint-every never: every='never' is no schedule"),
    (["train", "digist"], "TARGET 'digist': give file.py:Class, .* did you mean 'digits'"),
    (["train", "nowhere.py:Task"], "there is no file nowhere.py"),
    (["train", "digits", "--backend", "horovd"], "backend='horovd': give one of auto"),
    (["train", "digits", "--batch-size", "0"], "batch_size=0: the global batch must hold at least 1"),
    (["train", "digits", "--epochs", "1", "--steps", "1"], "epochs=1 and steps=1: give one of the two"),
    (["train", "digits", "--workers", "0"], "--workers 0: give a whole number >= 1"),
    (["train", "digits", "--workers", "2", "--backend", "single"], "workers=2 with backend='single'"),
    (["train", "digits", "--eval-every", "often"], "eval_every='often': give"),
    (["train", "digits", "--checkpoint-every", "often"], "--checkpoint-every often: .* is no schedule"),
    (["train", "digits", "--precision", "fp8"], "precision='fp8': give float32"),
    (["ui"], "mlflow.db isn't there: train something first"),
    (["export", "nowhere", "out.npz"], "nowhere: no checkpoint there"),
    (["evaluate", "nowhere"], "nowhere: no checkpoint there"),
]


@pytest.mark.parametrize(("arguments", "message"), BEFORE_TENSORFLOW)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, command):
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("tfloop: error: ")
    import re

    assert re.search(message, line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py:Mien"], "mine.py has no class 'Mien'; did you mean 'Mine'"),
        (["mine.py:Other"], "Other is no subclass of loop.TrainTask"),
        (["no.such.module:Task"], "there is no module 'no'"),
        (["mine.py:Scalar"], 'compute\\(\\) returned a scalar for "loss": return one value per example'),
        (["mine.py:Mine", "--set", "hiden=3"], "Mine has no field 'hiden'; did you mean 'hidden'"),
        (["mine.py:Mine", "--set", "hidden=many"], "--set hidden=many: 'many' is no int"),
        (["mine.py:Mine", "--set", "deep=perhaps"], "'perhaps' is no bool"),
        (["mine.py:Mine", "--set", "ratio=x"], "'x' is no float or None"),
        (["mine.py:Mine", "--set", "hidden"], "--set hidden: give key=value"),
        (["mine.py:Mine", "--set", "shape=3"], "can't be typed on a command line"),
        (["mine.py:Mine", "--run-dir", "/proc/x"], "the run directory /proc/x can't be written"),
        (["mine.py:Mine", "--resume", "nowhere"], "nowhere: no checkpoint there"),
    ],
)
def test_bad_tasks_are_one_line_too(arguments, message, command):
    import re

    code, out, err = command("train", *arguments, "--track", "off")
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("tfloop: error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["callbacks.py", "loop.py", "cli.py", "loop/__init__.py"])
def test_files_that_would_shadow_ours_are_named(name, command, tmp_path):
    shadow = tmp_path / name
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("")
    code, _, err = command("train", "mine.py:Mine")
    assert code == 2
    assert f"{shadow} has the name of tfloop's own" in err


def test_a_script_beside_a_shadowing_file_is_told(tmp_path):
    (tmp_path / "callbacks.py").write_text("")
    (tmp_path / "script.py").write_text("import loop\nloop.fit\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{tmp_path / 'callbacks.py'} hides tfloop's own package 'callbacks'" in done.stderr.splitlines()[-1]


def test_train_evaluate_export(command, tmp_path):
    """One run, and all that can be made of it."""
    code, out, err = command(
        "train", "mine.py:Mine", "--set", "hidden=8", "--set", "deep=true", "--set", "ratio=none", "--epochs", 2,
        "--batch-size", 20, "--seed", 5, "--run-dir", "run", "--track", "off", "--json", "--checkpoint-every", 5,
    )  # fmt: skip
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1
    assert {"status", "steps", "epochs", "examples", "metrics", "history", "run_dir", "weights_sha256"} < set(result)
    assert {"backend", "replicas", "examples_per_second"} < set(result)
    assert "model" not in result
    assert (result["status"], result["steps"], result["backend"], result["replicas"]) == ("finished", 12, "single", 1)
    assert "epoch 2/2  step 12" in err

    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["status"], about["hyperparameters"]["hidden"]) == ("finished", 8)
    assert about["hyperparameters"]["deep"] is True

    code, out, _ = command("evaluate", "run", "--json")
    assert code == 0
    evaluated = json.loads(out.splitlines()[-1])
    assert evaluated["eval_loss"] == pytest.approx(result["metrics"]["eval_loss"], rel=1e-6)

    assert command("export", "run", "weights.npz")[0] == 0
    with np.load("weights.npz") as weights:
        assert [name[:6] for name in weights] == ["00000:", "00001:", "00002:", "00003:"]
        assert weights[next(iter(weights))].shape == (5, 8)
        first = weights[next(iter(weights))]
    assert command("export", "run", "model.keras")[0] == 0
    import keras

    model = keras.models.load_model("model.keras")
    np.testing.assert_array_equal(model.get_weights()[0], first)
    assert command("export", "run", "saved")[0] == 0
    import tensorflow as tf

    inputs = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    loaded = tf.saved_model.load("saved")
    np.testing.assert_allclose(loaded.serve(inputs), model(inputs), atol=1e-6)
    code, _, err = command("export", "run", "weights.npz")
    assert code == 2
    assert "weights.npz exists already" in err


def test_resume_by_the_same_command(command):
    arguments = ["train", "mine.py:Mine", "--batch-size", 20, "--run-dir", "run", "--track", "off", "--json"]
    shorter = json.loads(command(*arguments, "--epochs", 1)[1])
    longer = json.loads(command(*arguments, "--epochs", 2)[1])
    again = json.loads(command(*arguments, "--epochs", 2)[1])
    assert (shorter["steps"], longer["steps"]) == (6, 12)
    assert again["weights_sha256"] == longer["weights_sha256"]
    code, _, err = command(*arguments, "--epochs", 3, "--set", "rate=0.5")
    assert code == 2
    assert "the field rate was 0.05, now 0.5" in err


def test_mirrored_by_workers(command):
    arguments = ["train", "mine.py:Mine", "--batch-size", 20, "--track", "off", "--json"]
    code, out, _ = command(*arguments, "--backend", "mirrored", "--workers", 3)
    result = json.loads(out)
    assert (code, result["backend"], result["replicas"]) == (0, "mirrored", 3)


def test_a_mistake_in_the_users_code_keeps_its_traceback(command, tmp_path):
    (tmp_path / "mine.py").write_text(TASK + "    \nraise RuntimeError('planted')\n")
    code, _, err = command("train", "mine.py:Mine", "--track", "off")
    assert code == 1
    assert "RuntimeError: planted" in err
    assert "mine.py" in err


def test_doctor(command):
    code, out, _ = command("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0
    assert set(findings) == {
        "Python", "TensorFlow", "Devices", "Horovod", "Compilers", "TF_CONFIG", "MLflow", "Run directory", "Free ports",
    }  # fmt: skip
    if findings["Horovod"]["state"] == "ok":
        assert "built with: gloo yes" in findings["Horovod"]["found"]
    else:
        assert "install" in findings["Horovod"]["found"]


def test_doctor_names_a_broken_tf_config(command, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    code, out, _ = command("doctor")
    assert code == 1
    assert "broken  TF_CONFIG" in out


def test_shipped_examples_are_listed_by_their_file_and_class():
    from loop import target

    for name, kind in target.SHIPPED.items():
        assert f"class {kind}(TrainTask)" in target.shipped_path(name).read_text()


def test_command_is_installed():
    done = tfloop("--help")
    assert done.returncode == 0
    for word in ("train", "evaluate", "export", "doctor", "ui"):
        assert word in done.stdout
