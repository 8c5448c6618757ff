"""Checkpoint: when to save, and which checkpoints to keep. `loop.checkpoint` writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path

from callbacks import metric_direction
from callbacks.arguments import check, is_number, is_text, is_whole, is_whole_or_none, stored_number
from callbacks.base import Callback, Every, Metrics, Run
from callbacks.retention import Policy, Saved, ranked, retained
from callbacks.run_record.redaction import tell
from callbacks.types import Data, JsonObject

DEFAULT = "eval_loss"
"""The metric by which the best checkpoint is kept, if no other is given."""

PAUSE = 10.0
"""The shortest time between checkpoints at the ends of epochs, in seconds."""


class Checkpoint(Callback):
    """Saves at a schedule, at the end and on a stop; keeps the last few, the best, and what else a policy names.

    Args:
        every: `"auto"`: at the ends of epochs, but at most once in 10 seconds; `"epoch"`: at the end of each epoch; or
            a number of steps or a time (`"10m"`), see `Callback`, and also as `"auto"`. The end of the run is always
            saved, and so is a stop. Times are by the chief's clock.
        keep_last: how many of the newest checkpoints are kept, >= 1.
        best: the metric by which the best checkpoint is also kept; None keeps only the last ones. The default,
            `eval_loss`, is that of the first set if there are several evaluation sets, and has no effect in a run
            without an evaluation; another metric must exist. A best checkpoint that comes too soon after another one
            stays in memory until the next checkpoint is written.
        mode: `"min"` or `"max"`: which value of `best` is better; or `"auto"`: by the metric's name.
        background: whether training goes on while a checkpoint is written, from a copy of the variables.
        on_error: `"stop"`: the run fails when a checkpoint can't be written, because the disk is full, say; `"warn"`:
            it goes on with a warning, except at its end. Earlier checkpoints are kept in any case.
        keep_best: how many of the best checkpoints are kept, by `best`, >= 1. The best state of all is always written;
            of the others, those that were saved while they were among the best.
        keep_every: also kept are checkpoints whose step is a multiple of it. It doesn't say when to save: see `every`.
        keep_hourly: also kept is the first checkpoint of each hour of the chief's clock.
        max_bytes: what all checkpoints together may take. The oldest ones go first, whatever else would keep them; the
            newest and the best one stay. While a checkpoint is written, it is there in addition.

    A value that is not finite is never the best.
    """

    def __init__(
        self,
        every: Every = "auto",
        keep_last: int = 3,
        best: str | None = DEFAULT,
        mode: str = "auto",
        background: bool = True,
        on_error: str = "stop",
        keep_best: int = 1,
        keep_every: int | None = None,
        keep_hourly: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        check(self, is_whole(keep_last, 1), "give a whole number >= 1 of checkpoints", keep_last=keep_last)
        check(self, best is None or is_text(best), "give a metric's name, or None", best=best)
        check(self, on_error in ("stop", "warn"), "give stop or warn", on_error=on_error)
        check(self, is_whole(keep_best, 1), "give a whole number >= 1 of checkpoints", keep_best=keep_best)
        has_metric = best is not None or keep_best == 1
        check(self, has_metric, "give the metric by which they are the best", best=best, keep_best=keep_best)
        for name, value in {"keep_every": keep_every, "max_bytes": max_bytes}.items():
            check(self, is_whole_or_none(value, 1), "give a whole number >= 1, or None", **{name: value})
        check(self, isinstance(keep_hourly, bool), "give True or False", keep_hourly=keep_hourly)
        self.every: Every = "epoch" if every == "auto" else every
        self.pause = 0.0 if every == "epoch" else PAUSE
        # `asked` is the argument. `best` is the metric of the current run: `on_data` may choose another one.
        self.best = self.asked = best
        self.watches = {"best": best} if best not in (None, DEFAULT) else {}
        self.sign = metric_direction.sign(self, "best", best or "loss", mode)
        self.policy = Policy(keep_last, keep_best, keep_every, keep_hourly, max_bytes, self.sign)
        self.background = background
        self.on_error = on_error
        self.best_value: float | None = None
        self.best_step: int | None = None
        self._best_saved: int | None = None  # the step of the best checkpoint on disk
        self._result_saved: int | None = None  # the step of the checkpoint with the run's result; see `Run.best`
        self._known: dict[int, Saved] = {}  # by step: checkpoints on disk, and states that were judged since
        self._due = -math.inf

    def on_setup(self, run: Run) -> None:
        self._due = -math.inf  # the end of the first epoch shows whether saving works
        run.save_on_stop = True
        run.save_in_background = self.background
        run.save_must_succeed = self.on_error == "stop"
        self.best = self.asked
        self.best_value = self.best_step = None
        self._best_saved = self._result_saved = None
        self._known = {}

    def on_data(self, run: Run, data: Data) -> Data:
        # `keep="best"` needs a metric, and takes the training's loss where there is no evaluation.
        needs_metric = run.options["keep"] == "best" and self.asked in (None, DEFAULT)
        if needs_metric or (self.asked == DEFAULT and data.evaluated):
            before = self.best
            self.best = _default(data)
            if self.best != before:  # values of the earlier phase's metric can't be compared with those of this one
                self._forget_values()
        return data

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if self.every != "epoch":
            self._save(run, "schedule")

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._judge(run, metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        # A metric of the evaluation is judged at its end: here it may be that of an earlier step.
        if self.best is not None and not self.best.startswith("eval_"):
            self._judge(run, metrics)
        if self._is_due():
            self._save(run, "epoch")

    def on_restore(self, run: Run, path: Path | None) -> None:
        # `load_state_dict` has set the best value and step of the checkpoint that is restored.
        steps_on_disk = list(map(step_of, run.checkpoints()))
        if self.best_step in steps_on_disk:
            self._best_saved = self.best_step
        if run.options["keep"] == "best" and self.best is not None and self.best_step is not None:
            assert self.best_value is not None
            if self.best_step in steps_on_disk:
                run.keep_best(self.best, self.best_value, self.best_step)
            else:  # it is in another run directory, or was removed
                tell_lost_best(self.best_step)
                self.best_value = self.best_step = None

    def on_fit_start(self, run: Run) -> None:
        self._result_saved = _result_step(run)

    def on_checkpoint(self, run: Run, reason: str) -> None:
        assert run.saved_path is not None
        step = step_of(run.saved_path)
        if step == self.best_step:
            self._best_saved = step
        result = _result_step(run)
        if step == result:
            self._result_saved = step
        # The previous best one is kept until the new one is on disk.
        pinned = (self.best_step, self._best_saved, result, self._result_saved)
        paths = {}
        for path in run.checkpoints():
            if step_of(path) <= step:  # a later one is damaged, and was left by an earlier attempt: it doesn't count
                paths[step_of(path)] = path
        kept = retained(map(self._saved, paths.values()), self.policy, pinned)
        run.discard([path for step_on_disk, path in paths.items() if step_on_disk not in kept])
        known = {}
        for known_step, saved in self._known.items():
            # Training may have gone on meanwhile: a state that was judged after this step isn't on disk yet.
            if known_step in kept or known_step > step:
                known[known_step] = saved
        self._known = known

    def _saved(self, path: Path) -> Saved:
        """What is known of a checkpoint on disk; no more is looked up than the policy needs."""
        saved = self._known.get(step_of(path)) or Saved(step_of(path))
        with contextlib.suppress(OSError):  # it is just being removed
            if self.policy.hourly and not saved.time:  # kept from now on: a move of the directory would change it
                saved = dataclasses.replace(saved, time=path.stat().st_mtime)
            if self.policy.max_bytes is not None:
                saved = dataclasses.replace(saved, bytes=sum(file.stat().st_size for file in path.iterdir()))
        self._known[saved.step] = saved
        return saved

    def _judge(self, run: Run, metrics: Metrics) -> None:
        if self.best is None or not math.isfinite(metrics.get(self.best, math.nan)):
            return
        value = metrics[self.best]
        step = run.progress.step
        # Before this state is added to `_known`: it must not be compared with itself.
        is_among_best = self._is_among_best(step, value)
        self._known[step] = Saved(step, value)
        if self.best_value is None or self.sign * (value - self.best_value) < 0:
            self.best_value = value
            self.best_step = step
            if run.options["keep"] == "best":
                run.keep_best(self.best, value, step)
            if self._is_due():
                self._save(run, "best")
            # Too soon for a file: a copy in memory is written before the next checkpoint.
            elif not run.best_is_judged:  # memory holds only one: that of the callback that judges
                run.save("best", later=True)
        elif is_among_best and self._is_due():
            self._save(run, "best")

    def _is_among_best(self, step: int, value: float) -> bool:
        """Whether a state that isn't judged yet is one of the best, of which more than one are kept."""
        if self.policy.best == 1 or step in self._known:
            return False
        best = ranked(self._known.values(), self.sign)[: self.policy.best]
        return len(best) < self.policy.best or self.sign * (value - best[-1].value) < 0

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def _save(self, run: Run, reason: str) -> None:
        run.save(reason)
        self._due = time.monotonic() + self.pause

    def state_dict(self) -> JsonObject:
        # Only these two rules need it. Without them, the state stays small however many checkpoints are kept.
        needed = self._known.values() if self.policy.best > 1 or self.policy.hourly else ()
        known = [[saved.step, saved.value, saved.time] for saved in needed]
        return {"metric": self.best, "best_value": self.best_value, "best_step": self.best_step, "known": known}

    def load_state_dict(self, state: JsonObject) -> None:
        self.best_value = stored_number(state, "best_value", optional=True)
        self.best_step = stored_number(state, "best_step", whole=True, optional=True)
        self._known = {}
        for step, value, saved_at in state.get("known", ()):  # checkpoints of older versions don't have it
            if not (is_whole(step, 0) and isinstance(value, int | float) and is_number(saved_at, -math.inf)):
                raise ValueError(f"known has {[step, value, saved_at]!r:.60}")
            self._known[step] = Saved(step, value, saved_at)
        if self.best_step is not None and self.best_value is not None:
            self._known.setdefault(self.best_step, Saved(self.best_step, self.best_value))
        if state.get("metric", self.best) != self.best:  # older versions don't name it
            self._forget_values()

    def _forget_values(self) -> None:
        """Forgets how good the checkpoints are: the values are of a metric that no longer counts."""
        self.best_value = self.best_step = None
        for step, saved in self._known.items():
            self._known[step] = dataclasses.replace(saved, value=math.nan)


def _default(data: Data) -> str:
    """The loss by which the best checkpoint is kept: of the evaluation, if there is one, and of its first set."""
    first_set = next(iter(data.evaluated), None)
    if first_set is None:
        return "loss"
    return f"eval_{first_set}_loss" if first_set else DEFAULT


def _result_step(run: Run) -> int | None:
    """The step whose weights are the result of the run, if that is known."""
    return None if run.best is None else run.best["step"]


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def tell_lost_best(step: int) -> None:
    """Notes on stderr that the best weights so far are in another run directory, or were removed."""
    where = "are not in this run directory, which keeps the best from here on"
    tell(f"note: the best weights so far, of step {step:,}, {where}")
