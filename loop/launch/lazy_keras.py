"""Parts of Keras that no training needs are imported when they are first used, and not with Keras.

They import matplotlib, scikit-learn and pandas, which takes a third of the time that `import tensorflow` takes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PARTS = (
    "keras.visualization", "keras.wrappers", "keras.src.visualization",
    "keras.src.trainers.data_adapters.array_slicing",  # of Keras's own `fit`, `evaluate` and `predict`
)  # fmt: skip
_lock = threading.RLock()  # held while the code of a part runs


class _Part(ModuleType):
    """A module whose code runs at the first access to an attribute that isn't about the module itself.

    With `importlib.util.LazyLoader`, `__file__` would run it, too, and AutoGraph reads that of all modules.
    """

    def __getattr__(self, name: str) -> object:
        """Python calls it for an attribute that the module doesn't have, or not yet."""
        if not name.startswith("__"):
            _run(self)
        return super().__getattribute__(name)

    def __dir__(self) -> Iterable[str]:
        _run(self)
        return super().__dir__()


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader: Loader | None = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the code to `_run`."""


def _run(part: ModuleType) -> None:
    """Runs the code of a module, once. Other threads that need the module wait."""
    assert part.__spec__ is not None
    mine = part.__spec__.loader
    assert isinstance(mine, _Loader)
    with _lock:
        # Before the code runs: it may look for an attribute that it hasn't set yet.
        loader, mine.loader = mine.loader, None
        if loader is None:
            return
        try:
            loader.exec_module(part)
        except BaseException:  # Ctrl-C, too: the next access runs the code again, or raises the same error
            mine.loader = loader
            raise


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _PARTS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


@contextlib.contextmanager
def parts() -> Iterator[None]:
    """Within it, an import of Keras runs the code of none of these parts."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
