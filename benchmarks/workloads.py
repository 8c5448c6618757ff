"""The workloads: data, model, optimizer and batch size, which all contenders share.

Importing this needs NumPy alone, so that a peer's environment needs no TensorFlow; models and values do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]
LATENT = 16  # the numbers from which the GAN's generator draws an image
SHOWN = 4  # for how many of its own standard deviations a class shows in an image


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        about: the model and the data, in a few words.
        arrays: makes inputs and labels, float32 or int32; a whole number of batches.
        build: makes the Keras model.
        batch_size: examples in a step.
        optimizer: `adam` or `sgd`.
        learning_rate: its learning rate.
        momentum: of SGD.
        kind: `classes`: logits and a class for each example, or each token; `numbers`: squared errors; `gan`: see
            `contenders.gan`.
        contenders: the names of those that it is trained by; see `contenders.CONTENDERS`.
        check_steps: after how many steps `check` compares the losses.
        metrics: how many values beside the loss `values` returns; the accuracy is the first.
        precision: as the option of `fit`: `float32`, or `mixed_float16` with a loss scale.
    """

    about: str
    arrays: Callable[[], Arrays]
    build: Callable[[], Any]
    batch_size: int = 64
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    kind: str = "classes"
    contenders: tuple[str, ...] = ()
    check_steps: int = 200
    metrics: int = 1
    precision: str = "float32"

    def keras_optimizer(self) -> Any:
        """The optimizer, by Keras; without a loss scale."""
        import keras

        if self.optimizer == "adam":
            return keras.optimizers.Adam(self.learning_rate)
        return keras.optimizers.SGD(self.learning_rate, self.momentum)

    def values(self, labels: Any, outputs: Any) -> dict[str, Any]:
        """Loss and accuracy of each element, as TensorFlow's tensors: what both loops of ours and by hand compute."""
        import keras
        import tensorflow as tf

        outputs = tf.cast(outputs, tf.float32)  # with float16, a loss would lose what the loss scale saves
        if self.kind == "numbers":
            return {"loss": tf.square(outputs - labels)[:, 0]}
        hits = tf.cast(tf.argmax(outputs, -1, tf.int32) == labels, tf.float32)
        more = {f"metric_{number}": hits * number for number in range(1, self.metrics)}
        loss = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
        return {"loss": loss, "accuracy": hits} | more


def images(examples: int, *shape: int) -> Arrays:
    """Random images of ten classes that overlap a little."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, examples).astype("int32")
    size = int(np.prod(shape))
    classes = random.standard_normal((10, size), "float32") * SHOWN / np.sqrt(size)
    pixels = random.standard_normal((examples, size), "float32")
    for number, each in enumerate(classes):  # one after the other: as one expression it would take twice the memory
        pixels[labels == number] += each
    return pixels.reshape(examples, *shape), labels


def numbers(examples: int, width: int) -> Arrays:
    """Inputs, and the sum of each one's numbers."""
    inputs = np.random.default_rng(0).standard_normal((examples, width), "float32")
    return inputs, inputs.sum(-1, keepdims=True) / np.float32(np.sqrt(width))


def words(examples: int, length: int, vocabulary: int) -> Arrays:
    """Words of ten classes: half of each example's are from a few that many examples have."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, examples).astype("int32")
    often = random.random((examples, length)) < 0.5
    drawn = np.where(often, random.integers(0, 20, often.shape), random.integers(0, vocabulary // 10, often.shape))
    return (drawn + labels[:, None] * (vocabulary // 10)).astype("int32"), labels


def sentences(examples: int, length: int, vocabulary: int) -> Arrays:
    """Words as above, of which each example has a random number; zeros behind them."""
    drawn, labels = words(examples, length, vocabulary - 1)
    lengths = np.random.default_rng(1).integers(length // 4, length + 1, (examples, 1))
    return np.where(np.arange(length) < lengths, drawn + 1, 0).astype("int32"), labels


def text() -> Arrays:
    """Windows of Python source, and the same one character on."""
    windows = charlm().windows
    windows = windows[: len(windows) // 32 * 32].astype("int32")
    return windows[:, :-1], windows[:, 1:]


def charlm() -> Any:
    """The shipped example's task."""
    from examples.charlm import CharLM

    return CharLM(characters=500_000)


def mlp() -> Any:
    """784-64-10."""
    from keras import Input, Sequential, layers

    return Sequential([Input((784,)), layers.Dense(64, "relu"), layers.Dense(10)])


def cnn() -> Any:
    """One convolution of 32 filters, pooling, one dense layer."""
    from keras import Input, Sequential, layers

    return Sequential(
        [Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
         layers.Dense(10)]
    )  # fmt: skip


def mlp41m() -> Any:
    """8000-4000-2000-500-300-1 on 8 numbers: 41,229,101 parameters."""
    from keras import Input, Sequential, layers

    widths = (8000, 4000, 2000, 500, 300)
    return Sequential([Input((8,)), *(layers.Dense(width, "relu") for width in widths), layers.Dense(1)])


def embedding() -> Any:
    """A table of 6.4 million weights under a small head: nearly all of a step is the gradient's way."""
    from keras import Input, Sequential, layers

    return Sequential(
        [Input((16,), dtype="int32"), layers.Embedding(100_000, 64), layers.Flatten(), layers.Dense(10)]
    )  # fmt: skip


def lstm() -> Any:
    """An LSTM of 64 units over embedded words."""
    from keras import Input, Sequential, layers

    return Sequential(
        [Input((32,), dtype="int32"), layers.Embedding(1000, 32), layers.LSTM(64), layers.Dense(10)]
    )  # fmt: skip


