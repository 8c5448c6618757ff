"""Collectives between the steps, on the host. All of them are derived from one, `HostCollectives.sum_on_host`."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from loop.backends import devices

_PIECE = 1 << 24
"""The number of bytes that `gather_values` gathers at once from each worker."""
Json: TypeAlias = Any
"""A value that JSON can hold."""


class HostCollectives:
    """The workers of a job, and what they exchange between the steps.

    A *worker* is a process, a *replica* is a copy of the model that computes on a share of each global batch. A worker
    has one or more replicas. The replicas of worker w are numbered from `w * local_replicas`.

    Every method that says so is a collective: a worker that leaves it out blocks the others.

    Attributes:
        rank: this worker's index; rank 0 is the chief.
        workers: the number of processes.
        local_replicas: replicas in this process.
    """

    rank: int = 0
    workers: int = 1
    local_replicas: int = 1

    @property
    def replicas(self) -> int:
        """Replicas in all."""
        return self.workers * self.local_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # For one worker with one replica; a backend overrides those that differ for it

    def sum_on_host(self, array: np.ndarray) -> np.ndarray:
        """The sum over all workers of an int64 array of the same shape on each. All workers must call it."""
        return array

    def local_values(self, variable: tf.Variable) -> list[np.ndarray]:
        """The value of a variable in each replica of this worker."""
        return [variable.numpy()]

    def set_local_values(self, variable: tf.Variable, values: Sequence[np.ndarray]) -> None:
        """Gives a variable a value in each replica of this worker."""
        variable.assign(values[0])

    def gather_values(self, variable: tf.Variable) -> np.ndarray:
        """The values of a variable in all replicas, [replicas, ...]. All workers must call it."""
        own = np.stack(self.local_values(variable))
        if self.workers == 1:
            return own
        # As bytes, so that every type keeps all its bits; see `broadcast_variables`.
        data = np.frombuffer(own.tobytes(), np.uint8)
        gathered = np.empty((self.workers, len(data)), np.uint8)
        # In pieces, since `gather_bytes` needs several times the memory of what it gathers.
        for begin in range(0, len(data), _PIECE):
            end = begin + _PIECE
            gathered[:, begin:end] = self.gather_bytes(data[begin:end])
        return gathered.reshape(-1).view(own.dtype).reshape(self.replicas, *own.shape[1:])

    def broadcast_value(self, value: np.ndarray | None, shape: tf.TensorShape, dtype: tf.DType) -> np.ndarray:
        """The chief's array. All workers must call it; others than the chief give None."""
        if self.workers == 1:
            assert value is not None
            return value
        with tf.device("CPU:0"):
            initial = tf.zeros(shape, dtype) if value is None else value
            variable = tf.Variable(initial, trainable=False, dtype=dtype, name="broadcast")
        self.broadcast_variables([variable])
        received: np.ndarray = variable.numpy()
        return received

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the chief's values, bit for bit. All workers must call it."""
        if self.workers == 1:
            return
        for variable in variables:
            value = variable.numpy()
            # As integers: a sum of floats, with zeros from the others, would lose the sign of -0.0 and change nan.
            size = -(-value.nbytes // 4) * 4  # rounded up to whole words
            padded = value.tobytes().ljust(size, b"\0")
            words = np.frombuffer(padded, np.int32).astype(np.int64)
            if not self.is_chief:
                words = np.zeros_like(words)
            words = self.sum_on_host(words)
            data = words.astype(np.int32).tobytes()[: value.nbytes]
            variable.assign(np.frombuffer(data, value.dtype).reshape(value.shape))

    # The same on every backend

    def exchange(self, *numbers: int) -> np.ndarray:
        """The numbers of every worker, int64 of shape [workers, len(numbers)]. All workers must call it."""
        # Each worker fills its own row, and leaves zeros in the others: the sum is the whole table.
        table = np.zeros((self.workers, len(numbers)), np.int64)
        table[self.rank] = numbers
        return self.sum_on_host(table)

    def gather_bytes(self, array: np.ndarray) -> list[np.ndarray]:
        """The uint8 array of every worker, of any length, by rank. All workers must call it."""
        # The lengths first: arrays that are summed must have the same shape on all workers, that of the longest one.
        lengths = self.exchange(len(array))[:, 0]
        words = -(-int(lengths.max()) // 8)  # rounded up
        padded = array.tobytes().ljust(8 * words, b"\0")
        table = np.zeros((self.workers, words), np.int64)
        table[self.rank] = np.frombuffer(padded, np.int64)
        # All other workers add zeros: no sum overflows, so that all 64 bits of a number can be used.
        table = self.sum_on_host(table)
        return [row.view(np.uint8)[:length] for row, length in zip(table, lengths, strict=True)]

    def gather_json(self, value: Json) -> list[Json]:
        """The JSON value of every worker, by rank. All workers must call it."""
        texts = self.gather_bytes(np.frombuffer(json.dumps(value).encode(), np.uint8))
        return [json.loads(text.tobytes()) for text in texts]

    def broadcast_json(self, value: Json) -> Json:
        """The chief's JSON value. All workers must call it."""
        return self.gather_json(value if self.is_chief else None)[0]

    def fingerprints(self, variables: Sequence[tf.Variable]) -> dict[int, list[str]]:
        """A hash of each variable in each replica, by replica. All workers must call it."""
        hashes: list[list[str]] = [[] for _ in range(self.local_replicas)]
        for variable in variables:
            for replica, value in enumerate(self.local_values(variable)):
                hashes[replica].append(fingerprint(value))
        # Worker by worker, which is the order in which replicas are numbered.
        of_all_replicas = itertools.chain.from_iterable(self.gather_json(hashes))
        return dict(enumerate(of_all_replicas))

    def refuse_shared_gpus(self, gpus: Sequence[tf.config.PhysicalDevice]) -> None:
        """Refuses workers that have the same GPU; `gpus` are those of this one. All workers must call it."""
        identities = self.exchange(devices.gpu_identity(gpus))[:, 0]
        # All workers have the same table: either all of them raise the error, or none.
        devices.refuse_sharing(identities.tolist())


def fingerprint(*arrays: np.ndarray) -> str:
    """SHA-256 over dtype, shape and little-endian bytes of arrays, in order.

    For each array: the name of its dtype and its shape as text (`float32[64,10]`), then its bytes in C order. An
    array of Python's texts counts as the bytes of its `repr`: its own bytes are addresses, which differ each time.
    """
    digest = hashlib.sha256()
    for given in arrays:
        array = np.frombuffer(repr(given.tolist()).encode(), np.uint8) if given.dtype.hasobject else given
        shape = ",".join(map(str, array.shape))
        digest.update(f"{array.dtype.name}[{shape}]".encode())
        little_endian = array.astype(array.dtype.newbyteorder("<"))
        digest.update(np.ascontiguousarray(little_endian).tobytes())
    return digest.hexdigest()
