"""Epoch metrics: the totals of the epoch under way, the last evaluation, and the rows of the epochs before."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from callbacks.base import as_floats
from callbacks.run_record import history
from callbacks.run_record.journal import jsonable
from loop.checkpoint.array_files import Json
from loop.data import evaluation_sets
from loop.errors import TrainingError, UsageError
from loop.options import Options
from loop.run.progress import Progress
from loop.step.evaluation import Evaluation
from loop.step.loss_scale import SMALLEST
from loop.step.totals import EXAMPLES, SKIPPED, WEIGHT
from loop.step.train_step import TrainStep


class EpochMetrics:
    """The metrics of the epoch under way, and of those before.

    Attributes:
        totals: of the steps of this epoch.
        replaced: whether the next step takes the place of `totals`.
        ended: whether all its steps have been made.
        evaluating: whether an evaluation is under way.
        evaluated_at: the step of the last evaluation of each set; a single set has the name "".
        evaluated: the metrics of the evaluation under way, of its complete sets.
        eval_metrics: the metrics of the last evaluation; of several sets, those of the last evaluation of each.
        history: a row for each epoch.
        gauges: functions that callbacks have added, by name; their values are metrics, too.
    """

    def __init__(self) -> None:
        self.totals = np.zeros(())
        self.ended = False
        self.evaluating = False
        self.evaluated_at: dict[str, int] = {}
        self.evaluated: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.history: list[history.Row] = []
        self.gauges: dict[str, Callable[[], float]] = {}
        self.replaced = False

    def restore(self, stored: Json) -> None:
        """Takes all of it from the manifest of a checkpoint."""
        # nan and infinities are texts in JSON, which `float` reads.
        totals = np.array(list(map(float, stored["epoch_totals"])))
        # A single number stands for no totals; see `close`.
        self.totals = totals if totals.size > 1 else np.zeros(())
        self.replaced = stored.get("replaces_totals", False)
        self.ended = stored["epoch_ends"]
        self.evaluating = stored["evaluating"]
        self.evaluated_at = {"": stored["evaluated_at"], **stored.get("evaluated_sets", {})}
        self.eval_metrics = as_floats(stored["eval_metrics"])
        self.evaluated = as_floats(stored.get("evaluated", {}))
        self.history = list(map(history.as_numbers, stored["history"]))

    def drop_evaluations(self, sets: Sequence[str]) -> None:
        """Drops the restored metrics of all sets but those that this attempt evaluates.

        They would stand in the rows of later epochs, and be taken for the metrics of those.
        """
        if not sets:
            self.eval_metrics = {}
            self.evaluated = {}
        known = set(sets)
        for name, step in self.evaluated_at.items():
            if step >= 0:  # a checkpoint has -1 for a single set that there isn't
                known.add(name)
        # An evaluation that was cut off has metrics of its complete sets.
        for name in [*self.eval_metrics, *self.evaluated]:
            owners = [known_set for known_set in known if name.startswith(evaluation_sets.prefix(known_set))]
            # The longest name counts: `val_hard` rather than `val`, or "", the name of a single set, which always fits.
            if owners and max(owners, key=len) not in sets:
                self.eval_metrics.pop(name, None)
                self.evaluated.pop(name, None)
        if sets and "" not in sets:
            self.evaluated_at.pop("", None)

    def stored_evaluations(self) -> Json:
        """What the manifest of a checkpoint has of the evaluations; `restore` takes it."""
        stored: Json = {
            "eval_metrics": jsonable(self.eval_metrics),
            "evaluated_at": self.evaluated_at.get("", -1),
            "evaluating": self.evaluating,
        }
        # A single set has the name "", and the entry above, as in versions that knew one set alone.
        sets = dict(self.evaluated_at)
        sets.pop("", None)
        if sets:
            stored |= {"evaluated_sets": sets, "evaluated": jsonable(self.evaluated)}
        return stored

    def add(self, totals: np.ndarray, ended: bool) -> None:
        """Takes in the totals of a call, and whether the epoch has ended with it."""
        if self.replaced and totals[EXAMPLES]:  # a call at the end of the data makes no step
            self.clear_totals()
        self.totals = self.totals + totals  # not in place: callbacks hold `totals`, too
        self.ended = ended

    def clear_totals(self) -> None:
        """Starts the totals anew."""
        self.totals = np.zeros(())
        self.replaced = False

    def replace_totals(self) -> None:
        """Starts the totals anew with the next step of this epoch. If none follows, its row has the present totals."""
        self.replaced = True

    def start_phase(self) -> None:
        """Drops the metrics of the phase before: another phase may have other ones."""
        self.clear_totals()
        self.eval_metrics = {}
        self.ended = False

    def start_evaluation(self) -> None:
        """Notes that an evaluation is under way. A checkpoint that is taken within it records that."""
        self.evaluating = True

    def end_evaluation(self) -> None:
        """Notes that no evaluation is under way, and takes the metrics of the one that has ended."""
        self.evaluating = False
        if self.evaluated:
            # Each of several sets keeps its last metrics: they may be due at different steps. A single set has the
            # name "", and `any` looks at the names.
            kept = self.eval_metrics if any(self.evaluated_at) else {}
            self.eval_metrics = kept | self.evaluated
            self.evaluated = {}

    def add_evaluation(self, name: str, step: int, totals: np.ndarray, evaluation: Evaluation) -> None:
        """Takes in the totals of the whole evaluation of a set after so many steps."""
        if not totals[WEIGHT]:
            warnings.warn(
                "the weights of all evaluation examples sum to zero, so that their means are nan: look at the "
                '"weight" that compute() returns',
                stacklevel=2,
            )
        self.evaluated |= evaluation.means(totals)
        self.evaluated_at[name] = step

    def means(self, step: TrainStep, totals: np.ndarray) -> dict[str, float]:
        """The metrics of some steps: the means of their totals, and the values of the gauges now."""
        return step.means(totals) | {name: float(gauge()) for name, gauge in self.gauges.items()}

    def is_closed(self, progress: Progress) -> bool:
        """Whether the history has a row of all steps of the epoch so far, or none was made."""
        has_row = bool(self.history) and self.history[-1]["step"] == progress.step
        return has_row or not progress.step_in_epoch

    def close(self, step: TrainStep, progress: Progress, options: Options) -> dict[str, float]:
        """Adds the epoch's row to the history; returns its metrics and those of the last evaluation.

        Raises:
            UsageError: no example was used, because of an option or of the weights.
            TrainingError: the data had no examples, or all steps were skipped.
        """
        if not progress.step_in_epoch:
            raise _no_steps(progress.epoch + 1, options)
        # A scalar stands for no totals: those of the checkpoint were of other values, and no step has followed it.
        is_known = bool(self.totals.shape)
        means = self.means(step, self.totals) if is_known else dict.fromkeys(step.metric_names(), math.nan)
        metrics = {**means, **self.eval_metrics}
        # While the loss scale can still be halved, skipped steps are part of the search for it, and no failure.
        searching = metrics.get("loss_scale", 0.0) > SMALLEST
        if is_known and not step.has_weight(self.totals):
            skipped = int(self.totals[SKIPPED])
            # The run may end within an epoch, after a few steps. Only in the first one have they trained nothing at
            # all.
            if self.ended or not progress.epoch:
                _refuse_untrained(progress.epoch + 1, skipped, searching)
            elif not skipped:
                warnings.warn(
                    f"epoch {progress.epoch + 1}: the weights of its {int(self.totals[EXAMPLES])} examples so far sum "
                    'to zero, so that their means are nan: look at the "weight" that compute() returns',
                    stacklevel=2,
                )

        row = {"epoch": progress.epoch + 1, "step": progress.step, "examples": progress.examples, **metrics}
        # An epoch may have a row already: the run ended within it, and is now resumed with more steps.
        while self.history and self.history[-1]["epoch"] >= row["epoch"]:
            self.history.pop()
        self.history.append(row)
        return metrics


def _no_steps(epoch: int, options: Options) -> Exception:
    if options["drop_remainder"]:
        return UsageError(
            f"drop_remainder with batch_size={options['batch_size']} leaves nothing of the data: make the "
            "batch smaller, or keep the remainder"
        )
    return TrainingError(
        f"epoch {epoch} had no examples, the data has run dry: a stream must begin again each time that it is read, as "
        "tf.data.Dataset.from_generator does with a function that returns a new generator in each call"
    )


def _refuse_untrained(epoch: int, skipped: int, searching: bool) -> None:
    """Raises the reason why the steps of an epoch have trained nothing."""
    if not skipped:
        raise UsageError(
            f"epoch {epoch}: the weights of all examples sum to zero, so that nothing was "
            'trained: look at the "weight" that compute() returns'
        )
    if not searching:
        raise TrainingError(
            f"epoch {epoch}: all {skipped} steps were skipped, because "
            "the loss or its gradient was not finite: nothing was trained. Lower the learning rate, or look for "
            "bad values in the data"
        )
