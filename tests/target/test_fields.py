"""Fields of tasks: which texts each type takes, and the values that are restored from the record of a run."""

import enum
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List, Literal, Optional  # noqa: UP035

import pytest

from callbacks import Checkpoint
from callbacks.run_record.redaction import HIDDEN, mask
from loop import UsageError, fit
from loop.commands import config, sweep
from loop.run.run_directory import task_of
from loop.target.fields import plain, restored, set_fields, split, typed
from loop.task import hyperparameters, without_computed
from tests.tasks import Plain


class Activation(enum.Enum):
    RELU = "relu"
    TANH = "tanh"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Typed:
    act: Activation = Activation.RELU
    level: Level = Level.LOW
    place: Path = Path("x")
    how: Literal["a", "b", 3, True] = "a"
    some: Optional[int] = None  # noqa: UP045 - as many write it
    either: int | str = 1
    sizes: list[int] | None = None
    steps: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    texts: list[str] | None = None
    pairs: list[tuple[int, int]] | None = None
    maybe: list[str | None] | None = None
    places: list[Path] | None = None
    text_or_texts: str | list[str] = ""
    one_or_more: int | tuple[int, ...] = 3
    acts: list[Activation] | None = None
    sequence: Sequence[float] = ()
    act_or_none: Activation | None = None
    rate: float = 1.0
    place_or_text: Path | str = ""
    text_or_place: str | Path = ""
    text_or_act: str | Activation = ""
    act_or_text: Activation | str = ""
    number_or_act: int | Activation = 0
    bare: tuple = ()
    bare_list: List = None  # noqa: UP006 - as some write it
    bare_sequence: typing.Sequence = ()
    pwd: int = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("act=TANH", Activation.TANH),
        ("act=tanh", Activation.TANH),
        ("act=Tanh", Activation.TANH),
        ("level=HIGH", Level.HIGH),
        ("level=2", Level.HIGH),
        ("place=/a/b c", Path("/a/b c")),
        ("how=b", "b"),
        ("how=3", 3),
        ("how=true", True),
        ("some=none", None),
        ("some=3", 3),
        ("either=3", 3),
        ("either=x", "x"),
        ("sizes=64,32", [64, 32]),
        ("sizes=[64, 32]", [64, 32]),
        ("sizes=(64,)", [64]),
        ("sizes=64", [64]),
        ("sizes=[]", []),
        ("sizes=None", None),
        ("steps=1,2,3", (1, 2, 3)),
        ("pair=1,x", (1, "x")),
        ('texts=a,"b,c",d e', ["a", "b,c", "d e"]),
        ('maybe=[none,"a, b"]', [None, "a, b"]),
        ("places=/a,/b", [Path("/a"), Path("/b")]),
        ("pairs=[[1,2],(3,4)]", [(1, 2), (3, 4)]),
        ("pairs=(1,2),(3,4)", [(1, 2), (3, 4)]),
        ("text_or_texts=a,b", "a,b"),
        ("text_or_texts=[a,b]", ["a", "b"]),
        ("one_or_more=3", 3),
        ("one_or_more=3,4", (3, 4)),
        ("acts=relu,TANH", [Activation.RELU, Activation.TANH]),
        ("sequence=1,2.5", (1.0, 2.5)),
        ("act_or_none=none", None),
        ("act_or_none=RELU", Activation.RELU),
        ("rate=inf", float("inf")),
        ("place_or_text=/a", Path("/a")),
        ("text_or_place=/a", "/a"),
        ("text_or_act=relu", "relu"),
        ("act_or_text=relu", Activation.RELU),
        ("act_or_text=gelu", "gelu"),
        ("number_or_act=relu", Activation.RELU),
    ],
)
def test_what_is_typed_has_the_type_of_the_field_and_comes_back_from_a_run(text, value):
    name = text.partition("=")[0]
    found = set_fields(Typed, [text])[name]
    assert found == value
    assert type(found) is type(value)
    assert set_fields(Typed, [f"{name}={typed(found)}"])[name] == value
    recorded = json.loads(json.dumps({name: plain(found)}))
    again = restored(Typed, recorded)[name]
    assert again == value
    assert type(again) is type(value)


