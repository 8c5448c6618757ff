"""Orbit: its own `StandardTrainer` and `Controller`."""

from __future__ import annotations

from typing import Any

import orbit
import tensorflow as tf

from benchmarks.contenders.by_hand import ByHand
from benchmarks.worker import Port, Run, drive
from benchmarks.workloads import Workload


class Trainer(orbit.StandardTrainer):
    """A workload for Orbit. What a step computes is what the loop by hand computes."""

    def __init__(self, hand: ByHand) -> None:
        self.hand = hand
        self.totals = tf.Variable(tf.zeros([hand.width()]))
        self.step = orbit.utils.create_global_step()
        super().__init__(hand.dataset())

    def train_loop_begin(self) -> None:
        self.totals.assign(tf.zeros_like(self.totals))

    def train_step(self, iterator: Any) -> None:
        self.totals.assign_add(self.hand.update(*next(iterator)))
        self.step.assign_add(1)

    def train_loop_end(self) -> dict[str, Any]:
        return {"loss": self.totals[0]}


def serve(workload: Workload, port: Port, calls: list[int]) -> None:
    """Trains with the fastest of these `steps_per_loop`; what each `Controller.train` costs by itself is taken off."""
    hand = ByHand(workload)
    trainer = Trainer(hand)

    def way(size: int) -> tuple[Run, int]:
        losses: list[float] = []
        controller = orbit.Controller(
            trainer=trainer, global_step=trainer.step, steps_per_loop=size,
            train_actions=[lambda output: losses.append(float(output["loss"]))],
        )  # fmt: skip

        def run(steps: int) -> tuple[int, float]:
            losses.clear()
            controller.train(steps=int(trainer.step) + steps, checkpoint_at_completion=False)
            return steps, sum(losses) / steps

        return run, size

    drive(port, {f"steps_per_loop={size}": way(size) for size in calls}, start_up=True)
