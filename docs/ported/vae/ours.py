"""A variational autoencoder as a task: the values of each example."""

import keras
from keras import ops
from vae import images, make_decoder, make_encoder

from loop import ArrayData, TrainTask, fit


class VAE(TrainTask):
    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def build_model(self):
        encoder = make_encoder()
        decoder = make_decoder()
        latent = encoder.outputs[2]
        outputs = [*encoder.outputs[:2], decoder(latent)]
        return keras.Model(encoder.inputs, outputs)

    def build_optimizer(self):
        return keras.optimizers.Adam()

    def train_data(self):
        return ArrayData(images)

    def compute(self, model, images, training):
        mean, log_variance, decoded = model(images, training=training)
        pixels = keras.losses.binary_crossentropy(
            images[..., None], decoded[..., None]
        )
        divergence = -0.5 * (
            1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        )
        reconstruction = ops.sum(pixels, axis=-1)
        divergence = ops.sum(divergence, axis=-1)
        return {
            "loss": reconstruction + divergence,
            "reconstruction": reconstruction,
            "divergence": divergence,
        }


if __name__ == "__main__":
    result = fit(VAE(), seed=0)
    weights = result.model.get_weights()
