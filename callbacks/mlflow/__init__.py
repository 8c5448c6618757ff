"""MLflow: the callback that follows a run, the delivery of its journal, and the logged model.

- `tracker.MLflowTracker` is the callback; `courier_process` has `courier`, which delivers while the run trains.
- `delivery.Delivery` sends a journal to a store; the courier and `tfloop sync` use it.
- `mlflow_run.MLflowRun` finds or creates the MLflow run of a run directory, and describes it.
- `logged_model.write` makes the model that MLflow loads, with `tfloop_loader` in it.
"""
