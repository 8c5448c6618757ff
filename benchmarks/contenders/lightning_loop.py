"""Lightning: a `LightningModule` and a `Trainer`."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.contenders.torch_loop import model_of, tensors_of
from benchmarks.worker import Port, drive
from benchmarks.workloads import Workload


class Module(lightning.LightningModule):
    """A workload, as its documentation would have it."""

    def __init__(self, workload: Workload, lean: bool) -> None:
        super().__init__()
        self.model, self.lean, self.learning_rate = model_of(workload), lean, workload.learning_rate
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.learning_rate, eps=1e-7)
        self.losses, self.accuracies = torch.zeros(()), torch.zeros(())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.losses += loss.detach()
        self.accuracies += accuracy
        if not self.lean:
            self.log_dict({"loss": loss, "accuracy": accuracy}, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def serve(workload: Workload, port: Port, lean: bool = False) -> None:
    """Trains by `Trainer.fit`; what each call costs by itself is taken off: see `drive`.

    Logger and checkpoints are off. With `lean`, so is all else that a user could turn off, and batches are read whole
    instead of example by example.
    """
    module = Module(workload, lean)
    dataset = TensorDataset(*tensors_of(workload))
    if lean:
        sampler = BatchSampler(RandomSampler(dataset), workload.batch_size, drop_last=False)
        loader = DataLoader(dataset, batch_size=None, sampler=sampler)
        off = {"enable_progress_bar": False, "enable_model_summary": False, "barebones": True}
    else:
        loader, off = DataLoader(dataset, batch_size=workload.batch_size, shuffle=True), {}

    def run(steps: int) -> tuple[int, float]:
        module.losses.zero_()
        trainer = lightning.Trainer(
            max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False, **off
        )
        trainer.fit(module, loader)
        return steps, float(module.losses) / steps

    drive(port, {"": (run, 1)}, start_up=True)
