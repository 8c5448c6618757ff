"""FromKeras: a callback of Keras, called as Keras's `fit` calls it."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar, Literal

from callbacks.arguments import stored_number
from callbacks.base import Callback, Metrics, Run, as_floats
from callbacks.files import hidden_name, replacing
from callbacks.learning_rate import optimizers_of, own_rate, rate_of
from callbacks.types import Data, Foreign, Json, JsonObject

_REPLACEMENTS = {
    "BackupAndRestore": "runs save and go on by themselves (callbacks.Checkpoint, resume='auto'): leave it out",
    "EarlyStopping": "use callbacks.EarlyStopping(metric, patience=..., restore_best=...)",
    "ModelCheckpoint": "use callbacks.Checkpoint(every=..., best=...); tfloop export makes a Keras file of a run",
    "OrbaxCheckpoint": "use callbacks.Checkpoint(every=..., best=...)",
    "ProgbarLogger": "runs show their progress by themselves (callbacks.Progress): leave it out",
    "SwapEMAWeights": "use fit(..., ema=0.999)",
    "TensorBoard": "use callbacks.TensorBoard(histograms=...)",
}
"""Callbacks of Keras that can't work here, or have a better one, and what to use instead."""
_PACKAGES = ("keras.", "tf_keras.")
_WITHIN_EVALUATION = ("on_test_batch_begin", "on_test_batch_end")
_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class FromKeras(Callback):
    """Calls a callback of Keras or tf_keras that watches a training: `FromKeras(keras.callbacks.CSVLogger("log.csv"))`.

    It is called on the chief, with the names that Keras has: `val_loss` for `eval_loss`; of several evaluation sets,
    `test_loss` for `eval_test_loss`. Its `model` shows the model of the run and its optimizer. A learning rate that it
    sets is set on all ranks; `model.stop_training = True` ends the run. `on_test_begin` and `on_test_end` follow an
    evaluation; hooks within evaluations can't be called, and a callback that overrides them is refused.

    A callback that overrides the hooks of batches is called after each step, which costs a call of the host for each:
    its logs are those of the step alone.

    A resumed run calls `on_train_begin` again, and then gives the callback those of its attributes that had changed
    since then, if they are numbers, texts, flags, or lists and dicts of these, and aren't arguments of its constructor.
    `on_epoch_begin` is called once for each epoch. A `CSVLogger` appends, and has each epoch once.

    Args:
        callback: the callback of Keras.

    Raises:
        ValueError: it isn't a callback of Keras, or can't work here; with what to use instead.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, callback: Foreign) -> None:
        _check(callback)
        self.callback = callback
        self._name = type(callback).__name__
        self._kinds = _kinds(callback)
        self._appends: bool = getattr(callback, "append", False)
        self._batches = any(_overrides(callback, hook) for hook in _BATCHES)
        self.every = 1 if self._batches else "epoch"
        self._view: _ModelView | None = None
        self._sets: list[str] = []
        self._steps_per_epoch: int | None = None
        self._begun = -1  # the index of the last epoch for which `on_epoch_begin` was called
        self._at_begin: dict[str, Json] = {}
        self._restored: JsonObject = {}

    def on_setup(self, run: Run) -> None:
        # The object may serve several runs, and several attempts of an elastic job.
        self._view = None
        self._begun = -1
        self._restored = {}

    def on_data(self, run: Run, data: Data) -> Data:
        self._sets = list(data.evaluated)
        self._steps_per_epoch = data.train.steps_per_epoch
        return data

    def on_restore(self, run: Run, path: Path | None) -> None:
        if "CSVLogger" in self._kinds:
            # In a resumed run it must append: otherwise it would empty the file of the earlier attempt.
            self.callback.append = self._appends or path is not None
            self.callback.append_header = True  # Keras looks whether the file has one, where it appends
            self.callback.keys = None
            goes_on = path is not None and path.is_relative_to(run.directory)  # in another directory, the rows stay
            if goes_on and run.backend.is_chief:
                _cut(Path(self.callback.filename), str(self.callback.sep), run.progress.epoch)

    def on_fit_start(self, run: Run) -> None:
        self._view = _ModelView(run)
        if run.backend.is_chief:
            epochs = run.options["epochs"]
            if run.options["steps"] and self._steps_per_epoch:  # `epochs` isn't given then
                epochs = math.ceil(run.options["steps"] / self._steps_per_epoch)
            params = {"verbose": 0, "epochs": epochs, "steps": self._steps_per_epoch}
            self.callback.set_params(params)
            self.callback.set_model(self._view)
        self._call(run, "on_train_begin")
        # `state_dict` saves what differs from this. The state is restored now: `on_train_begin` resets a callback.
        self._at_begin = _plain_attributes(self.callback)
        for attribute, value in self._restored.items():
            setattr(self.callback, attribute, value)

    def on_epoch_start(self, run: Run) -> None:
        if self._begun < run.progress.epoch:  # not again where a resumed run continues within the epoch
            self._begun = run.progress.epoch
            self._call(run, "on_epoch_begin", run.progress.epoch)
        self._begin_batch(run)

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if self._batches:
            self._call(run, "on_train_batch_end", run.progress.step_in_epoch - 1, logs=self._logs(metrics))
            self._begin_batch(run)

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._call(run, "on_test_begin")
        logs = {}
        for name, value in self._logs(metrics).items():
            logs[name.removeprefix("val_")] = value  # as Keras has them within an evaluation
        self._call(run, "on_test_end", logs=logs)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self._call(run, "on_epoch_end", run.progress.epoch, logs=self._logs(metrics))

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._view is not None and run.backend.is_chief:  # without others, which may be gone
            self.callback.on_train_end({})

    def _begin_batch(self, run: Run) -> None:
        # After the last step of an epoch none begins: `on_epoch_start` of the next one does it.
        if self._batches and run.progress.step_in_epoch != self._steps_per_epoch:
            self._call(run, "on_train_batch_begin", run.progress.step_in_epoch)

    def _logs(self, metrics: Metrics) -> dict[str, float]:
        """Metrics by the names of Keras."""
        # Each of several evaluation sets has a name, which the metric's name begins with.
        prefix = "val_" if "" in self._sets else ""
        logs = {}
        for name, value in as_floats(metrics).items():
            logs[re.sub("^eval_", prefix, name)] = value
        return logs

    def _call(self, run: Run, hook: str, *arguments: Foreign, logs: Metrics = MappingProxyType({})) -> None:
        """Calls a hook on the chief; all ranks take the learning rates, and the chief a wish to stop."""
        if not self._is_called(hook):
            return
        assert self._view is not None
        try:
            if run.backend.is_chief:
                getattr(self.callback, hook)(*arguments, dict(logs))  # a new dict: a callback may change it
        finally:
            # Also after an error: the other ranks wait in this collective.
            _share_rates(run)
        if self._view.stop_training:  # on the chief alone, whose wish all ranks hear of
            self._view.stop_training = False
            run.stop(f"{self._name} has set model.stop_training")

    def _is_called(self, hook: str) -> bool:
        """Whether the callback overrides a hook; the same on all ranks."""
        return _overrides(self.callback, hook) or _overrides(self.callback, hook.replace("train_batch", "batch"))

    def state_dict(self) -> JsonObject:
        changed = {}  # the others are the same after `on_train_begin`
        for name, value in _plain_attributes(self.callback).items():
            if name not in self._at_begin or self._at_begin[name] != value:
                changed[name] = value
        return {"begun": self._begun, "attributes": changed}

    def load_state_dict(self, state: JsonObject) -> None:
        self._begun = stored_number(state, "begun", whole=True)
        self._restored = {}
        settings = _settings(self.callback)
        for name, value in state["attributes"].items():
            # A checkpoint of any origin must replace no setting, such as where a callback writes, and no method.
            is_method = name.startswith("__") or callable(getattr(type(self.callback), name, None))
            if name not in settings and not is_method:
                self._restored[name] = value


def _cut(path: Path, separator: str, epoch: int) -> None:
    """Removes the rows of epochs after the checkpoint of a killed run: the resumed run makes these epochs again."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    rows = list(lines)
    while len(rows) > 1:  # the first one is the header
        index = rows[-1].decode(errors="replace").partition(separator)[0]
        is_whole = rows[-1].endswith(b"\n")  # else the kill has torn it
        if is_whole and not (index.isdecimal() and int(index) >= epoch):
            break
        rows.pop()
    if rows != lines:
        with replacing(path, aside=hidden_name(path)) as file:
            file.writelines(rows)


