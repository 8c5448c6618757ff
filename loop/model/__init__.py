"""What a model is made of, whatever its family (Keras 3, `tf_keras`, a plain `tf.Module`).

- `variables` lists a model's variables, layers and penalties, and an optimizer's variables. `step`, `run` and the
  commands ask it instead of the model, since each family answers differently.
- `precision.keras_precision` makes layers in the precision of a run; `step.build` and `diagnose` use it.
"""