def masked() -> Any:
    """A block of a Transformer, whose attention and mean leave out the padding of each example."""
    from keras import Input, Model, layers

    inputs = Input((64,), dtype="int32")
    x = layers.Embedding(2000, 64, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, 16)(x, x)]))
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(64)(layers.Dense(128, "relu")(x))]))
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def resnet20() -> Any:
    """ResNet-20 for images of 32x32, He et al. 2015, section 4.2; shortcuts by 1x1 convolutions."""
    from keras import Input, Model, layers

    def convolution(x: Any, filters: int, size: int, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = Input((32, 32, 3))
    x = layers.ReLU()(convolution(inputs, 16, 3))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            y = layers.ReLU()(convolution(x, filters, 3, strides))
            y = convolution(y, filters, 3)
            shortcut = convolution(x, filters, 1, strides) if strides > 1 else x
            x = layers.ReLU()(layers.Add()([shortcut, y]))
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def gan() -> Any:
    """A generator and a discriminator, of two hidden layers of 128 units each."""
    from keras import Input, Model, Sequential, layers

    class GAN(Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = Sequential(
                [Input((LATENT,)), layers.Dense(128, "relu"), layers.Dense(128, "relu"), layers.Dense(784)]
            )
            self.discriminator = Sequential(
                [Input((784,)), layers.Dense(128, "leaky_relu"), layers.Dense(128, "leaky_relu"), layers.Dense(1)]
            )

        def call(self, noise: Any) -> Any:
            return self.generator(noise)

    return GAN()


OURS = ("ours", "ours, callbacks off", "ours, XLA")
KERAS = ("Keras fit", "Keras fit, best steps_per_execution", "Keras fit, best steps_per_execution, XLA")
BY_HAND = ("by hand, a call a step", "by hand, in graph")
ONE_THREAD = ("ours, one thread", "by hand, in graph, one thread")
PEERS = ("Orbit, 50 steps", "Orbit, best steps", "PyTorch", "PyTorch, compiled", "JAX, a call a step", "JAX, scan")

WORKLOADS = {
    "mlp": Workload(
        "784-64-10 on 60,032 images of 28x28, batch 64, Adam", lambda: images(938 * 64, 784), mlp,
        contenders=(
            *OURS, *KERAS, *BY_HAND, *ONE_THREAD, "by hand, XLA scan", *PEERS, "Lightning", "Lightning, all off"
        ),
    ),
    "cnn": Workload(
        "32 filters 3x3, pooling, dense, on 16,000 images of 28x28, batch 64, Adam",
        lambda: images(250 * 64, 28, 28, 1), cnn,
        contenders=(*OURS, *KERAS[:2], *BY_HAND, "Orbit, best steps", "PyTorch", "JAX, scan"), check_steps=100,
    ),
    "charlm": Workload(
        "the Transformer of examples/charlm.py on Python source, batch 32, Adam", text,
        lambda: charlm().build_model(), batch_size=32,
        contenders=(*OURS, *KERAS[:2], *BY_HAND), check_steps=40,
    ),
    "resnet20": Workload(
        "ResNet-20 with BatchNorm on 16,000 images of 32x32x3, batch 64, SGD with momentum",
        lambda: images(250 * 64, 32, 32, 3), resnet20,
        optimizer="sgd", learning_rate=0.05, momentum=0.9, contenders=("ours", "ours, XLA", "Keras fit", *BY_HAND),
        check_steps=10,
    ),
    "mlp41m": Workload(
        "8000-4000-2000-500-300-1, 41 million parameters, batch 2048, SGD", lambda: numbers(64 * 2048, 8), mlp41m,
        batch_size=2048, optimizer="sgd", learning_rate=0.01, kind="numbers",
        contenders=("ours", *BY_HAND), check_steps=3,
    ),
    "embedding": Workload(
        "a table of 100,000 x 64 under a dense layer, 16 words an example, batch 64, SGD",
        lambda: words(1000 * 64, 16, 100_000), embedding, optimizer="sgd", learning_rate=1.0,
        contenders=(
            *OURS, "ours, one thread", "Keras fit, best steps_per_execution", *BY_HAND,
            "by hand, in graph, rows looked up", "by hand, in graph, rows looked up, one thread", "PyTorch"
        ),
        check_steps=100,
    ),
    "lstm": Workload(
        "an LSTM of 64 units over 32 words, batch 64, Adam", lambda: words(250 * 64, 32, 1000), lstm,
        contenders=("ours", *KERAS[:2], *BY_HAND), check_steps=100,
    ),
    "masked": Workload(
        "a Transformer's block on up to 64 words with masks, batch 32, Adam",
        lambda: sentences(250 * 32, 64, 2000), masked, batch_size=32,
        contenders=("ours", *KERAS[:2], *BY_HAND), check_steps=100,
    ),
    "float16": Workload(
        "784-64-10 in mixed_float16 with a loss scale, batch 64, Adam", lambda: images(938 * 64, 784), mlp,
        contenders=("ours", *BY_HAND), precision="mixed_float16",
    ),
    "gan": Workload(
        "a GAN of two optimizers, three dense layers each, on images of 28x28, batch 64, Adam",
        lambda: images(250 * 64, 784), gan, kind="gan", check_steps=12,
        contenders=("ours", *BY_HAND, "by hand, in graph, checked"),
    ),
    "horovod": Workload(
        "784-64-10 on 60,032 images, global batch 64 over two processes (ours with a share of the cores each), Adam",
        lambda: images(938 * 64, 784), mlp,
        contenders=("ours, two Horovod processes", "Horovod's example, two processes"),
    ),
}  # fmt: skip
