"""Writes down the compiled graphs of training and evaluation, so that a refactoring can be shown to keep them.

`python -m tests.campaigns.graphs record FILE.json.gz [BACKEND...]` trains a few steps of each case on each backend, and
writes every function that TensorFlow traces meanwhile. `python -m tests.campaigns.graphs compare OLD NEW` prints for
each backend and case "the same" or the first differences; the exit code is 1 if there are any. All backends take about
nine minutes on two busy cores.

It wraps TensorFlow's tracing, and names nothing inside `loop`: only `fit`, `TrainTask`, `ArrayData`, `UsageError`,
`callbacks` and `backends.create`. What varies from run to run, or with the names of Python functions, is left out:
operations are known by their position, functions by a hash of their content, other names by the order in which they
come. Each case is recorded for each process that calls `fit`, as a list of functions in the order in which they were
traced.
"""

import argparse
import collections
import contextlib
import difflib
import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IN_PROCESS = ("single", "mirrored", "central")
"""Backends of one process: one after the other in the same one, since to load TensorFlow takes long."""
BACKENDS = (*IN_PROCESS, "horovod", "multiworker", "parameter_server")
REPLICAS = 2
SECONDS = 600
"""So long the processes of one job may take."""
SHOWN = 6
"""So many operations of one kind of difference are shown."""

CASES = {
    "arrays": ({}, {}),
    "stream": ({"stream": True}, {}),
    "accumulate": ({}, {"accumulate": 2}),
    "local_steps": ({"batch_norm": True}, {"local_steps": 2}),
    "xla": ({}, {"compile": "xla"}),
    "two_optimizers": ({"two_optimizers": True}, {}),
    "batch_norm": ({"batch_norm": True}, {}),
    "dropout": ({"dropout": 0.3}, {}),
    "cnn": ({"pictures": True, "optimizer": "adam"}, {}),
    "mixed_float16": ({}, {"precision": "mixed_float16"}),
    "all_options": (
        {"batch_norm": True, "dropout": 0.3, "weights": True, "penalty": True, "optimizer": "adamw"},
        {
            "accumulate": 2,
            "clip_norm": 0.5,
            "compression": "fp16",
            "ema": 0.9,
            "groups": 2,
            "on_nonfinite": "skip",
        },
    ),
}
"""Fields of the task, and options of `fit`."""
OPTIONS = {"batch_size": 8, "epochs": 1, "seed": 3, "steps_per_call": 2, "eval_every": "epoch"}

IGNORED = {
    "_gradient_op_type",
    "_user_specified_name",
    "_original_func_name",
    "_forward_func_name",
    "_backward_func_name",
    "forward_function_name",
    "backward_function_name",
    "resource_arg_unique_id",
}
"""Attributes that vary from run to run, or with the names of Python functions."""
NAMES = {"container", "shared_name", "tensor_name", "token", "stack_name", "tensor_array_name"}
"""Attributes that are names: each is replaced by its place among the names of its graph."""


