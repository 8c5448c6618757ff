"""What a callback changes too late for the compiled step had no effect, without a word."""

import warnings

import keras
import pytest

from callbacks import LambdaCallback
from loop import UsageError, fit
from tests.tasks import Unweighted


class Annealed(Unweighted):
    """Its loss has a factor, which a method of its own reads."""

    factor = 1.0
    unused = 1.0

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return values | {"loss": values["loss"] * self._factor()}

    def _factor(self):
        return self.factor


def _trained(quiet, **hooks):
    fit(Annealed(), steps=2, epochs=None, callbacks=quiet() + [LambdaCallback(every=1, **hooks)])


def test_a_number_of_the_task_that_a_callback_changes_is_named(quiet):
    def anneal(run, metrics):
        run.task.factor = 0.5

    with pytest.warns(UserWarning, match=r"^Annealed.factor was changed from 1.0 to 0.5, but .* keep 1.0"):
        _trained(quiet, steps_end=anneal)


def test_a_number_that_is_changed_in_time_or_that_no_step_reads_is_nothing_to_say(quiet):
    def in_time(run):
        run.task.factor = 0.5

    def count(run, metrics):
        run.task.unused += 1

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*was changed")
        _trained(quiet, epoch_start=in_time, steps_end=count)


class Regularized(Unweighted):
    """Its model and its optimizer are made with numbers."""

    def build_model(self):
        return keras.Sequential([*super().build_model().layers, keras.layers.Dropout(0.25, name="dropped")])

    def build_optimizer(self):
        return keras.optimizers.AdamW(weight_decay=0.125, name="adam")


def test_numbers_of_layers_and_optimizers_that_a_callback_changes_are_named(quiet):
    def change(run, logs):
        run.model.layers[-1].rate = 0.75
        run.optimizer.weight_decay = 0.5

    with pytest.warns(UserWarning, match="was changed") as caught:
        fit(Regularized(), epochs=2, callbacks=quiet() + [LambdaCallback(epoch_end=change)])
    texts = [str(warning.message) for warning in caught if "was changed" in str(warning.message)]
    assert [text.partition(", but")[0] for text in texts] == [
        "rate of dropped was changed from 0.25 to 0.75",
        "weight_decay of adam was changed from 0.125 to 0.5",
    ]


def _freeze(run):
    run.model.layers[0].trainable = False


def test_a_layer_that_a_callback_freezes_after_the_step_was_made_is_named(quiet):
    with pytest.warns(UserWarning, match=r"^whether .*kernel is trainable was changed, but .* begin_phase"):
        _trained(quiet, fit_start=_freeze)


def test_a_layer_that_a_callback_unfreezes_without_an_optimizer_is_refused(quiet):
    """It was an error of Keras's optimizer, with a traceback through tfloop."""

    class Frozen(Unweighted):
        def build_model(self):
            model = super().build_model()
            model.layers[0].trainable = False
            return model

    def unfreeze(run):
        run.model.layers[0].trainable = True

    with pytest.raises(UsageError, match=r"^a callback has made .*kernel trainable in on_setup"):
        fit(Frozen(), steps=1, epochs=None, callbacks=quiet() + [LambdaCallback(setup=unfreeze)])
