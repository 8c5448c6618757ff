"""A task that returns the same model or optimizer again: in another fit, or on another backend."""

import keras
import pytest

from loop import UsageError, fit
from loop.backends import create
from tests.tasks import Legacy, Unweighted


class Keeps(Unweighted):
    """Returns the same model, or the same optimizer, in each call."""

    defaults = {"epochs": 1, "eval_every": "never"}
    keeps_model = keeps_optimizer = False
    momentum = 0.9

    def build_model(self):
        if not self.keeps_model or not hasattr(self, "model"):
            self.model = super().build_model()
        return self.model

    def build_optimizer(self):
        if not self.keeps_optimizer or not hasattr(self, "optimizer"):
            self.optimizer = keras.optimizers.SGD(0.05, momentum=self.momentum)
        return self.optimizer


class KeepsOptimizer(Keeps):
    keeps_optimizer = True


class KeepsLegacy(Legacy):
    defaults = Keeps.defaults

    def build_optimizer(self):
        if not hasattr(self, "optimizer"):
            self.optimizer = super().build_optimizer()
        return self.optimizer


@pytest.mark.parametrize("then", ["single", "mirrored"])
@pytest.mark.parametrize("kind", [KeepsOptimizer, KeepsLegacy])
def test_an_optimizer_of_another_model_is_refused(kind, then, quiet):
    task = kind()
    fit(task, callbacks=quiet())
    with pytest.raises(UsageError, match=rf"{type(task).__name__} returned .* another model: make a new one"):
        fit(task, backend=create(then, 2 if then == "mirrored" else None), callbacks=quiet())


@pytest.mark.parametrize("before", ["single", "mirrored"])
@pytest.mark.parametrize("then", ["mirrored", "central"])
@pytest.mark.parametrize("change", [{}, {"momentum": 0.0}, {"keeps_optimizer": True}], ids=str)
def test_a_model_of_another_backend_is_refused(before, then, change, quiet):
    if (before, then) == ("single", "central") and change:
        pytest.skip("central trains variables of one device if it needs no new ones beside them")
    task = type("KeepsModel", (Keeps,), {"keeps_model": True, **change})()
    fit(task, backend=create(before, 2 if before == "mirrored" else None), callbacks=quiet())
    with pytest.raises(UsageError, match=r"KeepsModel returned a model that was made .*make a new model in each call"):
        fit(task, backend=create(then, 2), callbacks=quiet())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_model_of_replicas_is_refused_on_one_device_with_a_new_optimizer(momentum, quiet):
    task = type("KeepsModel", (Keeps,), {"keeps_model": True, "momentum": momentum})()
    fit(task, backend=create("mirrored", 2), callbacks=quiet())
    with pytest.raises(UsageError, match=r"KeepsModel returned a model that was made .* 'single' can't train"):
        fit(task, callbacks=quiet())
    task.keeps_optimizer = True
    del task.model, task.optimizer
    fit(task, backend=create("mirrored", 2), callbacks=quiet())
    fit(task, callbacks=quiet())  # with its own optimizer, it can be trained


@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_a_model_of_one_device_is_refused_on_one_replica(keeps_optimizer, quiet):
    changed = {"keeps_model": True, "keeps_optimizer": keeps_optimizer, "momentum": 0.0}
    task = type("KeepsModel", (Keeps,), changed)()
    fit(task, callbacks=quiet())
    with pytest.raises(UsageError, match=r"KeepsModel returned a model that was made .* 'mirrored' can't train"):
        fit(task, backend=create("mirrored", 1), callbacks=quiet())


@pytest.mark.parametrize(
    ("kind", "backend", "replicas", "momentum"),
    [
        (KeepsOptimizer, "mirrored", 1, 0.9),
        (KeepsOptimizer, "mirrored", 2, 0.9),
        (KeepsOptimizer, "mirrored", 2, 0.0),
        (KeepsOptimizer, "central", 2, 0.9),
        (KeepsLegacy, "mirrored", 2, 0.9),
    ],
)
def test_an_optimizer_that_was_made_before_its_model_is_named(kind, backend, replicas, momentum, quiet):
    task = kind()
    task.momentum = momentum
    task.build_optimizer()
    with pytest.raises(UsageError, match=r"returned an optimizer that was made outside of it, .* make a new one"):
        fit(task, backend=create(backend, replicas), callbacks=quiet())


def test_model_and_optimizer_may_be_kept_on_one_device(quiet):
    task = type("KeepsBoth", (Keeps,), {"keeps_model": True, "keeps_optimizer": True})()
    for _ in range(2):
        fit(task, batch_size=20, callbacks=quiet())
    assert int(task.optimizer.iterations) == 12
