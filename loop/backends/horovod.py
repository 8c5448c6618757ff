"""The backend `horovod`: one process per replica, joined by Horovod's own launcher or an outside one."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import horovod.tensorflow as hvd
import numpy as np
import psutil
import tensorflow as tf

from loop.backends.base import Backend
from loop.backends.devices import use_gpus
from loop.backends.step_collectives import gathered_flat, in_types
from loop.errors import RegroupError, UsageError
from loop.launch import rendezvous
from loop.launch.environment import WORKER, horovod_meets_at, job_rank, job_size
from loop.launch.member import Member
from loop.launch.worker import await_peers, is_peer_loss

_BUFFER = "HOROVOD_FUSION_THRESHOLD"  # the size in bytes of a buffer that Horovod keeps; by default, 128 MiB
_SUMMED = frozenset((tf.float16, tf.float32, tf.float64, tf.int32, tf.int64))
"""The types that Horovod adds up."""
_SENT = _SUMMED | {tf.uint8, tf.int8, tf.uint16, tf.int16, tf.bool}
"""The types that Horovod gathers and broadcasts."""


class Horovod(Backend):
    """Horovod: gradients and totals go through one `DistributedGradientTape` for each step, in one group."""

    name = "horovod"
    gathers_rows = True
    cannot_send = {"bf16": "Horovod's TensorFlow operations don't take bfloat16; use fp16, or backend='multiworker'"}

    def __init__(self) -> None:
        _start()
        gpus = use_gpus(hvd.local_rank())
        self.device = "GPU:0" if gpus else ""
        self._take_place()
        _check_size(self.workers)
        self.refuse_shared_gpus(gpus)

    def _take_place(self) -> None:
        self.rank = hvd.rank()
        self.workers = hvd.size()
        self._reductions = 0
        # Not a constant: TensorFlow would simplify each rank's graph in its own way, and collectives wouldn't match.
        self._replica = tf.Variable(self.rank, trainable=False, dtype=tf.int64)

    def replica(self) -> tf.Tensor:
        return self._replica.read_value()

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Horovod identifies tensors by name. A name must not come again in another function, shape or group.
        self._reductions += 1
        with tf.name_scope(f"reduction_{self._reductions}"):
            tape = hvd.DistributedGradientTape(_TakenTape(), op=hvd.Sum, num_groups=1)
            return in_types(lambda group: tape.gradient(group, group), tensors, _SUMMED)

    def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def gather(flat: tf.Tensor) -> tf.Tensor:
            self._reductions += 1
            return hvd.allgather(flat, name=f"gathering_{self._reductions}")

        return in_types(functools.partial(gathered_flat, gather), tensors, _SENT)

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        self._reductions += 1
        name = f"gathering_{self._reductions}"
        return in_types(lambda group: [hvd.allgather(group[0], name=name)], [rows], _SENT)[0]

    def no_adasum(self) -> str:
        if not hvd.mpi_enabled():
            return "this Horovod is built without MPI, which Adasum needs (see docs/engines.md); use reduction='sum'"
        is_power_of_2 = self.workers & (self.workers - 1) == 0
        return "" if is_power_of_2 else f"it needs a power of 2 workers, not {self.workers}"

    def adasum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # One by one: Horovod's grouped operation fails with Adasum.
        self._reductions += 1
        sums = []
        for index, tensor in enumerate(tensors):
            sums.append(hvd.allreduce(tensor, op=hvd.Adasum, name=f"adasum_{self._reductions}_{index}"))
        return sums

    def sum_on_host(self, array: np.ndarray) -> np.ndarray:
        return hvd.allreduce(tf.constant(array), op=hvd.Sum, name=f"host{array.size}").numpy()

    def gather_values(self, variable: tf.Variable) -> np.ndarray:
        if variable.dtype not in _SENT:
            return super().gather_values(variable)
        gathered: np.ndarray = hvd.allgather(variable.read_value()[None], name="gathering_on_host").numpy()
        return gathered

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        sent = [variable for variable in variables if variable.dtype in _SENT]
        hvd.broadcast_variables(sent, root_rank=0)
        for variable in variables:
            if variable.dtype in _SENT:
                continue
            value = variable.numpy()
            data = tf.constant(np.frombuffer(value.tobytes(), np.uint8))
            received = hvd.broadcast(data, root_rank=0, name=f"bytes_{value.nbytes}").numpy()
            variable.assign(received.view(value.dtype).reshape(value.shape))

    def close(self) -> None:
        hvd.shutdown()


class ElasticHorovod(Horovod):
    """Horovod in an elastic job: after `rejoin` this worker belongs to another generation."""

    member: Member

    def __init__(self) -> None:
        self.member = Member()
        self._join()
        self.device = "GPU:0" if use_gpus(hvd.local_rank()) else ""

    def is_recoverable(self, error: BaseException) -> bool:
        return isinstance(error, RegroupError) or is_peer_loss(error)

    def rejoin(self) -> None:
        # Horovod pairs collectives by the names of tensors, and Keras counts names up. A worker that joins builds its
        # first model: here names must start anew, too.
        for module in ("keras", "tf_keras"):
            if module in sys.modules:
                sys.modules[module].backend.clear_session()
        if not self.member.changed:  # the launcher knows of no loss yet: other workers may still wait for this one
            self.member.cut()
        hvd.shutdown()
        self.member.cut()  # again: an error may have left sockets open
        self._join()

    def _join(self) -> None:
        self.member.join(_start)
        self._take_place()


def _start(check: Callable[[], None] = lambda: None) -> None:
    """Starts Horovod when all ranks are there; see `_meet`."""
    rendezvous.serve_job()
    _meet(check)
    # A step waits for each of its few collectives: Horovod's thread looks for them twice as often as by default.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.5")  # milliseconds; docs/performance/communication.md
    # Otherwise a group could be fused with tensors that happen to wait at the same time, and the sum of 3 or more
    # workers would be added up in another order.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    on_gpus = bool(tf.config.list_physical_devices("GPU"))
    if {WORKER, "HOROVOD_ELASTIC"} & os.environ.keys():
        os.environ.pop(_BUFFER, None)  # with it, Horovod 0.28.1 crashes when it starts for a second time
    elif not on_gpus:
        os.environ.setdefault(_BUFFER, str(16 << 20))  # on CPUs, 128 MiB are no faster (the same page)
    with contextlib.nullcontext() if on_gpus else _waiting_for_cores():
        hvd.init()


@contextlib.contextmanager
def _waiting_for_cores() -> Iterator[None]:
    """Threads that are started within it wait for a core that is in use, and don't interrupt the thread that uses it.

    Gloo's thread is woken by each message, and then tries to take a lock again and again, without sleeping. If it has
    interrupted the thread that holds the lock, on the same core, both wait until its time slice is over. That takes
    milliseconds, and a collective tenths of one.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # it has ended, or a sandbox doesn't allow this
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:  # else the user has chosen
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """The ids of this process's threads; none where the system can't do what `_waiting_for_cores` needs."""
    return {thread.id for thread in psutil.Process().threads()} if hasattr(os, "SCHED_BATCH") else set()


