"""The compiled stateful LSTM as a task; its state is in each checkpoint."""

from series import BATCH, inputs, make_model, targets

from loop import KerasTask, fit


class Wave(KerasTask):
    defaults = {"batch_size": BATCH, "epochs": 3, "shuffle": False}

    def __init__(self):
        super().__init__(make_model, train=(inputs, targets))


if __name__ == "__main__":
    result = fit(Wave(), seed=0)
    variables = result.model.trainable_variables
    weights = [each.numpy() for each in variables]
