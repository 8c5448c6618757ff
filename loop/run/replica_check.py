"""Compares the variables of all replicas: a correct run keeps them the same to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loop.errors import TrainingError


def check_same(names: Iterable[str], fingerprints: Mapping[int, list[str]], local_replicas: int, step: int) -> None:
    """Raises an error where a variable isn't the same in all replicas.

    `fingerprints` has the hashes of the variables, in the order of the names, by replica.

    Raises:
        TrainingError: which variable differs, and where.
    """
    for index, name in enumerate(names):
        hashes = [of_replica[index] for of_replica in fingerprints.values()]
        # The most frequent hash is taken for right, so that the message names the few replicas that differ; if several
        # are equally frequent, the chief's.
        expected = max(hashes, key=lambda value: (hashes.count(value), value == hashes[0]))
        differing = []
        for replica, value in enumerate(hashes):
            if value != expected:
                differing.append(f"replica {replica} (rank {replica // local_replicas})")
        if differing:
            raise TrainingError(
                f"step {step}: the replicas have drifted apart: {name} differs on {', '.join(differing)}. Look for "
                "code that depends on the rank, for a variable that is changed outside of the step, and at the "
                "hardware; `tfloop verify` tries the task itself"
            )
