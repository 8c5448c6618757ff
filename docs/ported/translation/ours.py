"""The compiled Transformer as a task."""

from words import make_model, source_words, target_words

from loop import KerasTask, fit


class Translation(KerasTask):
    defaults = {"batch_size": 64, "epochs": 2, "shuffle": False}

    def __init__(self):
        inputs = {"source": source_words, "target": target_words[:, :-1]}
        super().__init__(make_model, train=(inputs, target_words[:, 1:]))


if __name__ == "__main__":
    result = fit(Translation(), seed=0)
    weights = result.model.get_weights()
