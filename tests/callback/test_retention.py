"""Retention: which checkpoints stay, as a function, and on the disk of a run that is killed and goes on."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import callbacks
from callbacks import Callback, Checkpoint
from callbacks.retention import Policy, Saved, ranked, retained
from loop import fit
from tests.tasks import Plain

VALUES = st.one_of(st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(-3, 3).map(float))
HISTORIES = st.lists(
    st.builds(Saved, st.integers(1, 40), VALUES, st.integers(0, 5).map(lambda hour: hour * 1800.0), st.integers(0, 9)),
    min_size=1, max_size=12, unique_by=lambda saved: saved.step,
)  # fmt: skip
POLICIES = st.builds(
    Policy, st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(1, 9), st.booleans(),
    st.none() | st.integers(1, 40), st.sampled_from([1, -1]),
)  # fmt: skip


def better(one, other, sign):
    return (sign * one.value, one.step) < (sign * other.value, other.step)


@given(HISTORIES, POLICIES)
def test_each_rule_keeps_what_it_names_and_nothing_else_stays(history, policy):
    policy = dataclasses.replace(policy, max_bytes=None)
    kept = retained(history, policy)
    for saved in history:
        is_last = sum(other.step > saved.step for other in history) < policy.last
        finite = [other for other in history if math.isfinite(other.value)]
        is_best = saved in finite and sum(better(other, saved, policy.sign) for other in finite) < policy.best
        is_nth = policy.every is not None and saved.step % policy.every == 0
        earlier = [other for other in history if other.step < saved.step and other.time // 3600 == saved.time // 3600]
        assert (saved.step in kept) == (is_last or is_best or is_nth or (policy.hourly and not earlier))


@given(HISTORIES, POLICIES, st.sets(st.integers(1, 40), max_size=2))
def test_the_budget_holds_but_for_the_newest_the_best_and_the_pinned(history, policy, pinned):
    kept = retained(history, policy, pinned)
    without = retained(history, dataclasses.replace(policy, max_bytes=None), pinned)
    best = ranked(history, policy.sign)[:1]
    safe = {max(saved.step for saved in history)} | {saved.step for saved in [*best, *history] if saved in best}
    safe |= pinned & {saved.step for saved in history}
    assert safe <= kept <= without
    if policy.max_bytes is not None:
        sizes = {saved.step: saved.bytes for saved in history}
        assert sum(sizes[step] for step in kept) <= policy.max_bytes or kept == safe
        # Nothing goes that needn't: the last one that went was too much.
        gone = sorted(without - kept)
        assert not gone or sum(sizes[step] for step in kept | {gone[-1]}) > policy.max_bytes
        assert all(step > gone[-1] or step in safe for step in kept) if gone else kept == without


@given(HISTORIES, POLICIES)
def test_pruned_at_each_checkpoint_or_once_at_the_end_the_same_stay(history, policy):
    policy = dataclasses.replace(policy, max_bytes=None)
    there = []
    for saved in sorted(history, key=lambda saved: saved.step):
        there.append(saved)
        kept = retained(there, policy)
        there = [saved for saved in there if saved.step in kept]
    assert {saved.step for saved in there} == retained(history, policy)


@given(HISTORIES, POLICIES, st.randoms())
def test_neither_the_order_of_the_list_nor_without_hourly_the_clock_counts(history, policy, random):
    policy = dataclasses.replace(policy, hourly=False)
    others = [dataclasses.replace(saved, time=random.random() * 1e5) for saved in history]
    random.shuffle(others)
    assert retained(others, policy) == retained(history, policy)


class Killed(BaseException):
    """Nothing in the loop catches this."""


class Scores(Callback):
    """Says how good the evaluations are; ends the process, as far as the run can tell, at the start of an epoch."""

    runs_on = "all"

    def __init__(self, scores, until):
        self.scores = scores
        self.until = until

    def on_epoch_start(self, run):
        if run.progress.epoch == self.until:
            run.checkpointing.held = None
            raise Killed

    def on_eval_end(self, run, metrics):
        metrics["eval_loss"] = float(self.scores[run.progress.epoch])


NAN = math.nan
KEPT = [
    ({"keep_best": 3}, (5, 1, 4, NAN, 2, 9, 9, 3), [2, 5, 8]),
    ({"keep_best": 2, "mode": "max"}, (5, 1, 4, NAN, 2, 9, 8, 3), [6, 7, 8]),
    ({"keep_every": 6 * 3}, (1, 2, 3, 4, 5, 6, 7, 8), [1, 3, 6, 8]),
    ({"keep_hourly": True}, (8, 7, 6, 5, 4, 3, 2, 1), [1, 8]),
    ({"keep_last": 9, "max_bytes": 1}, (5, 1, 4, NAN, 2, 9, 9, 3), [2, 8]),
]


@pytest.mark.parametrize(("policy", "scores", "epochs"), KEPT)
def test_a_run_that_is_killed_and_goes_on_keeps_what_an_undisturbed_one_does(
    policy, scores, epochs, quiet, monkeypatch
):
    # All within one hour of the clock, whenever the test runs.
    stamp = Path.stat

    def in_one_hour(path, **options):
        found = stamp(path, **options)
        return found if not path.name.startswith("step-") else type(found)((*found[:8], 7200, 7200))

    if "keep_hourly" in policy:
        monkeypatch.setattr(Path, "stat", in_one_hour)

    def train(directory, until=None):
        saving = Checkpoint(every="epoch", **{"keep_last": 1, **policy})
        chosen = callbacks.StandardSet([Scores(scores, until), *quiet(checkpoint=saving)])
        fit(Plain(), epochs=8, batch_size=20, run_dir=directory, callbacks=chosen)

    for until in (3, 6):
        with pytest.raises(Killed):
            train("killed", until)
    for directory in ("killed", "undisturbed"):
        train(directory)
        names = sorted(path.name for path in Path(directory, "checkpoints").iterdir())
        assert names == [f"step-{6 * epoch:08d}" for epoch in epochs]


def test_several_best_ones_need_a_metric():
    with pytest.raises(ValueError, match=r"best=None, keep_best=2\): give the metric by which they are the best"):
        Checkpoint(best=None, keep_best=2)


def test_an_evaluation_counts_at_its_own_step_and_not_at_the_end_of_an_epoch_after_it(quiet):
    scores = {4: 1.0, 8: 2.0, 12: 3.0}
    judged = callbacks.LambdaCallback(eval_end=lambda run, metrics: metrics.update(eval_loss=scores[run.progress.step]))
    saving = Checkpoint(every=1, keep_last=1, keep_best=2)
    chosen = callbacks.StandardSet([judged, *quiet(checkpoint=saving)])
    fit(Plain(), epochs=2, batch_size=20, eval_every=4, run_dir="run", callbacks=chosen)
    assert sorted(path.name for path in Path("run", "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (4, 8, 12)
    ]
