"""A variational autoencoder with a `train_step` of its own."""

import keras
import tensorflow as tf
from keras import ops
from vae import images, make_decoder, make_encoder


class VAE(keras.Model):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, images):
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder(images)
            pixels = keras.losses.binary_crossentropy(
                images[..., None], self.decoder(latent)[..., None]
            )
            reconstruction = ops.mean(ops.sum(pixels, axis=-1))
            divergence = -0.5 * (
                1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            )
            loss = reconstruction + ops.mean(ops.sum(divergence, axis=-1))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total.update_state(loss)
        return {"loss": self.total.result()}


keras.utils.set_random_seed(0)
model = VAE(make_encoder(), make_decoder())
model.compile(optimizer=keras.optimizers.Adam())
model.fit(images, epochs=3, batch_size=64, shuffle=False, verbose=0)
weights = model.encoder.get_weights() + model.decoder.get_weights()