class Recorder:
    """Keeps the functions that TensorFlow traces while it traces no other.

    Attributes:
        functions: all functions that were found, also those that others call, by the hash of their content.
    """

    def __init__(self):
        self.functions = {}
        self._graphs = []
        self._captured = []

    def install(self):
        """Wraps the function in which TensorFlow traces."""
        from tensorflow.python.eager.polymorphic_function import tracing_compilation
        from tensorflow.python.framework import ops

        trace = tracing_compilation._create_concrete_function

        def trace_and_record(function_type, type_context, func_graph, tracing_options):
            is_outermost = not ops.inside_function()
            concrete = trace(function_type, type_context, func_graph, tracing_options)
            if is_outermost:
                self._record(concrete)
            return concrete

        tracing_compilation._create_concrete_function = trace_and_record

    def take(self):
        """The functions that were traced since the last call, each with its name, size and hash."""
        graphs, self._graphs, self._captured = self._graphs, [], []
        return graphs

    def _record(self, concrete):
        definition = concrete.function_def
        library = {each.signature.name: each for each in concrete.graph.as_graph_def().library.function}
        normalizer = Normalizer(library, self.functions)
        captured = {}
        for external, internal in concrete.graph.captures:
            captured[internal.name.partition(":")[0]] = self._describe_capture(external)
        places = [captured.get(tensor.name.partition(":")[0], "") for tensor in concrete.graph.inputs]
        digest = normalizer.add(definition, places)
        name = re.sub(r"^__(inference|forward|backward)_|_\d+$", "", definition.signature.name)
        self._graphs.append({"name": name, "ops": normalizer.count(digest), "hash": digest})

    def _describe_capture(self, external):
        """Which of the case's captured tensors it is, and its value where it is a constant number."""
        known = [place for place, tensor in enumerate(self._captured) if tensor is external]
        if not known:
            known = [len(self._captured)]
            self._captured.append(external)  # kept, so that no other object gets its address
        text = f"captured {known[0]}"
        dtype = external.dtype
        if hasattr(external, "numpy") and (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            text += f" {short_hash(external.numpy().tobytes())}"
        return text


class Normalizer:
    """Turns functions of a graph into lists of text without names.

    Args:
        library: the functions that may be called, by name.
        functions: gets what is made of each function, by the hash of its content.
    """

    def __init__(self, library, functions):
        self._library = library
        self._functions = functions
        self._hashes = {}
        self._names = {}

    def add(self, function, captures=()):
        """The hash of a function: it, and all that it calls, are put into `functions`.

        Args:
            function: its FunctionDef.
            captures: for each of its arguments, what is captured; "" where it is handed in.
        """
        signature = function.signature
        positions = {}
        arguments = []
        for place, argument in enumerate(signature.input_arg):
            positions[argument.name] = f"arg{place}"
            shapes = self._attributes(function.arg_attr[place].attr) if place in function.arg_attr else ""
            captured = captures[place] if place < len(captures) else ""
            arguments.append(f"{type_name(argument.type)} {shapes} {captured}".strip())
        for place, node in enumerate(function.node_def):
            positions[node.name] = str(place)
        keys = self._keys_of_collectives(function)
        made = {
            "attributes": self._attributes(function.attr),
            "arguments": arguments,
            "ops": [self._operation(node, positions, keys) for node in function.node_def],
            "returns": [
                f"{type_name(each.type)} {edge(function.ret[each.name], positions)}" for each in signature.output_arg
            ],
            "control_returns": sorted(positions[name] for name in function.control_ret.values()),
        }
        digest = short_hash(json.dumps(made, sort_keys=True).encode())
        self._functions[digest] = made
        return digest

    def count(self, digest, seen=None):
        """The number of operations in a function and in those that it calls, each function counted once."""
        seen = set() if seen is None else seen
        if digest in seen:
            return 0
        seen.add(digest)
        ops = self._functions[digest]["ops"]
        called = [each for op in ops for each in called_functions(op[1])]
        return len(ops) + sum(self.count(each, seen) for each in called)

    def _operation(self, node, positions, keys):
        """An operation as [type, attributes, device, inputs]; control inputs come last, in the order of positions."""
        data = [edge(name, positions) for name in node.input if not name.startswith("^")]
        control = [positions[name[1:]] for name in node.input if name.startswith("^")]
        control = [f"^{place}" for place in sorted(control, key=order_of_positions)]
        if node.name in keys:
            attributes = f"{type_name(node.attr['dtype'].type)} key {keys[node.name]}"
        else:
            attributes = self._attributes(node.attr, positions)
        return [self._function(node.op) or node.op, attributes, node.device, " ".join(data + control)]

    def _keys_of_collectives(self, function):
        """TensorFlow counts its collectives over the whole process: constants that are such numbers, renumbered."""
        constants = {node.name: node for node in function.node_def if node.op == "Const"}
        found = {}
        for node in function.node_def:
            if not node.op.startswith("Collective"):
                continue
            for name in node.input:
                constant = constants.get(name.partition(":")[0])
                if constant is not None and re.search(r"(group|instance)_key|CollectiveKey", constant.name):
                    value = constant.attr["value"].tensor.SerializeToString()
                    found[constant.name] = self._number("collective", value)
        return found

    def _attributes(self, attributes, positions=None):
        """Attributes in the order of their names, without those that vary."""
        parts = []
        for name in sorted(attributes):
            if name in IGNORED:
                continue
            value = attributes[name]
            if name in NAMES:
                text = f"name{self._number(name, value.s)}" if value.s else "''"
            elif name == "_class":
                names = [each.decode().removeprefix("loc:@") for each in value.list.s]
                text = str([(positions or {}).get(each, "?") for each in names])
            else:
                text = self._value(value)
            parts.append(f"{name}={text}")
        return "; ".join(parts)

    def _value(self, value):
        """The text of an attribute's value."""
        kind = value.WhichOneof("value")
        if kind == "list":
            field = next((field for field, _ in value.list.ListFields()), None)
            items = [] if field is None else getattr(value.list, field.name)
            one = {} if field is None else {"s": self._text, "type": type_name, "shape": shape, "func": self._call}
            return "[" + ", ".join(one.get(field.name, str)(each) for each in items) + "]"
        if kind == "s":
            return self._text(value.s)
        if kind == "type":
            return type_name(value.type)
        if kind == "shape":
            return shape(value.shape)
        if kind == "func":
            return self._call(value.func)
        if kind == "tensor":
            return constant(value.tensor)
        return "" if kind is None else str(getattr(value, kind))

    def _text(self, raw):
        """A string; a hash where it is long or no text, and of a function's name the function."""
        with contextlib.suppress(UnicodeDecodeError):
            text = raw.decode()
            function = self._function(text)
            if function:
                return function
            if len(text) < 100 and text.isprintable():
                return repr(text)
        return f"bytes {short_hash(raw)}"

    def _call(self, function):
        return f"{self._function(function.name) or function.name}({self._attributes(function.attr)})"

    def _function(self, name):
        """The hash of a function of the library, by which it is called in the record; "" where there is none."""
        if name not in self._library:
            return ""
        if name not in self._hashes:
            self._hashes[name] = "recursive"
            self._hashes[name] = f"fn:{self.add(self._library[name])}"
        return self._hashes[name]

    def _number(self, kind, name):
        """The place of a name among all names of its kind in this graph, in the order in which they come."""
        known = self._names.setdefault(kind, {})
        return known.setdefault(name, len(known))


def called_functions(attributes):
    """The hashes of the functions that an operation's attributes name."""
    return re.findall(r"fn:([0-9a-f]+)", attributes)


def edge(name, positions):
    """An input as `position:output:index`."""
    node, colon, output = name.partition(":")
    return positions[node] + colon + output


def order_of_positions(place):
    """Arguments first, then operations, both by number."""
    return not place.startswith("arg"), int(place.removeprefix("arg"))


def type_name(number):
    """The name of a data type."""
    import tensorflow as tf

    return tf.dtypes.as_dtype(number).name if number else "none"


def shape(message):
    """The text of a TensorShapeProto."""
    return "?" if message.unknown_rank else str([each.size for each in message.dim])


def constant(message):
    """A constant's type, shape and value, or the hash of its value. Names of tensors in texts are left out."""
    import tensorflow as tf

    value = tf.make_ndarray(message)
    prefix = f"{type_name(message.dtype)}{list(value.shape)}"
    if value.dtype == object:
        texts = [re.sub(rb"[\w./-]+:\d+", b"TENSOR", each) for each in value.ravel()]
        return f"{prefix} {short_hash(repr(texts).encode())}"
    if value.size <= 4:
        return f"{prefix} {value.tolist()}"
    return f"{prefix} {short_hash(value.tobytes())}"


def short_hash(raw):
    """The first 16 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(raw).hexdigest()[:16]


def task_class():
    """The task, as a class: a worker loads TensorFlow only after it knows its place."""
    import keras
    import numpy as np
    import tensorflow as tf

    from loop import ArrayData, TrainTask

    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "adamw": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 30), weight_decay=0.02),
    }

    @dataclass
    class Small(TrainTask):
        """A small network with the features of a case."""

        optimizer: str = "sgd"
        stream: bool = False
        weights: bool = False
        penalty: bool = False
        pictures: bool = False
        batch_norm: bool = False
        dropout: float = 0.0

        def build_model(self):
            inputs = keras.Input((8, 8, 1) if self.pictures else (5,))
            x = inputs
            if self.pictures:
                x = keras.layers.Conv2D(3, 3, activation="relu")(x)
                x = keras.layers.MaxPooling2D()(x)
                x = keras.layers.Flatten()(x)
            regularizer = keras.regularizers.L2(1e-2) if self.penalty else None
            x = keras.layers.Dense(4, "tanh", kernel_regularizer=regularizer)(x)
            if self.batch_norm:
                x = keras.layers.BatchNormalization(momentum=0.8)(x)
            if self.dropout:
                x = keras.layers.Dropout(self.dropout)(x)
            return keras.Model(inputs, keras.layers.Dense(1)(x))

        def build_optimizer(self):
            return optimizers[self.optimizer]()

        def _data(self, examples, seed):
            random = np.random.default_rng(seed)
            inputs = random.normal(size=(examples, *((8, 8, 1) if self.pictures else (5,)))).astype("float32")
            labels = np.tanh(inputs.reshape(examples, -1).sum(-1)).astype("float32")
            weights = random.integers(0, 4, examples).astype("float32")
            arrays = (inputs, labels, weights)
            return tf.data.Dataset.from_tensor_slices(arrays) if self.stream else ArrayData(*arrays)

        def train_data(self):
            return self._data(21, 0)

        def eval_data(self):
            return self._data(11, 1)

        def compute(self, model, batch, training):
            inputs, labels, weights = batch
            outputs = model(inputs, training=training)[..., 0]
            values = {"loss": (outputs - tf.cast(labels, outputs.dtype)) ** 2, "size": tf.abs(outputs)}
            if self.weights:
                values["weight"] = tf.cast(weights, outputs.dtype)
            return values

    @dataclass
    class Adversarial(Small):
        """Two networks, each with an optimizer and a loss of its own, as in a GAN."""

        two_optimizers: bool = True

        def build_model(self):
            class Pair(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.maker = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5, "tanh")])
                    self.judge = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

                def call(self, inputs, training=False):
                    return self.judge(self.maker(inputs))

            return Pair()

        def build_optimizer(self):
            return {"judge": keras.optimizers.Adam(0.01), "maker": keras.optimizers.SGD(0.01)}

        def train_step(self, model, step):
            def judged(batch):
                real, made = model.judge(batch[0])[:, 0], model.judge(model.maker(batch[0]))[:, 0]
                return {"loss": tf.nn.softplus(-real) + tf.nn.softplus(made)}

            step.minimize(judged, "judge")
            step.minimize(lambda batch: {"loss": tf.nn.softplus(-model(batch[0])[:, 0])}, "maker")

    return lambda two_optimizers=False, **fields: (Adversarial if two_optimizers else Small)(**fields)


def work(backends, directory):
    """Trains all cases on these backends, in this process, and writes what was traced into the directory."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from loop.backends import create

    if backends[0] in IN_PROCESS:
        devices = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    # Graphs are recorded as they are traced: what is made of them afterwards only takes time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    recorder = Recorder()
    recorder.install()
    make_task = task_class()
    for backend in backends:
        engine = create(backend, REPLICAS if backend in ("mirrored", "central") else None)
        found = {"cases": train_cases(recorder, make_task, engine, directory), "functions": recorder.functions}
        (directory / f"{backend}-{engine.rank}.json").write_text(json.dumps(found))
        engine.exchange(0)  # no process ends before all are done
        engine.close()


def train_cases(recorder, make_task, engine, directory):
    """Trains all cases; gives the graphs of each, and whether it was trained."""
    import keras

    import callbacks
    from loop import UsageError, fit

    cases = {}
    for name, (fields, options) in CASES.items():
        begun = time.monotonic()
        keras.backend.clear_session()
        recorder.take()
        chosen = callbacks.standard(mlflow=None, progress=None, checkpoint=None, report=None)
        run_dir = directory / engine.name / name
        status = "trained"
        try:
            fit(make_task(**fields), backend=engine, run_dir=run_dir, callbacks=chosen, **OPTIONS, **options)
        except UsageError as error:
            status = f"refused: {error}"
        except Exception as error:  # whose text may have lines of source files
            status = f"failed: {type(error).__name__}"
            traceback.print_exc()
        cases[name] = {"status": status, "graphs": recorder.take()}
        print(f"{engine.name} {engine.rank} {name}: {time.monotonic() - begun:.1f} s", flush=True)
    return cases


def free_addresses(count):
    """Addresses on this machine at which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def commands(backends, directory):
    """The commands of a job's processes, each with what it needs in its environment."""
    own = [sys.executable, "-m", "tests.campaigns.graphs", "work", str(directory), *backends]
    backend = backends[0]
    if backend == "horovod":
        return [([str(Path(sys.executable).parent / "horovodrun"), "-np", str(REPLICAS), *own], {})]
    if backend == "multiworker":
        cluster = {"worker": free_addresses(REPLICAS)}
    elif backend == "parameter_server":
        addresses = free_addresses(REPLICAS + 2)
        cluster = {"chief": addresses[:1], "worker": addresses[1:-1], "ps": addresses[-1:]}
    else:
        return [(own, {})]
    serve = [sys.executable, "-P", "-m", "cli", "train", "digits"]  # joins its job as a server, and trains nothing
    found = []
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            calls_fit = backend == "multiworker" or job == "chief"
            found.append((own if calls_fit else serve, {"TF_CONFIG": config}))
    return found


def run(backends, directory):
    """Runs all processes of a job, which is one backend, or some of those in one process.

    Returns:
        For each backend what each of its processes that calls `fit` has recorded.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_STATE_HOME": str(directory)}
    for name in ("TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", "TFLOOP_JOB"):
        environment.pop(name, None)
    deadline = time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((directory / "output.txt").open("w+"))
        started = []
        for command, more in commands(backends, directory):
            process = subprocess.Popen(
                command, env=environment | more, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(end, process)
            started.append(process)
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
        except subprocess.TimeoutExpired:
            codes = [None]
        if any(codes) or None in codes:
            output.seek(0)
            raise SystemExit(f"{', '.join(backends)}: the processes ended with {codes}\n{output.read()[-6000:]}")
    found = {}
    for backend in backends:
        found[backend] = [json.loads(path.read_text()) for path in sorted(directory.glob(f"{backend}-*.json"))]
    return found


def end(process):
    """Ends a process that has not ended; `horovodrun` needs time to end its workers."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def record(path, backends):
    """Records all cases on these backends into a file."""
    found = {"backends": {}, "functions": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    in_process = [backend for backend in backends if backend in IN_PROCESS]
    jobs = [[backend] for backend in backends if backend not in IN_PROCESS]
    for job in [in_process] * bool(in_process) + jobs:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tfloop-graphs-") as directory:
            recorded = run(job, Path(directory))
        for backend, workers in recorded.items():
            cases = {name: [worker["cases"][name] for worker in workers] for name in CASES}
            for name, results in cases.items():
                summary = dict.fromkeys(f"{len(each['graphs'])} graphs, {each['status']}" for each in results)
                print(f"{backend} {name}: {'; '.join(summary)}", flush=True)
            found["backends"][backend] = cases
            for worker in workers:
                found["functions"].update(worker["functions"])
        print(f"... {', '.join(job)}: {time.monotonic() - begun:.0f} s", flush=True)
        with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
            json.dump(found, file, sort_keys=True)  # after each job: the next one may fail


def read(path):
    """What was recorded."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)


def compare(old, new):
    """Prints what differs in two records; gives the number of cases that differ."""
    differing = 0
    for backend in dict.fromkeys([*old["backends"], *new["backends"]]):
        old_cases, new_cases = (each["backends"].get(backend, {}) for each in (old, new))
        for case in dict.fromkeys([*old_cases, *new_cases]):
            lines = differences(old_cases.get(case), new_cases.get(case), old["functions"], new["functions"])
            print(f"{backend} {case}: {'differs' if lines else 'the same'}")
            for line in lines:
                print(f"    {line}")
            differing += bool(lines)
    print(f"{differing} cases differ")
    return differing


def differences(old, new, old_functions, new_functions):
    """The lines that say how a case differs on a backend; none where it is the same."""
    if old is None or new is None:
        return [f"only in the {'new' if old is None else 'old'} record"]
    if len(old) != len(new):
        return [f"{len(old)} processes, now {len(new)}"]
    lines = []
    for rank, (one, other) in enumerate(zip(old, new, strict=True)):
        if one["status"] != other["status"]:
            lines += [f"process {rank}: {one['status']}", f"now: {other['status']}"]
        one, other = one["graphs"], other["graphs"]
        hashes = [[graph["hash"] for graph in each] for each in (one, other)]
        if sorted(hashes[0]) == sorted(hashes[1]):
            lines += [] if hashes[0] == hashes[1] else [f"process {rank}: the same graphs, traced in another order"]
            continue
        matcher = difflib.SequenceMatcher(None, *hashes, autojunk=False)
        for kind, begin, end, other_begin, other_end in matcher.get_opcodes():
            if kind == "equal":
                continue
            pairs = min(end - begin, other_end - other_begin)
            for place in range(pairs):
                before, now = one[begin + place], other[other_begin + place]
                lines.append(f"process {rank}, graph {begin + place}, {title(before)}, now {title(now)}:")
                explained = explain(before["hash"], now["hash"], old_functions, new_functions)
                lines += [f"  {line}" for line in explained]
            lines += [f"process {rank}: only in the old record: {title(each)}" for each in one[begin + pairs : end]]
            added = other[other_begin + pairs : other_end]
            lines += [f"process {rank}: only in the new record: {title(each)}" for each in added]
    return lines


def title(graph):
    """What a graph is called in a line."""
    return f"{graph['name']} ({graph['ops']} ops)"


def explain(old_hash, new_hash, old_functions, new_functions):
    """The first differences of two functions; within a function that they call where all else is the same."""
    old, new = old_functions[old_hash], new_functions[new_hash]
    lines = []
    for kind in ("attributes", "arguments", "returns", "control_returns"):
        if without_functions(old[kind]) != without_functions(new[kind]):
            lines += [f"{kind}: {str(old[kind])[:300]}", f"now: {str(new[kind])[:300]}"]
    kinds = [[f"{op[0]} {op[1]} {op[2]}".strip() for op in each["ops"]] for each in (old, new)]
    counts = [collections.Counter(map(without_functions, each)) for each in kinds]
    for name, only in (("old", counts[0] - counts[1]), ("new", counts[1] - counts[0])):
        shown = [f"only in the {name} one: {number} x {op[:300]}" for op, number in only.items()]
        lines += shown[:SHOWN] + ([f"... and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else [])
    for place, (one, other) in enumerate(zip(old["ops"], new["ops"], strict=False)):
        if without_functions(one) != without_functions(other):
            lines += [f"first at operation {place}: {' | '.join(one)[:400]}", f"now: {' | '.join(other)[:400]}"]
            break
    if lines:
        return lines
    for place, (one, other) in enumerate(zip(old["ops"], new["ops"], strict=True)):
        pairs = zip(called_functions(" ".join(one[:2])), called_functions(" ".join(other[:2])), strict=True)
        for before, now in pairs:
            if before != now:
                inner = explain(before, now, old_functions, new_functions)
                return [f"in a function of operation {place}, {one[0].partition(':')[0]}:", *(f"  {x}" for x in inner)]
    return ["they differ in functions that their attributes name"]


def without_functions(value):
    """Text, or a list of it, with one name for all functions: whether they differ is looked at afterwards."""
    return re.sub(r"fn:[0-9a-f]+", "fn", value if isinstance(value, str) else json.dumps(value))


def main():
    """Reads the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_subparsers(dest="what", required=True)
    recorded = what.add_parser("record", help="record all cases into a file")
    recorded.add_argument("file", type=Path)
    recorded.add_argument("backends", nargs="*", metavar="BACKEND", help=f"some of {', '.join(BACKENDS)}; all")
    compared = what.add_parser("compare", help="compare two records")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    worked = what.add_parser("work", help="what `record` starts in each process")
    worked.add_argument("directory", type=Path)
    worked.add_argument("backends", nargs="+", choices=BACKENDS)
    given = parser.parse_args()
    if given.what == "work":
        work(given.backends, given.directory)
        return 0
    if given.what == "compare":
        return int(compare(read(given.old), read(given.new)) > 0)
    unknown = set(given.backends) - set(BACKENDS)
    if unknown:
        parser.error(f"no such backend: {', '.join(sorted(unknown))}")
    record(given.file.resolve(), given.backends or BACKENDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
