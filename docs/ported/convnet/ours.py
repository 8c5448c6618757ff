"""A convolutional network, compiled for Keras, as a task."""

from convnet import images, labels, make_model

from loop import KerasTask, fit


class ConvNet(KerasTask):
    defaults = {"batch_size": 128, "epochs": 2, "shuffle": False}

    def __init__(self):
        super().__init__(
            make_model,
            train=(images[:1000], labels[:1000]),
            eval=(images[1000:], labels[1000:]),
        )


if __name__ == "__main__":
    result = fit(ConvNet(), seed=0)
    weights = result.model.get_weights()
    accuracy = result.metrics["eval_accuracy"]
