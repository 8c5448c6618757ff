"""The compiled model of a rare class as a task."""

from fraud import class_weight, features, fraud, make_model

from loop import KerasTask, fit


class Fraud(KerasTask):
    defaults = {"batch_size": 256, "epochs": 2, "shuffle": False}

    def __init__(self):
        super().__init__(
            make_model, train=(features, fraud), class_weight=class_weight
        )


if __name__ == "__main__":
    result = fit(Fraud(), seed=0)
    weights = result.model.get_weights()
    found = result.metrics["true_positives"]
