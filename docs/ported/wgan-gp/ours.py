"""A Wasserstein GAN: three steps of the critic, one of the generator."""

import keras
import tensorflow as tf
from wgan import NOISE, images, make_critic, make_generator, make_optimizer

from loop import ArrayData, TrainTask, fit


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = make_critic()
        self.generator = make_generator()
        self.seeds = keras.random.SeedGenerator(7)

    def noise(self, *shape):
        return keras.random.normal(shape, seed=self.seeds)


class WGAN(TrainTask):
    defaults = {"batch_size": 64, "epochs": 2, "shuffle": False}

    def build_model(self):
        return Pair()

    def build_optimizer(self):
        return {"critic": make_optimizer(), "generator": make_optimizer()}

    def train_data(self):
        return ArrayData(images)

    def criticise(self, model, real):
        n = tf.shape(real)[0]
        latent = model.noise(n, NOISE)
        fake = model.generator(latent, training=True)
        on_fake = model.critic(fake, training=True)
        on_real = model.critic(real, training=True)
        cost = on_fake[:, 0] - on_real[:, 0]
        alpha = model.noise(n, 1, 1, 1)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = model.critic(between, training=True)
        slopes = tape.gradient(scores, between)
        norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2, 3]))
        return {"loss": cost + 10 * (norm - 1) ** 2}

    def generate(self, model, real):
        latent = model.noise(tf.shape(real)[0], NOISE)
        fake = model.generator(latent, training=True)
        return {"loss": -model.critic(fake, training=True)[:, 0]}

    def train_step(self, model, step):
        for _ in range(3):
            step.minimize(lambda real: self.criticise(model, real), "critic")
        step.minimize(lambda real: self.generate(model, real), "generator")


if __name__ == "__main__":
    result = fit(WGAN(), seed=0)
    model = result.model
    weights = model.critic.get_weights() + model.generator.get_weights()
