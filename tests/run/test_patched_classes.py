"""Attributes of classes that are changed after the classes were made, which the workers of `fit(workers=N)` lack."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from callbacks.attached import Attached
from loop.run.patched_classes import patched

CODE = """
from dataclasses import dataclass

class Base:
    size = 3
    computed = 1 + 1

    def compute(self):
        return 1

@dataclass
class Net(Base):
    field: float = 0.1
    rate = 0.1
    name = "plain"
    eval_data = lambda self: None

    def build(self):
        return 2

    @staticmethod
    def helper():
        return 3

    if size := 4:
        def chosen(self):
            return 4

    twice = None

    def twice(self):
        return 5
"""


@pytest.fixture
def module(tmp_path):
    """Makes the module of the classes anew, as another process does."""
    path = tmp_path / "of_patched_classes.py"
    path.write_text(CODE)

    def make():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    yield make
    sys.modules.pop(path.stem, None)


def test_classes_as_their_code_says_have_no_patched_attributes(module):
    code = module()
    kind = code.Net
    assert patched(kind, None) == patched(kind, CODE) == {}
    kind.field = 0.5  # which decides nothing: its default was taken when the class was made
    code.Base.computed = 5  # what the code of a class computes isn't known
    kind._cache = 3
    kind.data = [1]
    assert patched(kind, None) == {}


def test_patched_attributes_are_refused_in_a_process_that_has_others(module):
    code = module()
    net, base = code.Net, code.Base
    net.rate = 0.2
    net.added = "text"
    net.build = lambda self: 3
    base.size += 1
    del base.compute
    del net.name
    found = patched(net, None)
    assert {name: sorted(digests) for name, digests in found.items()} == {
        "0": ["added", "build", "name", "rate"],
        "1": ["compute", "size"],
    }
    assert found == patched(net, CODE)  # as from the cells of a notebook

    Attached(json.dumps(found)).on_setup(SimpleNamespace(task=net()))  # a process that has them, too
    for place, digests in found.items():
        for name, digest in digests.items():
            one = Attached(json.dumps({place: {name: digest}}))
            with pytest.raises(
                ValueError, match=rf"{net.__mro__[int(place)].__name__}\.{name} was changed after the class was made"
            ):
                one.on_setup(SimpleNamespace(task=module().Net()))
