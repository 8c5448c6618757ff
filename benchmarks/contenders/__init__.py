"""The contenders: who trains a workload, in which environment, and how each is started."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way of training.

    Attributes:
        module: the module of this package that has it: `serve(workload, port, **options)`.
        options: what `serve` is given beside; and `threads`: TensorFlow's, for operations and for each of them.
        peer: the environment that it needs (see `environments.PEERS`); "" for ours.
        processes: how many make up one training.
    """

    module: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    peer: str = ""
    processes: int = 1


CONTENDERS = {
    "ours": Contender("ours"),
    "ours, callbacks off": Contender("ours", {"callbacks": "off"}),
    "ours, XLA": Contender("ours", {"compile": "xla"}),
    "ours, one thread": Contender("ours", {"threads": 1}),
    "Keras fit": Contender("keras_fit", {"executions": [1]}),
    "Keras fit, best steps_per_execution": Contender("keras_fit", {"executions": [10, 50, 200]}),
    "Keras fit, best steps_per_execution, XLA": Contender(
        "keras_fit", {"executions": [10, 50, 200], "jit_compile": True}
    ),
    "by hand, a call a step": Contender("by_hand", {"ways": ["step"]}),
    "by hand, in graph": Contender("by_hand", {"ways": ["arrays 50", "arrays 500", "dataset 50", "dataset 500"]}),
    "by hand, in graph, arrays": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"]}),
    "by hand, in graph, checked": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"], "checked": True}),
    "by hand, in graph, rows looked up": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"], "rows": True}),
    "by hand, in graph, one thread": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"], "threads": 1}),
    "by hand, in graph, rows looked up, one thread": Contender(
        "by_hand", {"ways": ["arrays 50", "arrays 500"], "rows": True, "threads": 1}
    ),
    "by hand, XLA scan": Contender("by_hand", {"ways": ["scan 50"]}),
    "Orbit, 50 steps": Contender("orbit_loop", {"calls": [50]}, "orbit"),
    "Orbit, best steps": Contender("orbit_loop", {"calls": [10, 200, 1000]}, "orbit"),
    "PyTorch": Contender("torch_loop", {}, "torch"),
    "PyTorch, compiled": Contender("torch_loop", {"compiled": True}, "torch"),
    "Lightning": Contender("lightning_loop", {}, "torch"),
    "Lightning, all off": Contender("lightning_loop", {"lean": True}, "torch"),
    "JAX, a call a step": Contender("jax_loop", {"scan": 1}, "jax"),
    "JAX, scan": Contender("jax_loop", {"scan": 50}, "jax"),
    "ours, two Horovod processes": Contender("ours", {"backend": "horovod"}, processes=2),
    "Horovod's example, two processes": Contender("horovod_example", processes=2),
    # For the measurements of ours alone
    "ours, MLflow off": Contender("ours", {"callbacks": "no mlflow"}),
    "ours, 1 callback each 50 steps": Contender("ours", {"more": 1, "every": 50}),
    "ours, 10 callbacks each 50 steps": Contender("ours", {"more": 10, "every": 50}),
    "ours, 1 callback each step": Contender("ours", {"more": 1, "every": 1}),
    "ours, 10 callbacks each step": Contender("ours", {"more": 10, "every": 1}),
    "ours, 10 metrics": Contender("ours", {"metrics": 10}),
    "ours, 100 metrics": Contender("ours", {"metrics": 100}),
    "by hand, in graph, 10 metrics": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"], "metrics": 10}),
    "by hand, in graph, 100 metrics": Contender("by_hand", {"ways": ["arrays 50", "arrays 500"], "metrics": 100}),
}
"""All of them, by the names under which they are reported."""
