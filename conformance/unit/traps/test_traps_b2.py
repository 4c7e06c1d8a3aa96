"""Traps 22 to 28: Python's state, payloads used twice, containers, sizes from data, constants, gradients, memory."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ariadne import BoundaryPayload, SplitRuntime, prepare_split, tree
from ariadne.errors import AriadneError, BatchError, CaptureError, GuardError, UnsupportedError
from conformance.unit.trap_twins import Twins, either, same, seeded, square_loss, state


class Body(nn.Module):
    """Two layers around something, which may keep things on the model (`kept`)."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], Any], **kept: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.middle = middle
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.middle(self, self.a(x))))


# 22. State that Python keeps


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n += 1
    return m.b(x) * m.n


def counted_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(1)
    return m.b(x) * len(m.seen)


def counted_in_a_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.table["n"] += 1
    return m.b(x) * m.table["n"]


def counted_in_an_object(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.box.n += 1
    return m.b(x) * m.box.n


def counted_by_an_iterator(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * next(m.numbers)


def counted_in_the_module_globals(m: Any, x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return m.b(x) * CALLS


def alternating(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.flip = not m.flip
    return m.b(x) * 2 if m.flip else m.b(x) + 1


def kept_from_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x)
    if m.last is not None:
        y = y + m.last
    m.last = y.detach().mean()
    return y


def kept_in_a_list(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x) + sum(m.seen)
    m.seen.append(x.detach().mean())
    return y


def drawn_from_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * random.random()


def branch_on_random(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) if random.random() < 0.5 else torch.relu(x)


def drawn_from_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) + float(np.random.rand())


def drawn_from_a_generator_of_its_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(x) * m.generator.random()


CALLS = 0


class Box:
    n = 0


STATEFUL: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    counted: lambda: {"n": 0},
    counted_in_a_list: lambda: {"seen": []},
    counted_in_a_dict: lambda: {"table": {"n": 0}},
    counted_in_an_object: lambda: {"box": Box()},
    counted_by_an_iterator: lambda: {"numbers": itertools.count(1)},
    counted_in_the_module_globals: dict,
    alternating: lambda: {"flip": False},
    kept_from_before: lambda: {"last": None},
    kept_in_a_list: lambda: {"seen": []},
    drawn_from_random: dict,
    branch_on_random: dict,
    drawn_from_numpy: dict,
}


@pytest.mark.parametrize("middle", STATEFUL, ids=lambda m: m.__name__)
def test_state_that_python_keeps_is_followed_or_refused(middle: Callable[..., Any]) -> None:
    global CALLS

    def act() -> None:
        global CALLS
        CALLS = 0
        model, want = Body(middle, **STATEFUL[middle]()), []
        runtime_model = Body(middle, **STATEFUL[middle]())
        runtime_model.load_state_dict(model.state_dict())
        x = seeded((2, 6))
        random.seed(3), np.random.seed(3)
        for _ in range(3):
            with torch.no_grad():
                want.append(model(x))
        CALLS = 0
        runtime = prepare_split(runtime_model, (x,), split="cut:1")
        random.seed(3), np.random.seed(3)
        same(want, [runtime.run_suffix(runtime.run_prefix(x)) for _ in range(3)])

    try:
        act()
    except (UnsupportedError, GuardError) as error:
        refusal = str(error)
    else:
        refusal = "draws from"
    assert any(words in refusal for words in ("attribute", "draws from", "changes")), refusal


@pytest.mark.parametrize(
    "make", [lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: np.random.RandomState(3)],
    ids=["random.Random", "numpy Generator", "numpy RandomState"],
)  # fmt: skip
def test_a_generator_that_the_model_owns_is_followed_or_refused(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    whole = Body(lambda m, x: m.b(x) * float(m.generator.random()), generator=make())
    split = Body(whole.middle, generator=make())
    split.load_state_dict(whole.state_dict())
    x = seeded((2, 6))
    with torch.no_grad():
        want = [whole(x) for _ in range(2)]
    try:
        runtime = prepare_split(split, (x,), split="cut:1")
        same(want, [runtime.run_suffix(runtime.run_prefix(x)) for _ in range(2)])
    except (CaptureError, GuardError) as error:
        refusal = str(error)
    else:
        refusal = "followed, generator and all"
    assert "generator" in refusal


def test_a_torch_generator_that_the_model_owns_is_drawn_at_replay_and_left_alone_by_prepare() -> None:
    def build() -> nn.Module:
        return Body(
            lambda m, x: m.b(x) * torch.rand(x.shape, generator=m.generator),
            generator=torch.Generator().manual_seed(9),
        )

    twins = Twins(build, seeded((2, 6)))
    same(twins.whole.generator.get_state(), twins.split.generator.get_state())
    twins.replay(seeded((3, 6)))
    same(twins.whole.generator.get_state(), twins.split.generator.get_state())


@pytest.mark.parametrize("draw", [drawn_from_random, branch_on_random, drawn_from_numpy], ids=lambda m: m.__name__)
def test_draws_from_python_are_refused_by_name_and_their_states_left_as_found(draw: Callable[..., Any]) -> None:
    model = Body(draw)
    before = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    with pytest.raises(UnsupportedError, match=r"draws from (random|numpy.random).*torch's RNG"):
        prepare_split(model, (seeded((2, 6)),), split="cut:1")
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])


def test_a_draw_at_one_batch_alone_is_noticed() -> None:
    """Where no run at capture draws, the one that would must not be served without."""
    build = lambda: Body(lambda m, x: m.b(x) * (random.random() if x.shape[0] == 6 else 1.0))  # noqa: E731
    twins = Twins(build, seeded((2, 6)))
    twins.hold(6)
    with pytest.raises(AriadneError):
        twins.runtime.run_prefix(seeded((6, 6)))


