"""Knowledge distillation as one run of two phases."""

import keras
from keras import ops
from pupils import images, labels, make_network

from loop import ArrayData, Phase, TrainTask, fit

ALPHA, TEMPERATURE = 0.1, 10


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.teacher = make_network("teacher", 16)
        self.student = make_network("student", 4)


class Distillation(TrainTask):
    defaults = {"batch_size": 64, "shuffle": False}

    def phases(self):
        return [Phase("teacher", epochs=2), Phase("student", epochs=1)]

    def begin_phase(self, model, phase):
        model.teacher.trainable = phase.name == "teacher"
        model.student.trainable = phase.name == "student"

    def build_model(self):
        return Pair()

    def build_optimizer(self):
        return keras.optimizers.Adam()

    def train_data(self):
        return ArrayData(images, labels)

    def compute(self, model, batch, training):
        images, labels = batch
        if self.phase.name == "teacher":
            logits = model.teacher(images, training=training)
            return {"loss": self.own_loss(labels, logits)}
        told = model.teacher(images, training=False)
        logits = model.student(images, training=training)
        distilled = keras.losses.kl_divergence(
            ops.softmax(told / TEMPERATURE), ops.softmax(logits / TEMPERATURE)
        )
        own = self.own_loss(labels, logits)
        distilled = distilled * TEMPERATURE**2
        return {"loss": ALPHA * own + (1 - ALPHA) * distilled, "own": own}

    def own_loss(self, labels, logits):
        return keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )


if __name__ == "__main__":
    result = fit(Distillation(), seed=0)
    model = result.model
    weights = model.teacher.get_weights() + model.student.get_weights()