def test_a_member_comes_back_where_a_text_was_possible():
    recorded = plain({"text_or_act": Activation.RELU})
    assert restored(Typed, recorded) == {"text_or_act": Activation.RELU}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("act=gelu", "--set act=gelu: 'gelu' isn't of type Activation (one of RELU, TANH)"),
        ("how=c", "--set how=c: 'c' isn't of type Literal (one of a, b, 3, True)"),
        ("place=", "--set place=: '' isn't of type Path"),
        ("some=x", "--set some=x: 'x' isn't of type int or None"),
        ("pair=1", "'1' isn't of type tuple[int, str]; a list is typed as A,B or [A,B], an empty one as []"),
        ("steps=a,b", "'a,b' isn't of type tuple[int, ...]"),
        ("texts=", "'' isn't of type list[str] or None"),
        ("sizes=[1", "'[1' isn't of type list[int] or None"),
        ("acts=relu,gelu", "isn't of type list[Activation (one of RELU, TANH)] or None"),
        ("bare=1", "the field is of type tuple, which can't be typed on a command line"),
        ("bare_list=1", "the field is of type List, which can't be typed on a command line"),
        ("bare_sequence=1", "the field is of type Sequence, which can't be typed on a command line"),
        ("pwd=topsecret", "--set pwd=***: '***' isn't of type int"),
    ],
)
def test_what_can_not_be_typed_is_told_with_what_is_allowed(text, message):
    with pytest.raises(UsageError) as told:
        set_fields(Typed, [text])
    assert message in str(told.value)
    assert "topsecret" not in str(told.value)


def test_a_list_whose_elements_have_no_type_comes_back_from_a_run():
    assert restored(Typed, {"bare_list": [1, "a"], "bare_sequence": [2]}) == {
        "bare_list": [1, "a"],
        "bare_sequence": [2],
    }


def relu(values):
    return values * (values > 0)


@dataclass
class Untyped(Plain):
    """Fields whose values JSON can't hold, so that a run records them as texts."""

    activation: Callable = relu
    days: frozenset[int] = frozenset({1})
    named: dict[int, str] = field(default_factory=lambda: {1: "a"})
    anything: Any = "text"

    def build_model(self):
        assert self.activation(-1) == 0
        assert 1 in self.days
        return super().build_model()


def test_a_default_of_any_type_comes_back_from_a_run():
    """A text came back, with which the task failed."""
    result = fit(Untyped(), epochs=1, batch_size=20, run_dir="run", callbacks=[Checkpoint()])
    again, *_ = task_of(result.run_dir, f"{__file__}:Untyped")
    assert (again.activation(-1), again.days, again.named) == (0, {1}, {1: "a"})
    recorded = plain(hyperparameters(Untyped()))
    words = [f"{name}={typed(value)}" for name, value in recorded.items()]
    assert set_fields(Untyped, words) == hyperparameters(Untyped())

    assert restored(Untyped, {"anything": "other"}, ["anything"]) == {"anything": "other"}
    for value, changed in (("frozenset({1})", ["days"]), ("frozenset({2})", [])):
        with pytest.raises(
            UsageError, match=r"Untyped.days was frozenset\(.*: a run records an object of this type as a"
        ):
            restored(Untyped, {"days": value}, changed)


@dataclass
class Inherited(Typed):
    mode: "Mode" = "fast"
    later: "OnlyForTypeCheckers | None" = None  # noqa: F821

    class Mode(enum.Enum):
        FAST = "fast"


def test_a_type_that_is_there_for_type_checkers_alone_leaves_the_other_fields_their_types():
    assert set_fields(Inherited, ["sizes=1,2", "mode=fast"]) == {"sizes": [1, 2], "mode": Inherited.Mode.FAST}
    recorded = {"steps": [1], "place": "/x", "mode": "fast", "later": "as it was"}
    assert restored(Inherited, recorded) == {
        "steps": (1,), "place": Path("/x"), "mode": Inherited.Mode.FAST, "later": "as it was",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"later=1: the field is of type OnlyForTypeCheckers \| None, which can't be"):
        set_fields(Inherited, ["later=1"])