def _check_size(workers: int) -> None:
    """Refuses a job whose MPI doesn't connect all workers: each part would train alone, as if it were the whole job."""
    expected = job_size()
    if expected not in (None, workers):
        raise UsageError(
            f"Horovod's MPI has {workers} of the {expected} workers that were started: it isn't the MPI of the "
            "launcher; build Horovod with that one, or use --backend multiworker"
        )


def _meet(check: Callable[[], None] = lambda: None) -> None:
    """Waits until all ranks are there, if Horovod's launcher has a key-value store and the job's size is fixed.

    Each rank writes a key of its own, and looks for those of the others.

    Args:
        check: is called again and again while it waits; an error that it raises ends the wait.

    Raises:
        UsageError: there are other ranks, but no variable says where to meet them, or it has no port.
    """
    server = horovod_meets_at()
    if server is None:
        if (job_size() or 1) > 1 and not hvd.mpi_built():  # Horovod would abort the process
            raise UsageError(
                f"HOROVOD_SIZE={job_size()} without HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, where its workers "
                "meet: Horovod's launcher sets all of them; unset HOROVOD_RANK and HOROVOD_SIZE where it isn't meant"
            )
        return
    if "HOROVOD_ELASTIC" in os.environ:
        return

    def ask(method: str, rank: int) -> bool:
        check()
        connection = http.client.HTTPConnection(*server, timeout=10)
        try:
            connection.request(method, f"/tfloop/rank-{rank}", body=b"here")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    own = job_rank()
    peers: dict[str, Callable[[], bool]] = {}
    for rank in range(job_size() or 1):
        method = "PUT" if rank == own else "GET"
        peers[f"rank {rank}"] = functools.partial(ask, method, rank)
    await_peers(peers)


class _TakenTape(tf.GradientTape):
    """A tape that returns its argument: gradients that were computed before, over one or more micro-batches.

    `DistributedGradientTape` reduces what the tape that it wraps returns. So gradients and totals, which the step
    already has, are reduced in one group.
    """

    def gradient(
        self, target: list[tf.Tensor], sources: list[tf.Tensor], *args: object, **kwargs: object
    ) -> list[tf.Tensor]:
        return target
