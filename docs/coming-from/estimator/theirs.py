"""Digits with an Estimator. Does not run on a current TensorFlow."""

import tensorflow as tf  # at most 2.15
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target


def model_fn(features, labels, mode, params):
    hidden = tf.compat.v1.layers.dense(
        features, params["hidden"], activation=tf.nn.relu
    )
    logits = tf.compat.v1.layers.dense(hidden, 10)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=logits)
    loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:
        accuracy = tf.compat.v1.metrics.accuracy(
            labels, tf.argmax(logits, axis=-1)
        )
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
        )
    optimizer = tf.compat.v1.train.MomentumOptimizer(
        params["learning_rate"], momentum=0.9
    )
    step = tf.compat.v1.train.get_global_step()
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=optimizer.minimize(loss, step)
    )


def train_input_fn():
    train = images[:1600], labels[:1600]
    return tf.data.Dataset.from_tensor_slices(train).repeat().batch(64)


def eval_input_fn():
    test = images[1600:], labels[1600:]
    return tf.data.Dataset.from_tensor_slices(test).batch(64)


estimator = tf.estimator.Estimator(
    model_fn,
    model_dir="runs/digits",
    config=tf.estimator.RunConfig(
        tf_random_seed=0, save_checkpoints_steps=25, keep_checkpoint_max=3
    ),
    params={"hidden": 64, "learning_rate": 0.1},
)
tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(train_input_fn, max_steps=75),
    tf.estimator.EvalSpec(eval_input_fn, steps=None),
)
