"""A callback of one's own, with state: a model learns the names of Python's functions, and invents some on the way.

`tfloop train custom_callback` reaches 1.88 nats per character on names that it hasn't seen, after 1,000 steps (seed 0,
4 s); knowing only how frequent each character is costs 3.00. `names.txt` in the run directory then has

    step 200, loss 2.59: male_sing_lracke __sepnomolifial_line best_rears hore_tor __in_y_ge_text
    step 1000, loss 1.76: do_counter _cmd_gatexot enoptiof getder __encmstencode

and the lines between them.
"""

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from callbacks import Callback
from loop import ArrayData, TrainTask, fit

ALPHABET = "\n_abcdefghijklmnopqrstuvwxyz0123456789"


class Invents(Callback):
    """Every so many steps, lets the model invent names, and keeps them in `names.txt` in the run directory."""

    runs_on = "chief"  # as is the default: other ranks don't even make it
    key = "invents"  # the name of its state in a checkpoint

    def __init__(self, every, names=5):
        self.every, self.names = every, names  # the loop ends its compiled calls where `every` says
        self.invented = []

    def on_setup(self, run):
        self.invented = []  # one object may serve several runs

    def on_steps_end(self, run, metrics):
        step = run.progress.step
        random = np.random.default_rng([run.options["seed"], step])  # nothing to remember, and the same after a resume
        names = [invented_name(run.model, run.task.context, random) for _ in range(self.names)]
        self.invented.append(f"step {step}, loss {metrics['loss']:.2f}: {' '.join(names)}")
        # Written whole, from the state: a run that was killed and goes on from a checkpoint has each line once.
        target = run.directory / "names.txt"
        partial = target.with_suffix(".tmp")
        partial.write_text("\n".join([*self.invented, ""]))
        partial.replace(target)

    def state_dict(self):
        return {"invented": self.invented}

    def load_state_dict(self, state):
        self.invented = state["invented"]


@dataclass
class Names(TrainTask):
    """From some characters of a name to the next; the loss is in nats per character."""

    context: int = 6
    width: int = 64
    learning_rate: float = 5e-3
    every: int = 200

    defaults = {"batch_size": 256, "steps": 1000}

    def build_callbacks(self):
        return [Invents(self.every)]  # or fit(Names(), callbacks=[Invents(200)])

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((self.context,), dtype="int32"),
                keras.layers.Embedding(len(ALPHABET), 16),
                keras.layers.Flatten(),
                keras.layers.Dense(2 * self.width, activation="relu"),
                keras.layers.Dense(self.width, activation="relu"),
                keras.layers.Dense(len(ALPHABET)),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        return ArrayData(windows([name for place, name in enumerate(names()) if place % 10], self.context))

    def eval_data(self):
        return ArrayData(windows(names()[::10], self.context))

    def compute(self, model, batch, training):
        codes = tf.cast(batch, tf.int32)
        logits = model(codes[:, :-1], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(codes[:, -1], logits, from_logits=True)}


def names():
    """The names of all functions in the standard library's modules, each once, in order."""
    paths = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    return sorted({name for path in paths for name in re.findall(r"def ([a-z_0-9]+)\(", path.read_text("utf-8"))})


def windows(names, context):
    """For each character of each name, and for its end: what stands before it, and itself."""
    texts = ["\n" * context + name + "\n" for name in names]
    return np.uint8(
        [[ALPHABET.index(c) for c in t[i : i + context + 1]] for t in texts for i in range(len(t) - context)]
    )


def invented_name(model, context, random):
    """A name, character by character, each drawn as the model thinks likely."""
    name = ""
    while len(name) < 30 and not name.endswith("\n"):
        codes = [[ALPHABET.index(c) for c in ("\n" * context + name)[-context:]]]
        logits = np.array(model(tf.constant(codes)), "float64")[0]
        name += ALPHABET[random.choice(len(ALPHABET), p=np.exp(logits) / np.exp(logits).sum())]
    return name.strip()


if __name__ == "__main__":
    result = fit(Names())
    print((result.run_dir / "names.txt").read_text(), result.metrics)
