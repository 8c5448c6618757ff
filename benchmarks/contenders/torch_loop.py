"""PyTorch: the loop of its tutorials, with the data as tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.worker import Port, drive
from benchmarks.workloads import Workload

MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10)
    ),
    "embedding": lambda: nn.Sequential(nn.Embedding(100_000, 64, sparse=True), nn.Flatten(), nn.Linear(16 * 64, 10)),
}  # fmt: skip


def model_of(workload: Workload) -> nn.Module:
    """The model, with initial weights as Keras has them."""
    model = MODELS[workload.build.__name__]()
    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Embedding):
            nn.init.uniform_(layer.weight, -0.05, 0.05)
    return model


def optimizer_of(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with the numbers that Keras's has."""
    if workload.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), workload.learning_rate, eps=1e-7)
    return torch.optim.SGD(model.parameters(), workload.learning_rate, workload.momentum)


def tensors_of(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels; images with their channels first, as PyTorch wants them."""
    inputs, labels = (torch.from_numpy(array) for array in workload.arrays())
    return (inputs.permute(0, 3, 1, 2).contiguous() if inputs.ndim == 4 else inputs), labels.long()


def serve(workload: Workload, port: Port, compiled: bool = False) -> None:
    """Trains; with `torch.compile`, if wanted, around the model and its loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(workload).to(device)
    inputs, labels = (tensor.to(device) for tensor in tensors_of(workload))
    optimizer = optimizer_of(workload, model)

    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    forward = torch.compile(forward) if compiled else forward

    def batches() -> Iterator[torch.Tensor]:
        # Faster than a DataLoader, which fetches one example after the other: see Lightning for that.
        while True:
            yield from torch.randperm(len(inputs), device=device).split(workload.batch_size)

    order = batches()

    def run(steps: int) -> tuple[int, float]:
        losses, accuracies = torch.zeros((), device=device), torch.zeros((), device=device)
        for _ in range(steps):
            rows = next(order)
            loss, accuracy = forward(inputs[rows], labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
            accuracies += accuracy
        return steps, float(losses) / steps

    drive(port, {"": (run, 1)})
