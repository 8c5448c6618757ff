"""The compiled model of several inputs and outputs as a task."""

from tickets import inputs, make_model, targets

from loop import KerasTask, fit


class Tickets(KerasTask):
    defaults = {"batch_size": 32, "epochs": 2, "shuffle": False}

    def __init__(self):
        super().__init__(make_model, train=(inputs, targets))


if __name__ == "__main__":
    result = fit(Tickets(), seed=0)
    weights = result.model.get_weights()
