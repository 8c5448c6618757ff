"""The same numbers on any number of replicas and any engine: against a loop by hand, and against Keras's own fit."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from loop.backends import create
from tests import conformance, sharded
from tests.exactness import (
    CASES,
    SETTINGS,
    Prime,
    by_hand,
    in_turn,
    largest_difference,
    local_by_hand,
    order_of,
    regression,
    trained,
    weights_of,
)
from tests.products import pairs
from tests.workers import JOBS

BOUNDS = {"float32": 5e-6, "float64": 1e-12}
"""What another order of additions may change in twelve steps, relative to the largest weight of each variable."""


def bound(case, dtype):
    return 1e-5 if (case, dtype) == ("batch_norm", "float32") else BOUNDS[dtype]


@cache
def expected(case, dtype):
    fields, options = CASES[case]
    return by_hand({**fields, "dtype": dtype}, options, **SETTINGS)


@pytest.mark.parametrize(("replicas", "case", "dtype"), pairs([1, 2, 3], CASES, BOUNDS))
def test_same_as_by_hand_in_one_process(replicas, case, dtype):
    fields, options = CASES[case]
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    found = trained(backend, {**fields, "dtype": dtype}, options)
    weights, _ = expected(case, dtype)
    assert largest_difference([v.numpy() for v in weights_of(found.model)], weights) <= bound(case, dtype)
    check_metrics(case, dtype, found.metrics)
    assert (found.steps, found.examples, found.replicas) == (12, 202, replicas)


@pytest.mark.parametrize("replicas", [1, 3])
def test_same_as_by_hand_with_xla(replicas):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    found = trained(backend, {}, {"compile": "xla"})
    assert largest_difference([v.numpy() for v in weights_of(found.model)], expected("plain", "float32")[0]) <= 5e-6


def test_collectives_that_xla_cannot_compile_are_said_and_left_to_the_graph():
    with pytest.warns(UserWarning, match=r"XLA can't compile this task .compute\(\) needs other replicas"):
        found = trained(create("mirrored", 2), {"batch_norm": True}, {"compile": "xla"})
    weights = expected("batch_norm", "float32")[0]
    assert largest_difference([v.numpy() for v in weights_of(found.model)], weights) <= 1e-5


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    examples=st.integers(1, 40), batch_size=st.integers(1, 45), replicas=st.integers(1, 4), seed=st.integers(0, 99),
    case=st.sampled_from(["plain", "accumulate", "all_gather"]),
)  # fmt: skip
def test_same_for_all_sizes(examples, batch_size, replicas, seed, case):
    """In float64: what rounding can do is far below what a mistake does."""
    fields, options = CASES[case]
    fields = {**fields, "dtype": "float64", "examples": examples, "seed": seed}
    assume(regression(examples, seed=seed)[2].sum() > 0)
    settings = {"epochs": 2, "batch_size": batch_size, "seed": seed}
    found = trained(create("mirrored", replicas), fields, options, **settings)
    weights, _ = by_hand(fields, options, **settings)
    assert largest_difference([v.numpy() for v in weights_of(found.model)], weights) <= 1e-10
    assert found.examples == 2 * examples


def compare(directory, case, dtype):
    with np.load(directory / f"{case}-{dtype}.npz") as stored:
        found = [stored[name] for name in stored.files]
    assert largest_difference(found, expected(case, dtype)[0]) <= bound(case, dtype), (case, dtype)
    check_metrics(case, dtype, json.loads((directory / f"{case}-{dtype}.json").read_text()))


def compare_local_steps(directory, workers):
    """The weights of local SGD; and that a loss of one replica that isn't finite ends all, with the same error."""
    with np.load(directory / "local.npz") as stored:
        found = [stored[name] for name in stored.files]
    assert largest_difference(found, local_by_hand(workers, **SETTINGS)) <= 1e-12
    assert largest_difference(found, expected("plain", "float64")[0]) > 1e-4  # it is inexact
    said = json.loads((directory / "bad.json").read_text())
    assert len(said) == workers
    step = int(np.flatnonzero(order_of(101, SETTINGS["seed"], 0) == 60)[0]) // SETTINGS["batch_size"] + 1
    assert said[0].startswith(f"TrainingError: step {step} (epoch 1): not finite (nan or inf): the loss")
    assert len({each.split("; ")[0] for each in said}) == 1  # the chief says also what it has kept


def check_metrics(case, dtype, metrics):
    """Those of training against the loop by hand; and those of evaluation, on a prime number of examples, exactly."""
    assert metrics["loss"] == pytest.approx(expected(case, dtype)[1], rel=1e-5)
    if case != "judged":
        return
    batch = regression(23, seed=5, dtype=dtype)
    truth, scores = (np.asarray(each) for each in Prime.judgement(batch))
    assert metrics["eval_auc"] == pytest.approx(roc_auc_score(truth, scores, sample_weight=batch[2]), abs=1e-6)
    assert metrics["eval_input"] == pytest.approx(np.average(batch[0][:, 0], weights=batch[2]), rel=1e-6)


@pytest.mark.parametrize(("engine", "workers"), JOBS)
def test_same_as_by_hand_in_real_workers(engine, workers, jobs):
    _, directory = jobs(engine, workers)
    for case, dtype in in_turn(JOBS[engine, workers]):
        compare(directory, case, dtype)
    compare_local_steps(directory, workers)


# Of the same jobs as the test above: they take long, and are run once for all tests of this file.


@pytest.mark.parametrize(("engine", "workers"), JOBS)
def test_conformance_in_real_workers(engine, workers, jobs):
    for stdout in jobs(engine, workers)[0]:
        assert [line for line in stdout.splitlines() if line.endswith(" ok")] == [f"{c} ok" for c in conformance.CHECKS]


@pytest.mark.parametrize(("engine", "workers"), JOBS)
def test_same_bits_with_a_sharded_optimizer_in_real_workers(engine, workers, jobs):
    _, directory = jobs(engine, workers)
    assert json.loads((directory / "sharded.json").read_text()) == {name: [] for name in sharded.IN_WORKERS}
