"""A Wasserstein GAN with gradient penalty, in a `train_step` of its own."""

import keras
import tensorflow as tf
from wgan import NOISE, images, make_critic, make_generator, make_optimizer


class WGAN(keras.Model):
    def __init__(self, critic, generator):
        super().__init__()
        self.critic = critic
        self.generator = generator
        self.seeds = keras.random.SeedGenerator(7)

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def noise(self, *shape):
        return keras.random.normal(shape, seed=self.seeds)

    def penalty(self, n, real, fake):
        alpha = self.noise(n, 1, 1, 1)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tape.gradient(scores, between)
        norm = tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1) ** 2)

    def train_step(self, real):
        n = tf.shape(real)[0]
        for _ in range(3):
            latent = self.noise(n, NOISE)
            with tf.GradientTape() as tape:
                fake = self.generator(latent, training=True)
                on_fake = self.critic(fake, training=True)
                on_real = self.critic(real, training=True)
                cost = tf.reduce_mean(on_fake) - tf.reduce_mean(on_real)
                cost += 10 * self.penalty(n, real, fake)
            variables = self.critic.trainable_variables
            gradients = tape.gradient(cost, variables)
            self.critic_optimizer.apply_gradients(zip(gradients, variables))
        latent = self.noise(n, NOISE)
        with tf.GradientTape() as tape:
            fake = self.generator(latent, training=True)
            scores = self.critic(fake, training=True)
            loss = -tf.reduce_mean(scores)
        variables = self.generator.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables))
        return {"critic": cost, "generator": loss}


keras.utils.set_random_seed(0)
model = WGAN(make_critic(), make_generator())
model.compile(make_optimizer(), make_optimizer())
model.fit(images, batch_size=64, epochs=2, shuffle=False, verbose=0)
weights = model.critic.get_weights() + model.generator.get_weights()