class Aux(nn.Module):
    """Leaves a loss of its own on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.aux: torch.Tensor | None = None
        self.shape: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        self.aux = (x * x).mean()
        self.shape = tuple(x.shape)
        return self.c(torch.tanh(self.b(x)))


def test_prepare_leaves_attributes_that_forward_writes_as_found() -> None:
    model = Aux()
    with suppress(UnsupportedError):
        prepare_split(model, (seeded((2, 6)),), split="50%")
    assert model.aux is None
    assert model.shape == ()


@pytest.mark.parametrize("attribute", ["aux", "shape"])
def test_an_attribute_that_forward_writes_is_written_or_refused(attribute: str) -> None:
    def act() -> None:
        twins = Twins(Aux, seeded((2, 6)))
        with torch.no_grad():
            twins.whole(seeded((3, 6)))
        twins.runtime.run_suffix(twins.runtime.run_prefix(seeded((3, 6))))
        same(getattr(twins.whole, attribute), getattr(twins.split, attribute))

    either(act, UnsupportedError, attribute)


# 23. A suffix run twice on one payload


IN_PLACE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "relu_": lambda m, x: torch.relu_(x) + m.b(x),
    "add_": lambda m, x: m.b(x.add_(1)),
    "setitem": lambda m, x: (x.__setitem__((slice(None), 0), 5.0), m.b(x))[1],
    "a view is written": lambda m, x: (x[:, 1:3].mul_(3), m.b(x) + x)[1],
    "written late": lambda m, x: m.b(x.clone()) + torch.sin((x + 1) * 2) + x.mul_(2),
    "one of a sequence": lambda m, x: (p := x.split(2, dim=1), torch.cat([p[0] + 1, p[1].mul(2), p[2]], 1).mul_(2))[1],
    "chunks written": lambda m, x: m.b(torch.cat([c.add_(i) for i, c in enumerate((x * 1).unsafe_chunk(3, 1))], 1)),
    "fill_ and copy_": lambda m, x: m.b(torch.zeros_like(x).copy_(x).clamp_(min=0)) + x.neg_(),
    "out=": lambda m, x: m.b(torch.add(x, 1, out=torch.empty_like(x))) if not torch.is_grad_enabled() else m.b(x + 1),
}


@pytest.mark.parametrize("middle", IN_PLACE)
def test_a_suffix_that_writes_leaves_the_payload_as_it_is(middle: str) -> None:
    twins = Twins(lambda: Body(IN_PLACE[middle]), seeded((2, 6)))
    x = seeded((3, 6))
    for runtime in twins.cuts():
        with torch.no_grad():
            want = twins.whole(x.clone())
        boundary = runtime.run_prefix(x.clone())
        before = {k: t.clone() for k, t in boundary.tensors.items()}
        for _ in range(3):
            same(want, runtime.run_suffix(boundary))
            same(before, {k: t.clone() for k, t in boundary.tensors.items()})
        sent = BoundaryPayload.from_bytes(boundary.to_bytes())
        for _ in range(2):
            same(want, runtime.run_suffix(sent))
        same(before, {k: t.clone() for k, t in sent.tensors.items()})
    twins.train(x)


@pytest.mark.parametrize("middle", IN_PLACE)
def test_training_leaves_the_payload_as_it_is(middle: str) -> None:
    twins = Twins(lambda: Body(IN_PLACE[middle]), seeded((2, 6)))
    for runtime in twins.cuts():
        boundary = runtime.run_training_prefix(seeded((3, 6)))
        before = {k: t.clone() for k, t in boundary.tensors.items()}
        _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
        same(before, {k: t.clone() for k, t in boundary.tensors.items()})
        runtime.backward_prefix(boundary, gradients)
        same(before, {k: t.clone() for k, t in boundary.tensors.items()})


class WritesItsInput(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.a, self.b = late, nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.late:
            x.mul_(2)
        y = torch.tanh(self.a(x))
        if self.late:
            x.add_(y)
        return self.b(y + x)


@pytest.mark.parametrize("late", [False, True])
def test_an_input_that_the_model_writes_is_written_as_the_model_does(late: bool) -> None:
    twins = Twins(lambda: WritesItsInput(late), seeded((2, 6)))
    for runtime in twins.cuts():
        whole, split = seeded((3, 6)), seeded((3, 6))
        with torch.no_grad():
            want = twins.whole(whole)
        same(want, runtime.run_suffix(runtime.run_prefix(split)))
        same(whole, split)


# 24. Containers come back as what they were


class Named(NamedTuple):
    first: Any
    second: Any


Plain = namedtuple("Plain", "b a")


@dataclasses.dataclass
class Data:
    z: Any
    a: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    rest: Any = dataclasses.field(default=None, kw_only=True)


class Keyed(dict):  # type: ignore[type-arg]
    """A dict of its own kind."""


def model_output(x: torch.Tensor, y: torch.Tensor) -> Any:
    return BaseModelOutputWithPooling(pooler_output=y, last_hidden_state=x, hidden_states=(x, y))


CONTAINERS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "tuple of one": lambda x, y: (x + y,),
    "list": lambda x, y: [x, y],
    "empty ones": lambda x, y: (x, y, [], (), {}),
    "NamedTuple": Named,
    "namedtuple": lambda x, y: Plain(x, y),
    "dataclass": lambda x, y: Data(x, y),
    "frozen dataclass": lambda x, y: Frozen(x, rest=[y]),
    "ModelOutput": model_output,
    "dict order": lambda x, y: {"z": x, "a": y, "m": x},
    "dict of other keys": lambda x, y: {3: x, (1, 2): y, None: 1},
    "OrderedDict": lambda x, y: OrderedDict([("z", x), ("a", y)]),
    "defaultdict": lambda x, y: defaultdict(list, {"z": x, "a": [y]}),
    "nested": lambda x, y: {"z": [Named(x, (y, Data(x, None)))], "a": {"k": (1, "s", 2.5, True, None)}},
    "a size": lambda x, y: (x, y.shape, y.shape[0], tuple(y.shape)),
    "return_types": lambda x, y: (x.max(1), y.topk(2), torch.sort(x)),
    "one tensor twice": lambda x, y: (x, y, x),
    "numbers": lambda x, y: (x, y, 3, 2.5, True, None, "s", 1j, x.dtype, x.device),
    "an input": lambda x, y: (x, y),
}

FOREIGN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "Keyed": lambda x, y: Keyed(z=x, a=y),
    "slice": lambda x, y: (x, y, slice(1, None)),
    "set": lambda x, y: (x, y, {1, 2}),
    "range": lambda x, y: (x, y, range(x.shape[0])),
    "Box": lambda x, y: (x, y, Box()),
}


class Contained(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap, self.a, self.b = wrap, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.a(x))
        return self.wrap(y, self.b(y))


def shape_of(value: Any) -> Any:
    """Types, keys and their order, and what is the same object as what, all the way down; no walker of Ariadne's."""
    ids: dict[int, int] = {}

    def walk(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return ("tensor", ids.setdefault(id(v), len(ids)))
        if isinstance(v, dict):
            extra = v.default_factory if isinstance(v, defaultdict) else None
            return (type(v), [(k, walk(x)) for k, x in v.items()], extra)
        if dataclasses.is_dataclass(v):
            return (type(v), [(f.name, walk(getattr(v, f.name))) for f in dataclasses.fields(v)])
        if isinstance(v, (list, tuple)):
            return (type(v), [walk(x) for x in v])
        return (type(v), v)

    return walk(value)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_output_comes_back_in_the_container_it_had(container: str) -> None:
    twins = Twins(lambda: Contained(CONTAINERS[container]), seeded((2, 6)))
    for runtime in twins.cuts():
        for b in (1, 3):
            with torch.no_grad():
                want = twins.whole(seeded((b, 6)))
            got = runtime.run_suffix(runtime.run_prefix(seeded((b, 6))))
            assert shape_of(want) == shape_of(got)
    twins.hold(6, batches=(1, 3))


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_output_that_no_plan_can_hold_is_refused_by_its_type(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward returns an object of type {kind}"):
        prepare_split(Contained(FOREIGN[kind]), (seeded((2, 6)),), split="50%")


class Unwraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Any, extra: Any = None) -> Any:
        x, y = given.values() if isinstance(given, dict) else given
        return self.b(torch.tanh(self.a(x)) + y) * (2 if extra is None else extra["k"][0])


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    y: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x, self.y))


class UnwrapsFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Given) -> Any:
        return self.b(torch.tanh(self.a(given.x)) + given.y)


INPUT_CONTAINERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "NamedTuple": Named,
    "dict": lambda x, y: {"z": x, "a": y},
    "OrderedDict": lambda x, y: OrderedDict(z=x, a=y),
}


@pytest.mark.parametrize("wrap", INPUT_CONTAINERS.values(), ids=INPUT_CONTAINERS)
def test_an_input_may_come_in_a_container(wrap: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Unwraps()
    runtime = prepare_split(model, (wrap(seeded((2, 6)), seeded((2, 6), 2)),), split="50%")
    for b in (1, 3):
        given = wrap(seeded((b, 6)), seeded((b, 6), 2))
        with torch.no_grad():
            want = model(given)
        for candidate in runtime.candidates:
            cut = runtime.resplit(candidate)
            same(want, cut.run_suffix(cut.run_prefix(given)))


def test_an_input_may_come_in_a_dataclass() -> None:
    model = UnwrapsFields()
    runtime = prepare_split(model, (Given(seeded((2, 6)), seeded((2, 6), 2)),), split="50%")
    given = Given(seeded((3, 6)), seeded((3, 6), 2))
    with torch.no_grad():
        same(model(given), runtime.run_suffix(runtime.run_prefix(given)))


# 25. Sizes and conditions that depend on data and on the batch


def observed_too(middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The same for a model that is not captured symbolically, since it makes an integer of what it read."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return middle(m, x) * int(m.n_buffer.item())

    return forward


class Conditioned(Body):
    def __init__(self, middle: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(middle)
        self.register_buffer("n_buffer", torch.tensor(2))
        self.table = {5: 3.0, 7: 0.5}
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


def batch_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([m.b(row) * (i + 1) for i, row in enumerate(x)])


def batch_accumulates(m: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(6)
    for i in range(x.shape[0]):
        total = total + m.b(x[i])
    return x + total


def while_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    while n > 1:
        x, n = m.b(x), n // 2
    return x


CONDITIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "B == 5": lambda m, x: m.b(x) if x.shape[0] == 5 else torch.relu(x),
    "B == 5, same op": lambda m, x: m.b(x) * (7 if x.shape[0] == 5 else 2),
    "B != 4": lambda m, x: m.b(x) if x.shape[0] != 4 else x,
    "4 <= B <= 6": lambda m, x: m.b(x) if 4 <= x.shape[0] <= 6 else x * 2,
    "4 <= B <= 6, same op": lambda m, x: m.b(x) * (7 if 4 <= x.shape[0] <= 6 else 2),
    "6 <= B <= 7": lambda m, x: m.b(x) * (7 if 6 <= x.shape[0] <= 7 else 2),
    "B > 6": lambda m, x: m.b(x) if x.shape[0] > 6 else x * 2,
    "B > 7, one end": lambda m, x: m.b(x) if x.shape[0] > 7 else x * 2,
    "B % 4 == 0": lambda m, x: m.b(x) if x.shape[0] % 4 == 0 else x * 2,
    "B in a tuple": lambda m, x: m.b(x) * (7 if x.shape[0] in (4, 7) else 2),
    "B in a set": lambda m, x: m.b(x) * (7 if x.shape[0] in {4, 7} else 2),
    "a dict by B": lambda m, x: m.b(x) * m.table.get(x.shape[0], 2.0),
    "a module by B": lambda m, x: m.parts[x.shape[0] % 3](x),
    "int(B) == 5": lambda m, x: m.b(x) * (7 if int(x.shape[0]) == 5 else 2),
    "len == 5": lambda m, x: m.b(x) * (7 if len(x) == 5 else 2),
    "size == 5": lambda m, x: m.b(x) * (7 if x.size(0) == 5 else 2),
    "numel == 30": lambda m, x: m.b(x) * (7 if x.numel() == 30 else 2),
    "shape == (5, 6)": lambda m, x: m.b(x) * (7 if x.shape == (5, 6) else 2),
    "str(B)": lambda m, x: m.b(x) * (7 if str(int(x.shape[0])) == "5" else 2),
    "a flag from B": lambda m, x: m.b(x) * (bool(x.shape[0] == 5) + 1),
    "min(B, 4)": lambda m, x: m.b(x)[: min(x.shape[0], 4)].sum(0) + x,
    "max(B, 4)": lambda m, x: m.b(x) * max(x.shape[0], 4),
    "B * B": lambda m, x: m.b(x) * (x.shape[0] * x.shape[0]),
    "1 / B": lambda m, x: m.b(x) / x.shape[0] + x * (1.0 / x.shape[0]),
    "B ** 0.5": lambda m, x: m.b(x) * x.shape[0] ** 0.5,
    "B // 2": lambda m, x: m.b(x) + x[: x.shape[0] // 2].sum(0),
    "bit_length": lambda m, x: m.b(x) * int(x.shape[0]).bit_length(),
    "round": lambda m, x: m.b(x) * round(x.shape[0] / 3),
    "arange(B)": lambda m, x: m.b(x) + torch.arange(x.shape[0])[:, None],
    "rows": batch_loop,
    "a sum of rows": batch_accumulates,
    "while": while_loop,
}


@pytest.mark.parametrize("way", ["symbolic", "observed"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_batch_of_the_range_takes_the_branch_of_the_model(condition: str, way: str) -> None:
    middle = CONDITIONS[condition] if way == "symbolic" else observed_too(CONDITIONS[condition])
    twins = Twins(lambda: Conditioned(middle), seeded((2, 6)))
    if way == "observed":
        assert twins.runtime.plan.captured_by != "symbolic"
    cuts = [twins.runtime]
    for b in range(1, 9):
        twins.replay(seeded((b, 6), b), cuts=cuts)
    twins.train(seeded((5, 6)), steps=1, cuts=cuts)
    with pytest.raises(BatchError, match=r"batch 9 lies outside dynamic_batch \(1, 8\)"):
        twins.runtime.run_prefix(seeded((9, 6)))


@pytest.mark.parametrize("at", [4, 5, 6, 7])
def test_a_condition_is_met_wherever_the_range_and_the_example_lie(at: int) -> None:
    middle = observed_too(lambda m, x: m.b(x) * (7 if x.shape[0] == at else 2))
    for example, batches in ((4, (4, 9)), (1, (1, 8)), (6, (2, 40))):
        twins = Twins(lambda: Conditioned(middle), seeded((example, 6)), batches=batches)
        for b in range(batches[0], 9):
            twins.replay(seeded((b, 6), b), cuts=[twins.runtime])


def boolean_mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = x[x[:, 0] > 0]
    return m.b(x) + kept.sum(0)


def masked_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x)
    y = y.clone()
    y[x > 0] = 1.5
    return y + x


def chosen_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    chosen = m.b(x[torch.nonzero(x[:, 0] > 0).squeeze(1)])
    return x.index_add(0, torch.nonzero(x[:, 0] > 0).squeeze(1), chosen)


def ragged(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = (x.detach().abs().sum(1) * 3).long() % 6 + 1
    return m.b(x) + x[:, : int(lengths.max())].sum(1, keepdim=True)


def tolisted(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = ((x.detach()[:, 0] > 0).long() + 1).tolist()
    return m.b(x) + torch.stack([x[i, :n].sum() for i, n in enumerate(lengths)])[:, None]


def repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    times = (x.detach()[:, 0] > 0).long() + 1
    many = m.b(x).repeat_interleave(times, dim=0)
    return x + many.mean(0)


def by_experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As mixtures of experts do it: each expert takes the rows that chose it."""
    choice, out = x.detach().argmax(1) % 3, torch.zeros_like(x)
    for i, part in enumerate(m.parts):
        rows = torch.where(choice == i)[0]
        out.index_add_(0, rows, part(x[rows]))
    return out


def by_experts_if_any(m: Any, x: torch.Tensor) -> torch.Tensor:
    choice, out = x.detach().argmax(1) % 3, torch.zeros_like(x)
    for i, part in enumerate(m.parts):
        rows = torch.where(choice == i)[0]
        if rows.numel():
            out = out.index_add(0, rows, part(x[rows]))
    return out


DATA: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "boolean mask": boolean_mask,
    "masked_select": lambda m, x: m.b(x) + torch.masked_select(x, x > 0).sum(),
    "masked_fill": lambda m, x: m.b(x.masked_fill(x > 0, -1.0)),
    "where": lambda m, x: torch.where(x > 0, m.b(x), x),
    "masked write": masked_write,
    "nonzero": chosen_rows,
    "unique": lambda m, x: m.b(x) + torch.unique((x.detach() * 2).long()).numel(),
    "a length": ragged,
    "lengths": tolisted,
    "repeat_interleave": repeated,
    "experts": by_experts,
    "experts, if any": by_experts_if_any,
    "a branch on the sum": lambda m, x: m.b(x) if x.sum() > 0 else x * 2,
    "a branch on any": lambda m, x: m.b(x) if (x > 1).any() else x * 2,
    "a loop until": lambda m, x: m.b(x) * sum(1 for v in x[:, 0] if v > 0),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("data", DATA)
def test_what_depends_on_data_is_followed_or_refused_on_either_side_of_the_cut(data: str, train: bool) -> None:
    twins = Twins(lambda: Conditioned(DATA[data]), seeded((2, 6)))
    twins.replay(seeded((2, 6)))  # the example itself must be served
    cuts = twins.cuts()
    for cut in (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
        for b in (1, 2, 3):
            for seed in (1, 2, 3):
                x = seeded((b, 6), 10 * b + seed)
                if train:
                    either(lambda x=x, cut=cut: twins.train(x, steps=1, cuts=[cut]), GuardError, "capture", "prepare")
                    twins.sync()
                else:
                    either(lambda x=x, cut=cut: twins.replay(x, cuts=[cut]), GuardError, "capture", "prepare")


@pytest.mark.parametrize("data", ["boolean mask", "masked_select", "masked_fill", "where", "masked write", "nonzero",
                                  "repeat_interleave", "experts"])  # fmt: skip
def test_sizes_that_depend_on_data_alone_are_followed(data: str) -> None:
    """No Python reads them: the ops themselves find the sizes anew."""
    twins = Twins(lambda: Conditioned(DATA[data]), seeded((2, 6)))
    cuts = twins.cuts()
    for b in (1, 3):
        twins.replay(seeded((b, 6), b), cuts=[cuts[0], cuts[len(cuts) // 2], cuts[-1]])
        twins.train(seeded((b, 6), b), cuts=[cuts[0], cuts[len(cuts) // 2], cuts[-1]])


# 26. Constants, tensors kept in odd places, layouts, autocast and bf16


CONSTANTS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[], dict[str, Any]]]] = {
    "a list": (lambda m, x: m.b(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]), dict),
    "a number": (lambda m, x: m.b(x) * torch.tensor(2.5), dict),
    "a list of the model": (lambda m, x: m.b(x) * torch.tensor(m.kept), lambda: {"kept": [1.0, 2, 3, 4, 5, 6]}),
    "numpy": (lambda m, x: m.b(x) * torch.from_numpy(np.arange(6, dtype=np.float32)), dict),
    "numpy of the model": (lambda m, x: m.b(x) * torch.from_numpy(m.kept), lambda: {"kept": np.ones(6, "float32")}),
    "as_tensor": (lambda m, x: m.b(x) * torch.as_tensor(m.kept), lambda: {"kept": np.ones(6, "float32")}),
    "a list by the batch": (lambda m, x: m.b(x) * torch.tensor([float(i) for i in range(x.shape[0])])[:, None], dict),
    "a written constant": (lambda m, x: m.b(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]).add_(1), dict),
    "new_tensor": (lambda m, x: m.b(x) * x.new_tensor([1.0, 2, 3, 4, 5, 6]), dict),
    "an attribute": (lambda m, x: m.b(x) * m.kept, lambda: {"kept": torch.arange(6.0)}),
    "in a dict": (lambda m, x: m.b(x) * m.kept["k"], lambda: {"kept": {"k": torch.arange(6.0)}}),
    "in a list": (lambda m, x: m.b(x) * m.kept[1], lambda: {"kept": [0, torch.arange(6.0)]}),
    "in a tuple in a dict": (lambda m, x: m.b(x) * m.kept["k"][0], lambda: {"kept": {"k": (torch.arange(6.0),)}}),
    "in an object": (lambda m, x: m.b(x) * m.kept.t, lambda: {"kept": Holder(torch.arange(6.0))}),
    "a view of an attribute": (lambda m, x: m.b(x) * m.kept[0], lambda: {"kept": torch.arange(12.0).view(2, 6)}),
    "written in forward": (lambda m, x: m.b(x) * m.kept.add_(1), lambda: {"kept": torch.arange(6.0)}),
}  # fmt: skip


class Holder:
    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


@pytest.mark.parametrize("constant", CONSTANTS)
def test_constants_born_in_forward_or_kept_on_the_model(constant: str) -> None:
    middle, kept = CONSTANTS[constant]
    Twins(lambda: Body(middle, **kept()), seeded((2, 6))).hold(6)


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the list": ("a list of the model", lambda m: m.kept.__setitem__(0, 9.0)),
    "another list": ("a list of the model", lambda m: setattr(m, "kept", [9.0] * 6)),
    "the array": ("numpy of the model", lambda m: m.kept.__setitem__(0, 9.0)),
    "another array": ("numpy of the model", lambda m: setattr(m, "kept", np.full(6, 9, dtype=np.float32))),
    "the array, as_tensor": ("as_tensor", lambda m: m.kept.__setitem__(0, 9.0)),
    "the attribute": ("an attribute", lambda m: m.kept.fill_(9)),
    "another attribute": ("an attribute", lambda m: setattr(m, "kept", torch.full((6,), 9.0))),
    "in the dict": ("in a dict", lambda m: m.kept["k"].fill_(9)),
    "another in the dict": ("in a dict", lambda m: m.kept.update(k=torch.full((6,), 9.0))),
    "another dict": ("in a dict", lambda m: setattr(m, "kept", {"k": torch.full((6,), 9.0)})),
    "another in the list": ("in a list", lambda m: m.kept.__setitem__(1, torch.full((6,), 9.0))),
    "another in the object": ("in an object", lambda m: setattr(m.kept, "t", torch.full((6,), 9.0))),
    "the base of the view": ("a view of an attribute", lambda m: m.kept.fill_(9)),
    "another base": ("a view of an attribute", lambda m: setattr(m, "kept", torch.full((2, 6), 9.0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_constant_of_the_model_that_changed_is_followed_or_refused(change: str) -> None:
    constant, act = CHANGES[change]
    middle, kept = CONSTANTS[constant]
    twins = Twins(lambda: Body(middle, **kept()), seeded((2, 6)))
    cuts = twins.cuts()
    for model in (twins.whole, twins.split):
        act(model)
    for cut in cuts:
        either(lambda cut=cut: twins.replay(seeded((3, 6)), cuts=[cut]), GuardError, "kept", "prepare")
        either(lambda cut=cut: twins.train(seeded((3, 6)), steps=1, cuts=[cut]), GuardError, "kept", "prepare")
        twins.sync()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.norm(self.a(x)))
        y = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4).transpose(1, 2)
        return {"map": self.b(x), "rows": y, "flat": x.flatten(1), "sum": x.reshape(x.shape[0], 2, -1) * 2}


def every_other(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "batch last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every other": every_other,
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "a slice": lambda t: torch.cat([t, t])[: t.shape[0]],
    "flipped memory": lambda t: t.flip(0).flip(0),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("example", ["contiguous", "channels_last", "transposed"])
def test_inputs_of_any_layout_give_the_same_bits_and_strides(example: str, layout: str, train: bool) -> None:
    twins = Twins(Conv, LAYOUTS[example](seeded((2, 3, 4, 4))), train=train)
    cuts = twins.cuts()
    for b in (1, 3):
        x = LAYOUTS[layout](seeded((b, 3, 4, 4)))
        for runtime in cuts[:: len(cuts) // 3]:
            with torch.no_grad():
                want = twins.whole(x)
            same(want, runtime.run_suffix(runtime.run_prefix(x)))
            same(state(twins.whole), state(twins.split))


class Laid(nn.Module):
    """Asks how its input lies in memory."""

    def __init__(self, how: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x * 1))
        return self.b(y * 2 if self.how(y) else y + 1)


WAYS_TO_ASK_FOR_LAYOUT: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_contiguous": lambda t: t.is_contiguous(),
    "channels_last": lambda t: t.is_contiguous(memory_format=torch.channels_last),
    "stride(1)": lambda t: t.stride(1) == 1,
    "stride()": lambda t: t.stride()[1] == 1,
    "dim_order": lambda t: t.dim_order() == (0, 1, 2, 3),
    "storage_offset": lambda t: t.storage_offset() == 0 and t.stride()[3] == 1,
}


@pytest.mark.parametrize("how", WAYS_TO_ASK_FOR_LAYOUT.values(), ids=WAYS_TO_ASK_FOR_LAYOUT)
def test_python_that_looks_at_the_layout_sees_that_of_the_call(how: Callable[[torch.Tensor], bool]) -> None:
    twins = Twins(lambda: Laid(how), seeded((2, 3, 4, 4)))
    for layout in ("contiguous", "channels_last", "transposed", "contiguous"):
        x = LAYOUTS[layout](seeded((3, 3, 4, 4)))
        for runtime in twins.cuts():
            with torch.no_grad():
                want = twins.whole(x)
            same(want, runtime.run_suffix(runtime.run_prefix(x)))


def test_a_reshape_that_copies_or_not_by_the_layout_is_written_as_in_the_model() -> None:
    """`reshape` of a contiguous tensor is a view, of another a copy; a write shows which."""

    class Reshapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) * 2
            flat = y.reshape(y.shape[0], -1)
            z = torch.sin(flat)
            flat.add_(1)
            return y.sum((1, 2, 3))[:, None] * z

    twins = Twins(Reshapes, seeded((2, 3, 4, 4)))
    for layout in ("contiguous", "channels_last", "transposed"):
        twins.runtime.run_prefix(LAYOUTS[layout](seeded((3, 3, 4, 4))))
        for runtime in twins.cuts():
            x = LAYOUTS[layout](seeded((3, 3, 4, 4)))
            with torch.no_grad():
                want = twins.whole(x)
            same(want, runtime.run_suffix(runtime.run_prefix(x)))


@contextmanager
def bfloat(on: bool) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        yield


class LooksAtTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = y.float() * 2 if torch.is_autocast_enabled("cpu") else y + 1
        return self.b(y if y.dtype == x.dtype else y.to(x.dtype) * 3)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("build", [sequence, LooksAtTypes])
def test_captured_in_or_out_of_autocast_it_replays_in_and_out(build: Callable[[], nn.Module], captured: bool) -> None:
    with bfloat(captured):
        twins = Twins(build, seeded((2, 6)))
    for now in (captured, not captured, captured):
        for runtime in twins.cuts():
            with bfloat(now):
                twins.replay(seeded((3, 6)), cuts=[runtime])
                twins.train(seeded((3, 6)), steps=1, cuts=[runtime])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_a_model_in_another_dtype_is_held_to_the_bit(dtype: torch.dtype) -> None:
    twins = Twins(lambda: sequence().to(dtype), seeded((2, 6)).to(dtype))
    for b in (1, 3):
        twins.replay(seeded((b, 6)).to(dtype))
        twins.train(seeded((b, 6)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_moved_to_another_dtype_is_followed_at_every_cut(dtype: torch.dtype) -> None:
    twins = Twins(sequence, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        model.to(dtype)
    twins.replay(seeded((3, 6)).to(dtype))


# 27. Gradients that were there before


def test_prepare_leaves_existing_gradients_alone() -> None:
    model = Body(lambda m, x: m.b(x)).train()
    square_loss(model(seeded((2, 6)))).backward()
    held = {n: (p.grad, p.grad.clone(), p.grad._version) for n, p in model.named_parameters()}
    x = seeded((2, 6)).requires_grad_()
    x.grad = torch.full_like(x, 3.0)
    kept = x.grad
    prepare_split(model, (x,), split="50%")
    for name, p in model.named_parameters():
        grad, copy_, version = held[name]
        assert p.grad is grad
        assert grad._version == version
        same(copy_, grad)
    assert x.grad is kept
    assert x.requires_grad
    same(torch.full_like(x, 3.0), x.grad)


def test_prepare_leaves_a_missing_gradient_missing() -> None:
    model = Body(lambda m, x: m.b(x))
    x = seeded((2, 6)).requires_grad_()
    prepare_split(model, (x,), split="50%")
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())


def test_replay_leaves_gradients_alone() -> None:
    twins = Twins(lambda: Body(lambda m, x: m.b(x)), seeded((2, 6)))
    square_loss(twins.split(seeded((2, 6)))).backward()
    held = {n: p.grad.clone() for n, p in twins.split.named_parameters()}
    x = seeded((2, 6)).requires_grad_()
    output = twins.runtime.run_suffix(twins.runtime.run_prefix(x))
    assert not output.requires_grad
    assert x.grad is None
    same(held, {n: p.grad for n, p in twins.split.named_parameters()})


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "once": lambda m, x: m.b(torch.tanh(m.a(x))),
    "again in the suffix": lambda m, x: m.b(torch.tanh(m.a(x))) * x,
    "many times": lambda m, x: (m.a(x) * x + torch.sin(x * 3)) * m.b(x) + torch.tanh(m.b(m.a(x) * 7) * x) + x / 3,
}


class Used(nn.Module):
    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.a, self.b, self.c = use, nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.use(self, x))


def step(runtime: SplitRuntime, *inputs: Any, **kwargs: Any) -> None:
    """One forward and backward pass, split."""
    boundary = runtime.run_training_prefix(*inputs)
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss, **kwargs)
    runtime.backward_prefix(boundary, gradients)


@pytest.mark.parametrize("before", [None, 0.37])
@pytest.mark.parametrize("use", USES)
def test_gradients_of_inputs_add_up_as_the_models_do(use: str, before: float | None) -> None:
    twins = Twins(lambda: Used(USES[use]), seeded((2, 6)).requires_grad_())
    for runtime in twins.cuts():
        pair = []
        for _ in range(2):
            x = seeded((3, 6)).requires_grad_()
            if before is not None:
                x.grad = torch.full_like(x, before)
            pair.append(x)
        for _ in range(2):
            square_loss(twins.whole(pair[0])).backward()
            step(runtime, pair[1])
            same(pair[0].grad, pair[1].grad)
            same(state(twins.whole)["gradients"], state(twins.split)["gradients"])
        twins.whole.zero_grad(), twins.split.zero_grad()


def test_gradients_flow_on_through_an_input_that_is_no_leaf() -> None:
    twins = Twins(lambda: Used(USES["again in the suffix"]), seeded((2, 6)))
    for runtime in twins.cuts():
        leaves = [seeded((3, 6)).requires_grad_() for _ in range(2)]
        square_loss(twins.whole(torch.sin(leaves[0]))).backward()
        step(runtime, torch.sin(leaves[1]))
        same(leaves[0].grad, leaves[1].grad)
        same(state(twins.whole)["gradients"], state(twins.split)["gradients"])
        twins.whole.zero_grad(), twins.split.zero_grad()


def test_inputs_with_and_without_gradients_are_told_apart_at_each_call() -> None:
    twins = Twins(lambda: Used(USES["again in the suffix"]), seeded((2, 6)))
    for wants in (True, False, True):
        for runtime in twins.cuts():
            pair = [seeded((3, 6)).requires_grad_(wants) for _ in range(2)]
            square_loss(twins.whole(pair[0])).backward()
            step(runtime, pair[1])
            same(pair[0].grad, pair[1].grad)


def test_a_frozen_model_with_an_input_that_wants_gradients() -> None:
    """As adversarial examples are made."""
    twins = Twins(lambda: Used(USES["many times"]).requires_grad_(False), seeded((2, 6)).requires_grad_())
    for runtime in twins.cuts():
        pair = [seeded((3, 6)).requires_grad_() for _ in range(2)]
        square_loss(twins.whole(pair[0])).backward()
        step(runtime, pair[1])
        same(pair[0].grad, pair[1].grad)
        assert all(p.grad is None for p in twins.split.parameters())


def test_without_an_optimizer_gradients_add_to_those_that_were_there() -> None:
    twins = Twins(lambda: Used(USES["many times"]), seeded((2, 6)))
    for model in (twins.whole, twins.split):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * i) if i % 2 else None
    for runtime in twins.cuts():
        square_loss(twins.whole(seeded((3, 6)))).backward()
        step(runtime, seeded((3, 6)))
        same(state(twins.whole)["gradients"], state(twins.split)["gradients"])


def test_gradients_of_parameters_that_the_model_does_not_use_survive() -> None:
    def build() -> nn.Module:
        model = Used(USES["once"])
        model.unused = nn.Linear(6, 6)
        return model

    twins = Twins(build, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        model.unused.weight.grad = torch.ones(6, 6)
    for runtime in twins.cuts():
        optimizer = torch.optim.SGD(runtime.suffix_parameters(), lr=0.1)
        step(runtime, seeded((3, 6)), optimizer=optimizer)
        same(torch.ones(6, 6), twins.split.unused.weight.grad)
        assert twins.split.unused.bias.grad is None


# 28. No activation outlives its last use


class Meter(TorchDispatchMode):
    """The bytes of all storages made while it is on that are alive now, and the most that there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree.leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key in self.known or key in given:
                    continue
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def measured(act: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes alive during `act`, and those alive after it while its result is."""
    gc.disable()  # what only the collector would free is held
    try:
        with Meter() as meter:
            result = act()
            after = meter.now
        del result
        return meter.peak, after
    finally:
        gc.enable()


WIDE = 256


def chain() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDE, WIDE), nn.Tanh())], nn.Linear(WIDE, 4))


class Hourglass(nn.Module):
    """Wide, narrow, wide; skips; chunks of which one dies early."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8 * WIDE), nn.Linear(8 * WIDE, 16)
        self.mix, self.out = nn.Linear(16, 16), nn.Linear(4 * WIDE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(torch.relu(self.down(torch.tanh(self.up(x)))))
        first, second = torch.chunk(torch.tanh(self.up(x)), 2, dim=1)
        kept = torch.sin(first) + 1
        return self.out(torch.cos(kept) * second.sigmoid())


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_the_halves_never_hold_more_than_the_model_but_for_the_payload(build: Callable[[], nn.Module]) -> None:
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))
    with torch.no_grad():
        most, _ = measured(lambda: twins.whole(x))
    for runtime in twins.cuts():
        peak, after = measured(lambda: runtime.run_prefix(x))  # noqa: B023
        boundary = runtime.run_prefix(x)
        assert peak <= most, (runtime.split_id, peak, most)
        crossing = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in boundary.tensors.values()}
        assert after <= sum(crossing.values()), (runtime.split_id, after, crossing)
        later, last = measured(lambda: runtime.run_suffix(boundary))  # noqa: B023
        assert later <= most, (runtime.split_id, later, most)
        assert last == 32 * 4 * 4


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_a_split_forward_peaks_where_the_model_does(build: Callable[[], nn.Module]) -> None:
    """But for the payload, which the caller holds while the suffix runs, so that it can be run again."""
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))
    with torch.no_grad():
        most, _ = measured(lambda: twins.whole(x))
    over = {}
    for runtime in twins.cuts():
        peak, _ = measured(lambda: runtime.run_suffix(runtime.run_prefix(x)))  # noqa: B023
        if peak > most * 1.05 + runtime.run_prefix(x).nbytes:
            over[runtime.split_id] = round(peak / most, 2)
    assert not over


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_split_training_holds_no_more_than_a_step_of_the_model(build: Callable[[], nn.Module]) -> None:
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))

    def whole_step() -> None:
        square_loss(twins.whole(x)).backward()

    whole_step()
    most, _ = measured(whole_step)
    for runtime in twins.cuts():
        step(runtime, x)
        peak, after = measured(lambda: step(runtime, x))  # noqa: B023
        boundary_bytes = runtime.run_prefix(x).nbytes
        held = 2 * boundary_bytes  # the boundary and its gradients, which the caller holds
        assert peak <= most * 1.05 + held, (runtime.split_id, peak, most)
        assert after == 0, (runtime.split_id, after)


def test_activations_of_the_prefix_are_gone_once_it_was_walked_back() -> None:
    """Though the boundary itself is still held."""
    x = seeded((32, WIDE))
    twins = Twins(chain, x, batches=(1, 64))
    runtime = twins.runtime
    step(runtime, x)

    def act() -> Any:
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
        runtime.backward_prefix(boundary, gradients)
        del gradients
        return boundary

    _, after = measured(act)
    assert after <= 32 * WIDE * 4 + 64


def test_each_side_lets_go_of_a_value_at_the_op_that_reads_it_last() -> None:
    """Of a chain of equal sizes, two values are alive at any time, as in the model."""
    x = seeded((32, WIDE))
    model = nn.Sequential(*[nn.Tanh() for _ in range(10)])
    runtime = prepare_split(model, (x,), split="50%")
    one = 32 * WIDE * 4
    with torch.no_grad():
        assert measured(lambda: model(x))[0] == 2 * one
    assert measured(lambda: runtime.run_prefix(x))[0] == 2 * one


def test_nothing_piles_up_over_many_calls() -> None:
    x = seeded((8, WIDE))
    runtime = Twins(chain, x).runtime
    runtime.run_suffix(runtime.run_prefix(x))

    def act() -> None:
        for _ in range(20):
            runtime.run_suffix(runtime.run_prefix(x))

    peak, after = measured(act)
    assert after == 0
    assert peak <= 4 * 8 * WIDE * 4


def test_a_call_that_failed_holds_nothing() -> None:
    x = seeded((8, WIDE))
    runtime = Twins(chain, x).runtime

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        raise KeyError("no loss")

    def act() -> None:
        with pytest.raises(KeyError):
            runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=loss)

    act()
    with Meter() as meter:
        act()
        gc.collect()
        assert meter.now == 0
