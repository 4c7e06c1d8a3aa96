"""`ariadne.opaque`: a part is taken as it is, one op of the plan, and what it relies on is checked."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ariadne
from ariadne import SplitSpec
from ariadne.errors import CompileError, HalfError, ModuleError, SpecError, UnsupportedError, WitnessError
from conformance.unit.refusing import prepare_split


class Net(nn.Module):
    """A part between two layers: 4 -> 8 -> 2."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.enter, self.part, self.leave = nn.Linear(4, 8), part, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(self.enter(x).tanh()))


class Part(nn.Module):
    """A part that does what it is told, with a layer, statistics, a counter, a list and a generator of its own."""

    def __init__(self, does: Callable[[Part, Any], Any]) -> None:
        super().__init__()
        self.does, self.inner, self.norm, self.drop = does, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls, self.flag, self.kept, self.numbers = 0, False, list[Any](), np.random.default_rng(3)

    def forward(self, *given: Any) -> Any:
        return self.does(self, *given)


def of(does: Callable[..., Any], net: type[Net] = Net) -> Net:
    """A model whose part does this."""
    torch.manual_seed(0)
    return net(ariadne.opaque(Part(does)))


def seed(n: int) -> None:
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def hold(model: nn.Module, twin: nn.Module, runtime: Any, x: torch.Tensor) -> None:
    """A call, then a training step, of the split and of the twin: equal bit for bit, random numbers and all."""
    seed(5)
    expected = twin(x)
    after = torch.rand(1), random.random(), np.random.rand()
    seed(5)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), expected)
    assert (torch.rand(1), random.random(), np.random.rand()) == after
    seed(6)
    twin.zero_grad()
    twin(x).square().sum().backward()
    seed(6)
    model.zero_grad()
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
    runtime.backward_prefix(boundary, gradients)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None and its.grad is None) or torch.equal(mine.grad, its.grad)
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, its)


