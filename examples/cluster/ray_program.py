"""A Ray program that calls `fit`: three learning rates at once, each in a task of Ray: `ray_program.py [HOST:PORT]`.

Without an address, Ray starts a cluster on this machine. To train one model on several nodes, or to have trials go on
when a node dies, let tfloop start the workers: `tfloop train --launcher ray`, `tfloop sweep --launcher ray`.
"""

import sys

import ray


@ray.remote(num_cpus=1)
def trained(learning_rate: float) -> float:
    """The accuracy after three epochs. TensorFlow is imported where it trains, and nowhere else."""
    import callbacks
    from examples.digits import Digits
    from loop import fit

    chosen = callbacks.standard(mlflow=None, progress=None)  # `mlflow=None`: or each run needs a store that all reach
    result = fit(Digits(learning_rate=learning_rate), epochs=3, seed=1, callbacks=chosen)
    return result.metrics["eval_accuracy"]


def main() -> None:
    ray.init(sys.argv[1] if len(sys.argv) > 1 else None)
    rates = [1e-3, 1e-2, 1e-1]
    accuracies = ray.get([trained.remote(rate) for rate in rates])
    for rate, accuracy in zip(rates, accuracies, strict=True):
        print(f"learning rate {rate:g}: accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
