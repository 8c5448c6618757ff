"""Reading captchas with CTC: the loss of each example."""

import keras
import tensorflow as tf
from ocr import images, labels, make_reader

from loop import ArrayData, TrainTask, fit


class Captcha(TrainTask):
    defaults = {"batch_size": 16, "epochs": 2, "shuffle": False}

    def build_model(self):
        return make_reader()

    def build_optimizer(self):
        return keras.optimizers.Adam()

    def train_data(self):
        return ArrayData({"image": images, "label": labels})

    def compute(self, model, batch, training):
        scores = model(batch["image"], training=training)
        n = tf.shape(scores)[0]
        loss = tf.nn.ctc_loss(
            tf.cast(batch["label"], tf.int32),
            tf.transpose(scores, (1, 0, 2)),
            label_length=tf.fill([n], 3),
            logit_length=tf.fill([n], 12),
            blank_index=0,
        )
        return {"loss": loss}


if __name__ == "__main__":
    result = fit(Captcha(), seed=0)
    weights = result.model.get_weights()