def test_commas_within_brackets_and_quotes_do_not_part():
    assert split('a,[b,c],(d,(e,f)),"g,h",i(j,k)') == ["a", "[b,c]", "(d,(e,f))", '"g,h"', "i(j", "k)"]


def test_files_of_options_and_sweeps_have_such_values_too(tmp_path):
    path = tmp_path / "it.toml"
    path.write_text("[set]\nsizes = [64, 32]\ntexts = ['a,b', 'c']\nact = 'tanh'\nplace = '/x'\n")
    words = [text.removeprefix("--set=") for text in config.arguments([path], {}, [])]
    assert set_fields(Typed, words) == {
        "sizes": [64, 32], "texts": ["a,b", "c"], "act": Activation.TANH, "place": Path("/x"),
    }  # fmt: skip
    plan = sweep.Plan(
        target="f.py:Typed", grid=sweep.assigned("--grid", ["sizes=[64,32],[128]", "act=relu,tanh"]),
        random=sweep.assigned("--random", ["how=a,b"]), metric="loss", direction="minimize", sampler="random",
        pruner="none", seed=0, arguments=["--set=place=/x"], place="/",
    )  # fmt: skip
    assert sweep.space(Typed, plan) == {
        "sizes": ["[64,32]", "[128]"], "act": ["relu", "tanh"], "how": ["a", "b"],
    }  # fmt: skip
    assert plan.trials(4) == 4
    assert [plan.combination(number)["sizes"] for number in range(4)] == ["[64,32]", "[64,32]", "[128]", "[128]"]


@dataclass
class Layered(Plain):
    """Builds its model from fields of these types."""

    act: Activation = Activation.RELU
    place: Path = Path("x")
    sizes: tuple[int, ...] = (4,)

    def build_model(self):
        assert isinstance(self.act, Activation)
        assert isinstance(self.place, Path)
        assert isinstance(self.sizes, tuple)
        return super().build_model()


def test_a_run_of_such_a_task_is_read_and_goes_on(quiet, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    task = Layered(act=Activation.TANH, place=Path("/data"), sizes=(8, 4))
    fit(task, epochs=1, callbacks=quiet(), run_dir=tmp_path / "run")
    found, *_ = task_of(tmp_path / "run", f"{__file__}:Layered")
    fields = hyperparameters(found)
    assert {name: fields[name] for name in ("place", "sizes")} == {"place": Path("/data"), "sizes": (8, 4)}
    assert fields["act"].name == "TANH"
    assert fit(found, epochs=2, callbacks=quiet(), run_dir=tmp_path / "run").epochs == 2


@dataclass
class Computing(Plain):
    """Has fields that it computes: one as soon as it is made, one when it builds its model."""

    sizes: tuple[int, ...] = (4,)
    token: str = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self):
        self.token = "computed-secret-91"

    def build_model(self):
        self.depth = len(self.sizes)
        return super().build_model()


def test_a_run_of_a_task_that_computes_fields_is_read_and_goes_on(quiet, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    fit(Computing(sizes=(8, 4)), epochs=1, callbacks=quiet(), run_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "depth" not in about["hyperparameters"]
    assert about["changed"] == ["sizes"]
    assert mask("computed-secret-91") == HIDDEN  # it isn't a hyperparameter, and still a secret
    found, *_ = task_of(tmp_path / "run", f"{__file__}:Computing")
    assert found.sizes == (8, 4)
    # What an earlier version has recorded.
    assert restored(type(found), {"sizes": [8, 4], "depth": 2}) == {"sizes": (8, 4)}
    assert without_computed(found, {"sizes": [8, 4], "token": HIDDEN}) == {"sizes": [8, 4]}
    assert fit(found, epochs=2, callbacks=quiet(), run_dir=tmp_path / "run").epochs == 2
    with pytest.raises(UsageError, match="--set depth=3: Computing computes depth itself"):
        set_fields(Computing, ["depth=3"])
