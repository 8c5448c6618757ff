"""MLflow: the tracker of a run, the delivery of its journal, and the logged model."""
