"""Numbers in English and Spanish words: data and network."""

import keras
import numpy as np
from keras import layers, ops

ONES = "one two three four five six seven eight nine ten eleven twelve".split()
ONES += [each + "teen" for each in "thir four fif six seven eigh nine".split()]
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
UNOS = "uno dos tres cuatro cinco seis siete ocho nueve diez once doce".split()
UNOS += "trece catorce quince dieciseis diecisiete dieciocho diecinueve".split()
DIEZ = (
    "veinte treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
)
CIEN = "ciento doscientos trescientos cuatrocientos quinientos".split()
CIEN += "seiscientos setecientos ochocientos novecientos".split()


def english(number):
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds - 1], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    return " ".join([*words, *([ONES[rest - 1]] if rest else [])])


def spanish(number):
    hundreds, rest = divmod(number, 100)
    words = [CIEN[hundreds - 1]] if hundreds else []
    if rest >= 20:
        words.append(DIEZ[rest // 10 - 2])
        rest %= 10
        words += ["y"] if rest else []
    return " ".join([*words, *([UNOS[rest - 1]] if rest else [])])


numbers = np.random.default_rng(0).permutation(np.arange(1, 1000))[:640]
sources = [english(number) for number in numbers]
translations = [f"[start] {spanish(number)} [end]" for number in numbers]
LENGTH, WORDS = 6, 64
read_english = layers.TextVectorization(
    WORDS, output_mode="int", output_sequence_length=LENGTH
)
read_spanish = layers.TextVectorization(
    WORDS,
    standardize=None,
    output_mode="int",
    output_sequence_length=LENGTH + 1,
)
read_english.adapt(sources)
read_spanish.adapt(translations)
source_words = np.asarray(read_english(sources))
target_words = np.asarray(read_spanish(translations))


class Positions(layers.Layer):
    """Embeds words and their positions; masks the padding, which is 0."""

    def __init__(self, size, **more):
        super().__init__(**more)
        self.words = layers.Embedding(WORDS, size)
        self.places = layers.Embedding(LENGTH, size)

    def call(self, words):
        return self.words(words) + self.places(ops.arange(ops.shape(words)[-1]))

    def compute_mask(self, words, mask=None):
        return ops.not_equal(words, 0)


class Encoder(layers.Layer):
    def __init__(self, size, hidden, heads, **more):
        super().__init__(**more)
        self.attention = layers.MultiHeadAttention(heads, size)
        self.project = keras.Sequential(
            [layers.Dense(hidden, "relu"), layers.Dense(size)]
        )
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.supports_masking = True

    def call(self, inputs, mask=None):
        seen = None if mask is None else mask[:, None, :]
        heard = self.attention(inputs, inputs, attention_mask=seen)
        heard = self.norms[0](inputs + heard)
        return self.norms[1](heard + self.project(heard))


class Decoder(layers.Layer):
    def __init__(self, size, hidden, heads, **more):
        super().__init__(**more)
        self.attention = layers.MultiHeadAttention(heads, size)
        self.cross = layers.MultiHeadAttention(heads, size)
        self.project = keras.Sequential(
            [layers.Dense(hidden, "relu"), layers.Dense(size)]
        )
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.supports_masking = True

    def call(self, inputs, encoded, mask=None):
        heard = self.attention(inputs, inputs, use_causal_mask=True)
        heard = self.norms[0](inputs + heard)
        read = self.cross(heard, encoded)
        read = self.norms[1](heard + read)
        return self.norms[2](read + self.project(read))


def make_model(size=16, hidden=32, heads=2):
    source = keras.Input((None,), dtype="int64", name="source")
    target = keras.Input((None,), dtype="int64", name="target")
    encoded = Encoder(size, hidden, heads)(Positions(size)(source))
    decoded = Decoder(size, hidden, heads)(Positions(size)(target), encoded)
    decoded = layers.Dropout(0.5)(decoded)
    outputs = layers.Dense(WORDS, "softmax")(decoded)
    model = keras.Model([source, target], outputs)
    model.compile(
        "rmsprop",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
