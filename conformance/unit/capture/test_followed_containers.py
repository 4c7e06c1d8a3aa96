"""What forward puts into containers: each call of the split leaves what a call of the model leaves, or is refused by name."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import FrontierError, InputError, UnsupportedError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MODES = ("generated_eager", "debug_interpreter")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.aux: list[Any] = []
        self.acts: dict[Any, Any] = {}
        self.held = SimpleNamespace(last=None)
        self.left: Any = None

    def keep(self, first: Tensor, second: Tensor) -> None:
        """What a case does with two tensors, the first of which is made before the second."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        g = self.b(h).relu()
        self.keep(h, g)
        found: Tensor = self.c(g)
        return found

    def kept(self) -> list[Any]:
        return [self.aux, self.acts, vars(self.held), self.left]


class Thing:
    """An object of a class of the user's."""

    def __init__(self, **own: Any) -> None:
        vars(self).update(own)


class Keeps(Base):
    def __init__(self, keep: Callable[[Base, Tensor, Tensor], Any]) -> None:
        super().__init__()
        vars(self)["keep"] = partial(keep, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeps:
        found = Keeps(vars(self)["keep"].func)
        found.load_state_dict(self.state_dict())
        return found.train(self.training)


def kept_in_order(m: Base, h: Tensor, g: Tensor) -> None:
    m.aux.append(g.mean())
    m.aux.append(h.mean())


def put_in_place(m: Base, h: Tensor, g: Tensor) -> None:
    m.acts.update({"h": h}, g=[g, {"both": (h, 1.5)}], batch=h.shape[0], name="relu")


def renewed(m: Base, h: Tensor, g: Tensor) -> None:
    m.aux.clear()
    m.aux.extend([h, g])


def nested(m: Base, h: Tensor, g: Tensor) -> None:
    m.acts.setdefault("h", []).append(h)
    m.acts.setdefault("g", []).append(g)


def in_an_object(m: Base, h: Tensor, g: Tensor) -> None:
    m.held.last, m.held.new = g, h


FOLLOWED = {f.__name__: f for f in (kept_in_order, put_in_place, renewed, nested, in_an_object)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", FOLLOWED)
def test_what_forward_puts_into_containers_is_there_after_the_split(case: str, training: bool, mode: Any) -> None:
    for cut in ("after:a", "after:b", "percent:90"):
        model, whole = (Keeps(FOLLOWED[case]).train(training) for _ in range(2))
        runtime = prepare_split(model, (X[:2],), split=SplitSpec(boundary=cut, dynamic_batch=(1, 8)), mode=mode)
        assert difference(whole.kept(), model.kept()) is None, "preparing left something behind"
        for batch in (3, 1, 2):
            with torch.no_grad():
                expected = whole(X[:batch])
            assert difference(expected, runtime.run_suffix(runtime.run_prefix(X[:batch]))) is None
            assert difference(whole.kept(), model.kept()) is None


def test_each_side_puts_there_what_it_makes() -> None:
    model = Keeps(put_in_place).eval()
    runtime = prepare_split(model, (X,), split="after:b")
    boundary = runtime.run_prefix(X)
    assert list(model.acts) == ["h"]
    runtime.run_suffix(boundary)
    assert list(model.acts) == ["h", "g", "batch", "name"]


def counted(m: Base, h: Tensor, g: Tensor) -> None:
    m.acts["n"] = m.acts.get("n", 0) + 1


def another_key_each_time(m: Base, h: Tensor, g: Tensor) -> None:
    m.acts[len(m.acts)] = h


def a_set(m: Base, h: Tensor, g: Tensor) -> None:
    m.left = m.left or set()
    m.left.add(h)


def an_object_of_a_kind(m: Base, h: Tensor, g: Tensor) -> None:
    m.aux.append(Thing(h=h))


def a_running_mean(m: Base, h: Tensor, g: Tensor) -> None:
    m.acts["mean"] = h.mean() if "mean" not in m.acts else m.acts["mean"] * 0.9 + h.mean()


def a_longer_list(m: Base, h: Tensor, g: Tensor) -> None:
    m.left = [*(m.left or []), h]


REFUSED: dict[str, tuple[Callable[[Base, Tensor, Tensor], None], str]] = {
    f.__name__: (f, says)
    for f, says in (
        (counted, "is 1 in a first call and something else"),
        (another_key_each_time, "'acts' of the model"),
        (a_set, "set|'left' of the model"),
        (an_object_of_a_kind, "a Thing"),
        (a_longer_list, "attribute 'left' of the model at every call"),
    )
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_can_put_there_is_refused_by_name(case: str) -> None:
    keep, says = REFUSED[case]
    model = Keeps(keep).eval()
    with pytest.raises(UnsupportedError, match=says):
        prepare_split(model, (X,), split="percent:50")
    assert not model.aux
    assert not model.acts
    assert model.left is None


def test_what_replaces_a_tensor_that_forward_reads_is_refused_by_name() -> None:
    model = Keeps(a_running_mean).eval()
    model.acts["mean"] = torch.ones(())
    with pytest.raises(UnsupportedError, match=r"'acts'\['mean'\] of the model in place of a tensor that it reads"):
        prepare_split(model, (X,), split="percent:50")


# --- outside of the model -------------------------------------------------------------------------------------------

ACTS: dict[str, Any] = {}
LAST: Any = None


def by_closure(model: nn.Module) -> Callable[[], Any]:
    acts: dict[str, Tensor] = {}

    def made(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            acts[name] = output.detach()

        return hook

    for name in "ab":
        model.get_submodule(name).register_forward_hook(made(name))
    return lambda: dict(acts)


def by_global(model: nn.Module) -> Callable[[], Any]:
    ACTS.clear()
    model.get_submodule("a").register_forward_hook(lambda module, args, output: ACTS.__setitem__("a", output))
    return lambda: dict(ACTS)


def by_variable(model: nn.Module) -> Callable[[], Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        global LAST
        LAST = output

    globals()["LAST"] = None
    model.get_submodule("b").register_forward_hook(hook)
    return lambda: LAST


def by_method(model: nn.Module) -> Callable[[], Any]:
    class Recorder:
        def __init__(self) -> None:
            self.acts: defaultdict[str, list[Tensor]] = defaultdict(list)

        def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.acts["all"].append(output)
            self.last = output

    recorder = Recorder()
    for name in "abc":
        model.get_submodule(name).register_forward_hook(recorder.hook)
    return lambda: [{k: list(v) for k, v in recorder.acts.items()}, getattr(recorder, "last", None)]


def by_partial(model: nn.Module) -> Callable[[], Any]:
    acts: list[Tensor] = []

    def hook(kept: list[Tensor], module: nn.Module, args: Any) -> None:
        kept.append(args[0])

    for name in "abc":
        model.get_submodule(name).register_forward_pre_hook(partial(hook, acts))
    return lambda: list(acts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hooked", [by_closure, by_global, by_variable, by_method, by_partial])
def test_hooks_that_record_outside_of_the_model_do_so_through_the_split(hooked: Any, mode: Any) -> None:
    for cut in ("after:a", "after:b", "percent:50"):
        model = Base().eval()
        seen = hooked(model)
        before = copy.deepcopy(seen())
        runtime = prepare_split(model, (X[:2],), split=SplitSpec(boundary=cut, dynamic_batch=(1, 8)), mode=mode)
        assert difference(before, seen()) is None, "preparing left something behind"
        for batch in (3, 1, 2):
            runtime.run_suffix(runtime.run_prefix(X[:batch]))
        found, whole = copy.deepcopy(seen()), Base().eval()
        seen = hooked(whole)
        with torch.no_grad():
            for batch in (3, 1, 2):
                whole(X[:batch])
        assert difference(seen(), found) is None


# --- handed in ------------------------------------------------------------------------------------------------------


class Handed(Base):
    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        h = self.a(x).relu()
        if isinstance(cache, dict):
            cache["k"] = h
            cache.pop("old", None)
        elif isinstance(cache, list):
            cache.append(h)
        else:
            cache.k = h
        found: Tensor = self.c(self.b(h).relu())
        return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [dict, lambda: {"old": X[:2]}, list, lambda: SimpleNamespace(k=None)])
def test_what_forward_puts_into_what_is_handed_in_is_there_after_the_prefix(make: Callable[[], Any], mode: Any) -> None:
    model, mine, theirs = Handed().eval(), make(), make()
    runtime = prepare_split(model, (X[:2], mine), split=SplitSpec("after:b", dynamic_batch=(1, 8)), mode=mode)
    assert difference(mine, make()) is None, "preparing left something behind"
    boundary = runtime.run_prefix(X[:2], mine)
    with torch.no_grad():
        expected = model(X[:2], theirs)
    assert difference(expected, runtime.run_suffix(boundary)) is None
    look: Callable[[Any], Any] = lambda thing: vars(thing) if isinstance(thing, SimpleNamespace) else thing  # noqa: E731
    assert difference(look(theirs), look(mine)) is None
    with pytest.raises(FrontierError, match="which the prefix alone is given"):
        prepare_split(model, (X[:2], make()), split="after:a")


@pytest.mark.parametrize("cut", ["after:a", "after:b", "percent:90"])
def test_losses_in_a_list_train_as_in_the_whole_model(cut: str) -> None:
    def losses(m: Base, h: Tensor, g: Tensor) -> None:
        m.aux.append(h.pow(2).mean())
        m.aux.append(g.mean())
        m.left = h.abs().mean()

    model, whole = (Keeps(losses).train() for _ in range(2))
    runtime = prepare_split(model, (X[:2],), split=SplitSpec(cut, dynamic_batch=(1, 8), trainable=True))
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, whole))

    def loss_of(m: Base) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: F.mse_loss(output, target) + 0.1 * sum(m.aux) + 0.3 * m.left

    for _ in range(3):
        for m, optimizer in ((model, mine), (whole, theirs)):
            m.aux.clear()
            optimizer.zero_grad()
        expected = loss_of(whole)(whole(X), X)
        expected.backward()
        boundary = runtime.run_training_prefix(X)
        loss, gradients = runtime.train_suffix(boundary, X, loss_fn=loss_of(model))
        runtime.backward_prefix(boundary, gradients)
        assert torch.equal(loss, expected.detach())
        for optimizer in (mine, theirs):
            optimizer.step()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q)


# --- inputs that are no tensors -------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class SaysEqual:
    def __init__(self) -> None:
        self.scale = [2.0]

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Scaled(Base):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
        found: Tensor = self.b(self.a(x) * self.read(given))
        return found


def _array() -> Any:
    return pytest.importorskip("numpy").full(4, 2.0)


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array": (_array, lambda g: float(g[0]), lambda g: g.__setitem__(0, 3.0)),
    "object": (lambda: Thing(s=2.0), lambda g: g.s, lambda g: setattr(g, "s", 3.0)),
    "deep": (
        lambda: Thing(inner=[Thing(s=2.0)]),
        lambda g: g.inner[0].s,
        lambda g: setattr(g.inner[0], "s", 3.0),
    ),
    "tensor": (
        lambda: Thing(s=torch.ones(4)),
        lambda g: g.s,
        lambda g: setattr(g, "s", torch.zeros(4)),
    ),
    "slots": (Slotted, lambda g: g.scale, lambda g: setattr(g, "scale", 3.0)),
    "equal": (SaysEqual, lambda g: g.scale[0], lambda g: g.scale.__setitem__(0, 3.0)),
    "bytes": (lambda: bytearray(b"\x02"), lambda g: float(g[0]), lambda g: g.__setitem__(0, 3)),
    "set": (lambda: {1, 2}, lambda g: float(len(g)), lambda g: g.add(3)),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_an_input_that_is_changed_in_place_between_calls_is_noticed(case: str) -> None:
    make, read, change = IN_PLACE[case]
    model, given = Scaled(read).eval(), make()
    runtime = prepare_split(model, (X, given), split="percent:50")
    with torch.no_grad():
        assert difference(model(X, given), runtime.run_suffix(runtime.run_prefix(X, given))) is None
    change(given)
    with pytest.raises(InputError, match=r"changed in place|at capture, now it is"):
        runtime.run_prefix(X, given)


# --- what ran before ------------------------------------------------------------------------------------------------


def by_shape(m: Base, x: Tensor) -> Tensor:
    if m.acts.get("shape") != x.shape:
        m.acts["shape"] = x.shape
        m.acts["table"] = torch.arange(x.shape[1], dtype=x.dtype)
    return m.acts["table"]  # type: ignore[no-any-return]


def by_attribute(m: Base, x: Tensor) -> Tensor:
    if m.left != x.shape:
        m.left = x.shape
        m.table = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
    return m.table


def once(m: Base, x: Tensor) -> Tensor:
    if m.left is None:
        m.left = torch.linspace(0, 1, 4)
    return m.left  # type: ignore[no-any-return]


def when_there_is_none(m: Base, x: Tensor) -> Tensor:
    if not hasattr(m, "table"):
        m.table = torch.linspace(0, 1, 4)
    return m.table


def by_width(m: Base, x: Tensor) -> Tensor:
    if x.shape[1] not in m.acts:
        m.acts[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
    return m.acts[x.shape[1]]  # type: ignore[no-any-return]


class Filled(Base):
    def __init__(self, table: Callable[[Base, Tensor], Tensor]) -> None:
        super().__init__()
        self.find = table

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x) + self.find(self, x))
        return found


@pytest.mark.parametrize("table", [by_shape, by_attribute, once, when_there_is_none, by_width])
def test_a_model_that_ran_before_has_the_plan_of_one_that_did_not(table: Any) -> None:
    signatures = set()
    for batches in ((), (2,), (3,), (5, 2)):
        model, whole = Filled(table).eval(), Filled(table).eval()
        for batch in batches:
            model(torch.ones(batch, 4))
        before, names = copy.deepcopy(model.kept()), list(vars(model))
        runtime = prepare_split(model, (X[:2],), split=SplitSpec("after:a", dynamic_batch=(1, 8)))
        assert difference(before, model.kept()) is None
        assert names == list(vars(model))
        signatures.add(runtime.plan.signature)
        for batch in (3, 1, 2):
            with torch.no_grad():
                expected = whole(X[:batch])
            assert difference(expected, runtime.run_suffix(runtime.run_prefix(X[:batch]))) is None
    assert len(signatures) == 1


def test_a_table_that_forward_can_not_fill_again_stays_where_it_is() -> None:
    def fixed(m: Base, x: Tensor) -> Tensor:
        if x.dim() == 9:
            m.left = None
        return m.left  # type: ignore[no-any-return]

    model = Filled(fixed).eval()
    model.left = torch.ones(4)
    runtime = prepare_split(model, (X,), split="after:a")
    model.left = torch.zeros(4)
    with torch.no_grad():
        assert difference(model(X), runtime.run_suffix(runtime.run_prefix(X))) is None


def moved_to_the_end(m: Any, h: Tensor, g: Tensor) -> None:
    m.order["first"] = len(h)
    m.order.move_to_end("first")


def moved_alone(m: Any, h: Tensor, g: Tensor) -> None:
    m.order.move_to_end("first")


def moved_where_it_stands(m: Any, h: Tensor, g: Tensor) -> None:
    m.order.move_to_end("last")


def taken_out_and_put(m: Any, h: Tensor, g: Tensor) -> None:
    m.acts.pop("first", None)
    m.acts["first"] = len(h)


@pytest.mark.parametrize("keep", [moved_to_the_end, moved_alone, moved_where_it_stands, taken_out_and_put])
def test_a_dict_whose_keys_come_to_stand_in_another_order_is_refused(keep: Callable[..., None]) -> None:
    model: Any = Keeps(keep).eval()
    model.order = OrderedDict(first=0, last=0)
    model.acts.update(first=0, last=0)
    with pytest.raises(
        UnsupportedError, match=r"'(acts|order)' of the model, which comes to hold its keys in another order"
    ):
        prepare_split(model, (X,), split="after:a")
    assert [*model.order] == [*model.acts] == ["first", "last"]


class Returns(Base):
    """Leaves what it returns, as `leave` says: the very thing, or a copy of it."""

    def __init__(self, leave: Callable[[Base, Any], None]) -> None:
        super().__init__()
        self.leave = leave

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu()
        found = {"h": h, "y": [self.c(h)]}
        self.leave(self, found)
        return found


def left_whole(m: Any, found: Any) -> None:
    m.left = found


def left_in_part(m: Any, found: Any) -> None:
    m.left = (found["h"], found["y"])


def put_whole(m: Any, found: Any) -> None:
    m.acts["found"] = found


def left_as_a_copy(m: Any, found: Any) -> None:
    m.left = {"h": found["h"], "y": [*found["y"]]}


@pytest.mark.parametrize("leave", [left_whole, left_in_part, put_whole])
def test_what_forward_keeps_and_returns_as_one_object_is_refused(leave: Callable[[Base, Any], None]) -> None:
    with pytest.raises(UnsupportedError, match="of which a plan makes two"):
        prepare_split(Returns(leave).eval(), (X,), split="after:a")


def test_a_copy_of_what_it_returns_is_kept() -> None:
    model = Returns(left_as_a_copy).eval()
    runtime = prepare_split(model, (X,), split="after:a")
    found = runtime.run_suffix(runtime.run_prefix(X))
    assert difference(found, model.left) is None
    assert found["y"] is not model.left["y"]