class _ModelView:
    """The model of a run as a callback of Keras sees it: with the optimizer, and with `stop_training`.

    What a callback sets on it isn't set on the model, whose attributes belong to what is saved and exported.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.stop_training = False

    @property
    def optimizer(self) -> Foreign:
        """The optimizer; several are in its attribute `optimizers`, as those of Keras that hold others."""
        optimizers = optimizers_of(self._run)
        return optimizers[""] if "" in optimizers else SimpleNamespace(optimizers=list(optimizers.values()))

    def __getattr__(self, name: str) -> Foreign:
        return getattr(vars(self)["_run"].model, name)


def _share_rates(run: Run) -> None:
    """Gives the optimizers of all ranks the learning rates of the chief's. All ranks must call it."""
    if run.backend.workers == 1:
        return
    # A schedule is a function of the step, and so the same on all ranks; it can't be set either.
    optimizers = []
    for optimizer in optimizers_of(run).values():
        if not callable(own_rate(optimizer)):
            optimizers.append(optimizer)
    own_rates = list(map(rate_of, optimizers))
    rates = run.backend.broadcast_json(own_rates)
    for optimizer, own, rate in zip(optimizers, own_rates, rates, strict=True):
        if rate != own:
            optimizer.learning_rate = rate


def _kinds(callback: Foreign) -> list[str]:
    """The names of the classes of Keras that a callback is of, its own first."""
    return [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith(_PACKAGES)]


