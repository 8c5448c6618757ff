"""Digits with Lightning."""

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

random = np.random.default_rng(0)
START = [
    random.normal(0, 0.1, shape).astype("float32")
    for shape in ((64, 64), (64,), (64, 10), (10,))
]


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), START):
                parameter.copy_(torch.from_numpy(start.T))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("loss", cross_entropy(self.model(images), labels))


digits = load_digits()
images = torch.from_numpy((digits.data / 16).astype("float32"))
labels = torch.from_numpy(digits.target)
train = TensorDataset(images[:1600], labels[:1600])
test = TensorDataset(images[1600:], labels[1600:])

if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    task = Digits()
    trainer.fit(task, DataLoader(train, batch_size=64))
    [found] = trainer.test(task, DataLoader(test, batch_size=64), verbose=False)
    loss = found["loss"]
    print(f"loss {loss:.6f}")