def _counts(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.calls += 1
    return part.inner(x) * part.calls


def _in_numpy(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.inner(x) * torch.from_numpy(np.tanh(x.detach().numpy()))


def _branches(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.inner(x) if float(x.detach().sum()) > 0 else -part.inner(x)


def _draws(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.drop(part.norm(x)) * random.random() + float(np.random.rand()) + float(part.numbers.random())


def _keeps(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.kept.append(x.detach())
    part.last = part.kept[0].sum()
    return part.inner(x) + len(part.kept)


def _hooks(part: Part, x: torch.Tensor) -> torch.Tensor:
    h = part.inner(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return h


def _maps(part: Part, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(part.inner)(x)


DOES = [_counts, _in_numpy, _branches, _draws, _keeps, _hooks, _maps]


@pytest.mark.parametrize(
    ("does", "mode"), [(_counts, "debug_interpreter"), *((does, "generated_eager") for does in DOES)]
)
def test_what_no_plan_can_follow_is_run_as_it_is_at_all_batches(does: Callable[..., Any], mode: str) -> None:
    model = of(does)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:enter", trainable=True), mode=mode)
    for at in ("after:enter", "after:part"):
        runtime = runtime.resplit(at)
        for batch in (3, 17):
            hold(model, twin, runtime, torch.randn(batch, 4))
        assert len(runtime.plans) == 1


def test_preparing_leaves_the_part_as_it_was() -> None:
    model = of(_keeps)
    prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("after:enter", trainable=True))
    assert (model.part.calls, model.part.kept) == (0, [])


def test_weights_that_it_writes_into_are_left_as_found_and_written_once_a_call() -> None:
    def decays(part: Part, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            part.inner.weight.mul_(0.5)
        return part.inner(x.detach())

    model = of(decays)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:enter", trainable=False))
    assert torch.equal(model.part.inner.weight, twin.part.inner.weight)
    for _ in range(3):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), twin(x))


def test_its_parameters_belong_to_the_side_that_calls_it() -> None:
    model = of(_in_numpy)
    for at, prefix in (("after:enter", 2), ("after:part", 6)):
        runtime = prepare_split(model, (torch.randn(3, 4),), split=at)
        assert len(list(runtime.prefix_parameters())) == prefix
        assert len(list(runtime.suffix_parameters())) == 8 - prefix
    assert "part.inner.weight" in model.state_dict()


@ariadne.opaque
def of_rows(x: torch.Tensor, more: dict[str, Any]) -> dict[str, Any]:
    """Containers in and out, and what is no tensor."""
    return {"y": x * more["by"], "z": [more["x"] + 1, 3, None]}


class Functions(Net):
    """Calls a function, and a method, by keyword too."""

    @ariadne.opaque
    def method(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.part(x) * scale if float(x.detach().sum()) > 0 else -self.part(x)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        found = of_rows(h, {"by": 2, "x": h})
        return self.leave(self.method(found["y"], scale=0.5) + found["z"][0] * found["z"][1])


@ariadne.opaque
class Marked(nn.Module):
    """Taken as it is by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if float(x.detach().sum()) > 0 else x


@pytest.mark.parametrize("model", [Functions(nn.Linear(8, 8)), Net(Marked())], ids=["functions", "class"])
def test_functions_methods_and_classes_can_be_opaque(model: nn.Module) -> None:
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:enter", trainable=True))
    for batch in (1, 3, 9):
        hold(model, twin, runtime, torch.randn(batch, 4))


def test_a_bound_method_is_bound_to_the_copy_in_a_copy() -> None:
    part = Part(_branches)
    model = Net(None)
    del model.part
    model.inner, model.part = part, ariadne.opaque(part.forward)
    twin = copy.deepcopy(model)
    assert twin.part.__self__ is twin.inner
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:enter")
    hold(model, twin, runtime, torch.randn(3, 4))


def test_sizes_that_follow_data_get_a_plan_each() -> None:
    model = of(lambda part, x: x[x.sum(1) > 0.5])
    runtime = prepare_split(model, (torch.randn(6, 4),), split="after:enter")
    for _ in range(6):
        x = torch.randn(6, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    assert len(runtime.plans) > 1


class Asks(Net):
    """Branches on a number that its part gives."""

    def forward(self, x: torch.Tensor) -> Any:
        h, above = self.part(self.enter(x))
        return self.leave(h * 2 if above else -h)


@pytest.mark.parametrize("at", ["after:enter", "after:part"])
def test_a_call_that_is_taken_back_leaves_nothing_of_its_part_behind(at: str) -> None:
    def counts(part: Part, x: torch.Tensor) -> Any:
        part.calls += 1
        part.kept.append(part.calls)
        return x * part.calls * random.random(), bool(x.detach().sum() > 0)

    model = of(counts, Asks)
    twin = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.ones(3, 4),), split=at)
    for i in range(10):
        x = torch.ones(3, 4) * random.choice((-5.0, 5.0)) if i > 1 else torch.full((3, 4), 5.0 - 10 * i)
        seed(i)
        expected, after = twin(x), random.random()
        seed(i)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), expected)
        assert random.random() == after
    assert model.part.kept == twin.part.kept == [*range(1, 11)]
    assert len(runtime.plans) == 2


@pytest.mark.parametrize("does", [lambda p, x: x, lambda p, x: x[:, :], lambda p, x: x.detach().view(-1, 8)])
@pytest.mark.parametrize("written", [False, True])
def test_results_may_be_its_arguments_again(does: Callable[..., Any], written: bool) -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.enter(x).tanh() * 1
            y = self.part(h)
            y = y.mul_(2) if written else y * 2
            return self.leave(y + h)

    model = of(does, Writes)
    twin = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:enter")
    for cut in runtime.candidates:
        if cut.safe:
            runtime, x = runtime.resplit(cut.split_id), torch.randn(5, 4)
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), twin(x))


def test_what_it_writes_into_its_arguments_is_known() -> None:
    def writes(part: Part, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return part.inner(x)

    def by_numpy(part: Part, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[...] += 1
        return part.inner(x)

    for does in (writes, by_numpy):
        model = of(does).eval()
        x = torch.randn(3, 4)
        runtime = prepare_split(model, (x,), split=SplitSpec("after:enter", trainable=False))
        assert any(node.writes for node in runtime.plan.nodes)
        boundary = runtime.run_prefix(x)
        before = [t.clone() for t in boundary.raw]
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(boundary), model(x))
        assert all(map(torch.equal, before, boundary.raw))


def test_a_write_that_was_not_seen_at_capture_is_an_error() -> None:
    def writes(part: Part, x: torch.Tensor) -> torch.Tensor:
        return part.inner(x.add_(1) if part.flag else x)

    model = of(writes).eval()
    runtime = prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("after:enter", trainable=False))
    model.part.flag = True
    with torch.no_grad(), pytest.raises(WitnessError, match="'Part' wrote into a tensor that it was given"):
        runtime.run_suffix(runtime.run_prefix(torch.randn(3, 4)))


def test_results_of_another_structure_are_an_error() -> None:
    model = of(lambda part, x: (x, x) if part.flag else x)
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:enter")
    model.part.flag = True
    with pytest.raises(WitnessError, match=r"the opaque part 'Part' gives \(\*, \*\), and at capture it gave \*"):
        runtime.run_suffix(runtime.run_prefix(torch.randn(3, 4)))


def test_another_rank_or_dtype_gets_a_plan_of_its_own() -> None:
    class Looks(Net):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.part(self.enter(x))
            h = h.float() * 2 if h.dtype is torch.float64 else h
            return self.leave(h if h.dim() == 2 else h.sum(0))

    def turns(part: Part, x: torch.Tensor) -> torch.Tensor:
        return [x, x.double(), x[None]][part.calls]

    model = of(turns, Looks)
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:enter")
    x = torch.randn(3, 4)
    for model.part.calls in range(3):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    assert len(runtime.plans) == 3


def test_what_is_replaced_is_noticed_and_what_is_inside_is_followed() -> None:
    model = of(_in_numpy)
    x = torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="after:enter")
    model.part.inner.weight = nn.Parameter(torch.randn(8, 8))
    model.part.drop.eval()
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    model.part.forward = lambda x: x
    with pytest.raises(ModuleError, match="'part' has another forward of its own"):
        runtime.run_suffix(runtime.run_prefix(x))
    del model.part.forward
    model.part = nn.Tanh()
    with pytest.raises(ModuleError, match="'part' was replaced, added or removed"):
        runtime.run_prefix(x)


def _stash(part: Part, x: torch.Tensor) -> torch.Tensor:
    part.kept, before = [x], part.kept
    return x + before[0] if before else x * 1


class Twice(Net):
    def forward(self, x: torch.Tensor) -> Any:
        self.part.kept = list[Any]()
        return self.leave(self.part(self.part(self.enter(x)).tanh()))


class Holder:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Given(Net):
    """Hands an object over that it makes itself."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(Holder(self.enter(x))))


class Fills(Net):
    def forward(self, x: torch.Tensor) -> Any:
        found = list[Any]()
        self.part(self.enter(x), found)
        return self.leave(found[0])


class Sets(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        self.part.scale = h.mean()
        return self.leave(self.part(h))


class Reads(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(self.enter(x)) * self.part.calls)


class Draws(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(self.enter(x))) * random.random()


HELD: dict[str, torch.Tensor] = {}


class Elsewhere(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        HELD["h"] = h
        return self.leave(self.part(h * 2) + h)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(checkpoint(self.part, self.enter(x), use_reentrant=False))


def _unlike(part: Part, x: torch.Tensor) -> torch.Tensor:
    return x * np.random.default_rng().random()


REFUSED: list[tuple[str, Callable[..., Any], type[Net]]] = [
    ("forward changes the attribute 'kept' before it calls the opaque part 'Part'", _stash, Twice),
    ("takes an object of type Holder, which a plan would freeze", lambda p, o: o.h * 2, Given),
    ("changes a list or dict that it is given", lambda p, x, found: found.append(x), Fills),
    ("forward changes the attribute 'scale' before it calls the opaque part", lambda p, x: x * p.scale, Sets),
    ("forward reads the attribute 'calls' of 'part', which an opaque part changes", _counts, Reads),
    ("forward draws from random", _draws, Draws),
    ("something in a container before it calls the opaque part", lambda p, x: HELD["h"].mul_(2) + x, Elsewhere),
    ("gives an object of type object", lambda p, x: object(), Net),
    ("gives another result when it runs again", _unlike, Net),
    ("within torch.utils.checkpoint: the backward pass runs it again", _counts, Checkpointed),
]


@pytest.mark.parametrize(("says", "does", "net"), REFUSED, ids=[r[0][:24] for r in REFUSED])
def test_what_a_part_can_not_be_is_refused_by_name(says: str, does: Callable[..., Any], net: type[Net]) -> None:
    with pytest.raises(UnsupportedError, match=says):
        prepare_split(of(does, net), (torch.randn(3, 4),), split="after:enter")


def test_a_graph_that_passes_by_the_arguments_is_refused() -> None:
    class Again(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return self.leave(self.part(self.part(self.enter(x)).tanh()))

    def keeps(part: Part, x: torch.Tensor) -> torch.Tensor:
        part.flag, first = not part.flag, not part.flag
        part.kept = [x] if first else part.kept
        return x * 1 if first else x + part.kept[0]

    with pytest.raises(UnsupportedError, match="gives a tensor that it had from elsewhere in this call"):
        prepare_split(of(keeps, Again), (torch.randn(3, 4),), split="after:enter")


def test_what_can_not_be_called_is_refused() -> None:
    for thing in (3, "post", dict):
        with pytest.raises(SpecError, match="takes a module, a class of modules, or a function"):
            ariadne.opaque(thing)


@pytest.mark.variants
def test_a_compiler_may_not_look_into_it() -> None:
    def counts(part: Part, x: torch.Tensor) -> torch.Tensor:
        part.calls += 1
        return _in_numpy(part, x)

    model, x = of(counts).eval(), torch.randn(3, 4)
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    with pytest.raises(CompileError, match="'suffix' calls the opaque part 'Part', into which no compiler may look"):
        prepare_split(model, (x,), split="after:enter", mode="compiled", compile_options=options)
    for options in ({"backend": "eager"}, {"on_compile_error": "eager", "backend": "eager"}):
        runtime = prepare_split(model, (x,), split="after:enter", mode="compiled", compile_options=options)
        for batch in (3, 5, 1):
            given = torch.randn(batch, 4)
            with torch.no_grad():
                expected, calls = model(given), model.part.calls
                assert torch.equal(runtime.run_suffix(runtime.run_prefix(given)), expected)
            assert model.part.calls == calls + 1
        states = [s.state for s in runtime.report().segments]
        assert states == ["compiled", "compiled" if len(options) == 1 else "eager"]


@ariadne.opaque
def squashed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """What a file can name."""
    return torch.from_numpy(np.tanh(x.detach().numpy())) * scale + (x if float(x.detach().sum()) > 0 else -x)


@ariadne.opaque
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Draws from Python's own generator, which is another one in another process."""
    return x * random.random()


class Named(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.part(self.enter(x), scale=2.0))


def test_a_half_names_it_and_loads_only_with_leave(tmp_path: Any) -> None:
    model = Named(squashed)
    runtime = prepare_split(model, (torch.randn(3, 4),), split="after:enter")
    runtime.save(tmp_path / "prefix", side="prefix")
    runtime.save(tmp_path / "suffix", side="suffix")
    with pytest.raises(HalfError, match=f"this half uses '{__name__}:squashed'"):
        ariadne.load(tmp_path / "suffix")
    halves = ariadne.load(tmp_path / "prefix"), ariadne.load(tmp_path / "suffix", allow=[f"{__name__}:squashed"])
    for batch in (1, 3, 9):
        x = torch.randn(batch, 4)
        assert torch.equal(halves[1].run_suffix(halves[0].run_prefix(x)), model(x))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (unsteady, "'unsteady' changes something in Python, or draws from Python's own generators"),
        (ariadne.opaque(lambda x: x * 2), "can't be named in a file"),
    ],
)
def test_what_a_file_can_not_hold_is_refused_by_name(part: Any, says: str, tmp_path: Any) -> None:
    runtime = prepare_split(Net(part), (torch.randn(3, 4),), split="after:enter")
    with pytest.raises(HalfError, match=says):
        runtime.save(tmp_path / "suffix", side="suffix")