def _check(callback: Foreign) -> None:
    """Refuses what isn't a callback of Keras, or can't work here."""
    kinds = _kinds(callback)
    name = type(callback).__name__
    if isinstance(callback, Callback):
        raise ValueError(f"FromKeras({name}): it is a callback of tfloop: give it to fit as it is")
    if "Callback" not in kinds:
        given = callback.__name__ if isinstance(callback, type) else repr(callback)
        raise ValueError(f"FromKeras({given:.99}): give an object of a subclass of keras.callbacks.Callback")
    for kind in kinds:
        if kind in _REPLACEMENTS:
            raise ValueError(f"FromKeras({name}): {_REPLACEMENTS[kind]}")
    for hook in _WITHIN_EVALUATION:
        if _overrides(callback, hook):
            raise ValueError(
                f"FromKeras({name}): it overrides {hook}, but an evaluation is made in compiled calls of many "
                "batches: use on_test_end, or on_eval_end of a callback of tfloop"
            )


def _overrides(callback: Foreign, hook: str) -> bool:
    """Whether a callback has a hook of its own: of its class, or a function that was set on the object."""
    if hook in vars(callback):
        return True
    for kind in type(callback).__mro__:
        if hook in vars(kind):
            # The base class of Keras has all hooks, and they do nothing.
            is_base = kind.__name__ == "Callback" and kind.__module__.startswith(_PACKAGES)
            return not is_base
    return False


def _plain_attributes(callback: Foreign) -> dict[str, Json]:
    """The attributes of a callback that JSON can hold and that aren't settings, as copies."""
    # Not settings: a callback may change one at its first use, as ReduceLROnPlateau does `min_delta`, and would change
    # a restored one again.
    skipped = _settings(callback)
    attributes = {}
    for name, value in vars(callback).items():
        if name not in skipped and _is_plain(value):
            attributes[name] = json.loads(json.dumps(value))  # also of NumPy's floats
    return attributes


def _settings(callback: Foreign) -> set[str]:
    """The names of the constructor's arguments, and of what Keras sets on every callback."""
    names = {"params", "_model", "model", "validation_data"}
    for kind in type(callback).__mro__[:-1]:  # without `object`
        names |= inspect.signature(vars(kind).get("__init__", object.__init__)).parameters.keys()
    return names


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    # Another kind of mapping, and keys that aren't texts, would come back from JSON as something else.
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)
