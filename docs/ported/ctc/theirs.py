"""Reading captchas with CTC: the loss is a layer at the end of the network."""

import keras
import tensorflow as tf
from keras import layers, ops
from ocr import images, labels, make_reader


class CTC(layers.Layer):
    def call(self, labels, scores):
        n = ops.shape(labels)[0]
        loss = tf.nn.ctc_loss(
            labels,
            ops.transpose(scores, (1, 0, 2)),
            label_length=tf.fill([n], 3),
            logit_length=tf.fill([n], 12),
            blank_index=0,
        )
        self.add_loss(ops.mean(loss))
        return scores


keras.utils.set_random_seed(0)
reader = make_reader()
answers = keras.Input((3,), dtype="int32", name="label")
outputs = CTC()(answers, reader.outputs[0])
model = keras.Model([*reader.inputs, answers], outputs)
model.compile(optimizer=keras.optimizers.Adam())
model.fit(
    {"image": images, "label": labels},
    batch_size=16,
    epochs=2,
    shuffle=False,
    verbose=0,
)
weights = model.get_weights()
