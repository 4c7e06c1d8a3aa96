"""mode="compiled": one artefact for every batch, an honest account, gradients within the bound."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.compiled.lift import lift
from ariadne.compiled.tracing import batch_free_layouts, tracing
from ariadne.errors import VerificationError, WitnessError
from ariadne.guards import VERSION
from conformance.suite.oracle import beyond
from conformance.unit.compiled_kit import BATCHES, Conv, Offset, compiler, halves, made, near, whole
from conformance.unit.trap_kit import numbers, same


class Graphs(list):
    """A backend that keeps the graphs that it is given, and runs them as they are."""

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.append(graph)
        return graph.forward


def step(runtime: SplitRuntime, x: torch.Tensor) -> list[torch.Tensor | None]:
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out["out"].pow(2).mean())
    runtime.backward_prefix(boundary, gradients)
    return [p.grad for p in runtime.model.parameters()]


# One artefact for every batch


@pytest.mark.parametrize("first", [1, 4])
def test_one_graph_for_each_side_serves_every_batch_whichever_came_first(first: int) -> None:
    graphs = Graphs()
    runtime = made(Conv, 3, 8, 8, backend=graphs)
    runtime.warmup(numbers(first, 3, 8, 8))
    for batch in BATCHES:
        same(whole(runtime.model, x := numbers(batch, 3, 8, 8, seed=batch)), halves(runtime, x))
    assert len(graphs) == 2
    report = runtime.report()
    assert (report.recompiles, [s.compiled for s in report.segments]) == (0, [{False: 1, True: 0}] * 2)


class OfItsOwn(nn.Module):
    """A batch of one goes another way, or no way."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.refuses = nn.Linear(6, 6), nn.Linear(6, 6), refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1 and self.refuses:
            raise ValueError("one sample is too few")
        x = self.first(x)
        return self.second(x.sin().cos() if x.shape[0] == 1 else x.relu())


@pytest.mark.parametrize("first", [1, 4])
def test_a_warm_up_compiles_what_a_batch_of_one_needs_too(first: int) -> None:
    graphs = Graphs()
    runtime = made(OfItsOwn, 6, backend=graphs)
    runtime.warmup(numbers(first, 6))
    assert len(graphs) == 4
    for batch in BATCHES:
        same(whole(runtime.model, x := numbers(batch, 6, seed=batch)), halves(runtime, x))
    assert len(graphs) == 4


def test_a_batch_of_one_that_the_model_refuses_is_a_note_of_the_warm_up() -> None:
    runtime = made(lambda: OfItsOwn(refuses=True), 6, backend="eager")
    runtime.warmup(numbers(4, 6))
    assert "not warmed up at batch 1: ValueError: one sample is too few" in str(runtime.report())
    same(whole(runtime.model, x := numbers(3, 6)), halves(runtime, x))


def test_training_compiles_once_more_and_gives_the_gradients_of_the_model_at_every_batch() -> None:
    runtime = made(Conv, 3, 8, 8, train=True, backend="eager")
    twin = copy.deepcopy(runtime.model)
    for batch in BATCHES:
        runtime.model.zero_grad(), twin.zero_grad()
        x = numbers(batch, 3, 8, 8, seed=batch)
        torch.manual_seed(batch)
        found = step(runtime, x)
        torch.manual_seed(batch)
        twin(x)["out"].pow(2).mean().backward()
        same([p.grad for p in twin.parameters()], found, f"batch {batch}")
        same(dict(twin.named_buffers()), dict(runtime.model.named_buffers()), f"batch {batch}")
    assert runtime.report().recompiles == 0
    assert [s.compiled for s in runtime.report().segments] == [{False: 0, True: 1}] * 2


def test_tensors_of_every_kind_are_followed() -> None:
    graphs = Graphs()
    runtime = made(Offset, 5, boundary="after:first", backend=graphs)
    x = numbers(3, 5)
    same(whole(runtime.model, x), halves(runtime, x))
    with torch.no_grad():
        runtime.model.first.weight.mul_(2)
        runtime.model.scale.add_(1)
        runtime.model.shift.add_(1)
    runtime.model.second.weight = nn.Parameter(numbers(4, 6, seed=1))
    same(whole(runtime.model, x), halves(runtime, x))
    assert len(graphs) == 2


def test_what_torch_can_not_serve_with_one_graph_is_compiled_again_and_counted() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="eager")
    x = numbers(3, 5)
    halves(runtime, x)
    runtime.model.second.weight.requires_grad_(False)  # one of torch's guards
    for _ in range(2):
        same(whole(runtime.model, x), halves(runtime, x))
    report = runtime.report()
    assert [s.recompiles for s in report.segments] == [0, 1]
    assert "1 recompiled" in str(report)


def test_a_value_read_out_of_a_tensor_is_still_watched() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if bool((x < 1e6).all()) else x

    runtime = made(Reads, 5, boundary="after:first", backend="eager")
    for batch in (2, 3):
        same(whole(runtime.model, x := numbers(batch, 5)), halves(runtime, x))
    with pytest.raises(Exception, match="reads a value out of a tensor"):
        halves(runtime, torch.full((2, 5), 1e12))


def test_torch_s_settings_are_put_back() -> None:
    before = torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format
    with batch_free_layouts():
        assert torch._C._select_conv_backend is not before[0]
    assert (torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format) == before


def test_graphs_that_torch_keeps_on_disk_are_told_apart_from_those_made_under_other_settings() -> None:
    config = torch.compiler.config
    with config.patch(cache_key_tag="mine"):
        with tracing(False):
            assert config.cache_key_tag.startswith("mine ariadne")
        assert config.cache_key_tag == "mine"


# What would break a graph, or make torch guess


class Parts(nn.Module):
    """Attention over parts of one projection, which cross the cut with strides that follow from no size, under a mask
    whose rows are strided; `split` and `&` are called by bindings that torch's tracer does not know."""  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.project, self.end = nn.Linear(12, 36), nn.Linear(12, 12)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 48).view(4, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).view(x.shape[0], 4, 3, 3, 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v, self.bias.permute(2, 0, 1).unsqueeze(0))
        left, right = torch.split(x.transpose(1, 2).reshape(-1, 4, 12), 6, 2)
        positive = (left > 0) & (right > 0)
        return self.end(torch.cat((left, right), 2)) + positive.sum(2, keepdim=True)


@pytest.mark.parametrize("first", [1, 3])
def test_parts_of_a_larger_tensor_cross_the_cut(first: int) -> None:
    runtime = made(Parts, 4, 12, backend="aot_eager")
    runtime = runtime.resplit(next(c for c in runtime.candidates if len(c.live) == 3))
    halves(runtime, numbers(first, 4, 12))
    for batch in BATCHES:
        near(runtime.model, x := numbers(batch, 4, 12, seed=batch), halves(runtime, x))
    assert runtime.report().recompiles == 0


def test_bindings_that_torch_s_tracer_does_not_know_break_no_graph() -> None:
    graphs = Graphs()
    runtime = made(Parts, 4, 12, backend=graphs)
    for batch in BATCHES:
        same(whole(runtime.model, x := numbers(batch, 4, 12, seed=batch)), halves(runtime, x))
    assert len(graphs) == 2


def test_strides_that_change_are_compiled_for_once_more_and_then_left_open() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="aot_eager")
    for columns in (7, 9, 11, 13):
        for batch in (3, 2):
            near(runtime.model, x := numbers(batch, columns)[:, :5], halves(runtime, x))
    assert [s.recompiles for s in runtime.report().segments] == [1, 0]


def test_what_has_no_elements_crosses_the_cut() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            none, x = x[:, :0], self.first(x)
            return torch.cat((none, self.second(x), none), 1)

    runtime = made(Empty, 5, boundary="after:first", backend="aot_eager")
    for batch in BATCHES:
        same(whole(runtime.model, x := numbers(batch, 5)), halves(runtime, x))
    assert runtime.report().recompiles == 0


class Looks(nn.Module):
    """Reads a number that is the same for all inputs, one that hangs on the input, and all numbers of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale.item()
        if bool((x < 1e6).all()):
            x = x * 2
        return self.second(x) * sum(self.scale.view(1).tolist())


def test_numbers_that_python_reads_break_no_graph_and_are_still_watched() -> None:
    graphs = Graphs()
    runtime = made(Looks, 5, backend=graphs)
    for batch in BATCHES:
        same(whole(runtime.model, x := numbers(batch, 5, seed=batch)), halves(runtime, x))
    assert len(graphs) == 2
    with pytest.raises(WitnessError, match="it was True, now it is False"):
        halves(runtime, torch.full((2, 5), 1e12))
    runtime.model.scale.fill_(0.5)
    with pytest.raises(WitnessError, match=r"it was 0\.69.*, now it is 0\.5"):
        halves(runtime, x)


class Shaped(nn.Module):
    """Computes with a tensor that holds a shape, as code for ONNX does, and gives it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.second(self.first(x))
        shape = torch._shape_as_tensor(x)
        return x * shape[1:].sum() * shape.shape[0], shape


def test_a_shape_in_a_tensor_breaks_no_graph() -> None:
    graphs = Graphs()
    runtime = made(Shaped, 3, 5, backend=graphs)
    for batch in (4, 1):
        same(whole(runtime.model, x := numbers(batch, 3, 5, seed=batch)), halves(runtime, x))
    assert len(graphs) == 2


class WeightsAlone(nn.Module):
    """An LSTM whose weights want gradients, and not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.head(self.lstm(x)[0])}


class StateAlone(nn.Module):
    """A frozen LSTM whose first state wants gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.lstm = nn.LSTM(5, 4, 2, batch_first=True).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.encoder(x[:, :2]).transpose(0, 1)
        return {"out": self.head(self.lstm(x, (state, state))[0])}


class FirstToken(nn.Module):
    """The first of three tokens; cut behind it, what crosses is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.head(self.first(x).tanh()[:, 0])}


def recurrent(kind: Any) -> Any:
    """Dropout between layers, and in place on what is not contiguous."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 6), nn.Linear(8, 3)
            self.forth = kind(6, 4, 3, dropout=0.5, bidirectional=True)
            self.back = kind(8, 8, 2, dropout=0.3, batch_first=True, bias=False)
            self.drop = nn.Dropout(0.3, inplace=True)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            states, last = self.forth(self.first(x).transpose(0, 1))
            states, last = self.back(states.transpose(0, 1))
            return {"out": self.head(self.drop(2 * states)) + (last[0] if kind is nn.LSTM else last).sum()}

    return Drops


def seeded(run: Any, of: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What it returns from one state of the generator, and the state afterwards."""
    torch.manual_seed(7)
    return run(of, x), torch.get_rng_state()


@pytest.mark.parametrize(
    ("build", "boundary"),
    [
        pytest.param(WeightsAlone, "percent:50", id="an LSTM whose weights alone want gradients"),
        pytest.param(StateAlone, "after:encoder", id="an LSTM whose state alone wants gradients"),
        pytest.param(FirstToken, "cut:3", id="a token out of three"),
        pytest.param(recurrent(nn.LSTM), "after:forth", id="dropout between layers of an LSTM"),
        pytest.param(recurrent(nn.GRU), "after:forth", id="dropout between layers of a GRU"),
        pytest.param(recurrent(nn.RNN), "after:forth", id="dropout between layers of an RNN"),
    ],
)
def test_training_and_inference_in_train_mode_are_the_models_at_batch_1_too(build: Any, boundary: str) -> None:
    def whole_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
        model(x)["out"].pow(2).mean().backward()
        return [p.grad for p in model.parameters()]

    runtime = made(build, 3, 5, train=True, boundary=boundary, backend="aot_eager")
    twin = copy.deepcopy(runtime.model)
    for batch in (3, 1, 4):
        x = numbers(batch, 3, 5, seed=batch)
        runtime.model.zero_grad(), twin.zero_grad()
        for run, ours in ((whole_step, step), (whole, halves)):
            expected, state = seeded(run, twin, x)
            found, ours_state = seeded(ours, runtime, x)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours_state, state)


# Lifting


def test_a_kernel_holds_no_table_of_the_model_and_the_shell_no_op() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="eager")
    lifted = lift(runtime._main.suffix_source, runtime.plan)
    assert not [line for line in lifted.body if "['" in line]
    assert [text for text in lifted.state if "weight" in text] == ["p_second['weight']"]
    assert lifted.batch is not None
    assert lifted.batch.endswith(".shape[0]")


def still(model: nn.Module) -> None:
    pass


def rescaled(model: nn.Module) -> None:
    model.scale = torch.full((6,), 3.0)


def shifted(model: nn.Module) -> None:
    model.shift = torch.full((6,), 2.0)


def reweighted(model: nn.Module) -> None:
    model.second._parameters["weight"] = nn.Parameter(torch.ones(4, 6))


@pytest.mark.skipif(VERSION is None, reason="dicts of this Python don't tell when they are written")
def test_the_state_of_a_kernel_is_looked_for_again_once_a_dict_was_written_and_not_before() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="eager")
    lifted = lift(runtime._main.suffix_source, runtime.plan)
    read = lifted.reader()
    assert read is not None
    looks: list[int] = []
    look = read.look
    read.look = lambda: (looks.append(1), look())[1]
    for change in (still, rescaled, still, shifted, reweighted):
        change(runtime.model)
        for _ in range(2):
            assert all(map(operator.is_, read(), lifted.read()))
    assert len(looks) == 4, "one for each change, and the first"
    constants = replace(
        lifted, source=replace(lifted.source, namespace={**lifted.source.namespace, "p_second": _Table()})
    )
    assert constants.reader() is None, "a table of another kind, which tells nothing"


class _Table(dict):
    """No plain dict."""


@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
@compiler
def test_inductor_compiles_each_side_once_and_stays_within_the_float64_bound() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": super().forward(x)}

    def build() -> nn.Module:
        return Net(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    runtime = made(build, 5, train=True, backend="inductor")
    twin = copy.deepcopy(runtime.model)

    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
        torch.manual_seed(3)
        model.zero_grad()
        model(x)["out"].pow(2).mean().backward()
        return [p.grad for p in model.parameters()]

    # A bias has 3 elements, whose errors are three draws: of twelve steps together, the ratio of two RMS says something.
    steps: list[list[list[torch.Tensor | None]]] = []
    for seed in range(3):
        for batch in (4, 1, 2, 8):
            x = numbers(batch, 5, seed=10 * seed + batch)
            runtime.model.zero_grad()
            torch.manual_seed(3)
            found = step(runtime, x)
            steps.append([gradients(copy.deepcopy(twin).double(), x.double()), gradients(twin, x), found])
    exact, eager, mine = ([torch.stack(leaf) for leaf in zip(*runs, strict=True)] for runs in zip(*steps, strict=True))
    wrong, _ = beyond(exact, eager, mine)
    assert wrong is None, wrong
    assert runtime.report().recompiles == 0


class Attends(nn.Module):
    """Windows whose counts are 1 cross the cut and are joined; the first of each sample is taken, and the mean of some."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = self.inner(x).reshape(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 6, 8)
        windows = h.reshape(-1, 1, 2, 1, 3, 8).permute(0, 1, 3, 2, 4, 5).contiguous()
        h = h + self.outer(windows.flatten(0, 1).flatten(2, 3).flatten(1, 2))
        rest = self.pool(h.reshape(-1, 3, 2, 8).permute(0, 3, 1, 2)).flatten(1)
        return {"out": self.head(h[:, 0] + rest)}


@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
@compiler
@pytest.mark.parametrize("crosses", ["inner", "contiguous", "add"])
def test_inductor_compiles_attention_once_for_every_batch(crosses: str) -> None:
    whole_range = made(Attends, 6, 8, backend="inductor")
    runtime = whole_range.resplit(next(c for c in whole_range.candidates if any(crosses in name for name in c.live)))
    runtime.warmup(numbers(2, 6, 8))
    for batch in (2, 1, 3, 8):
        x = numbers(batch, 6, 8, seed=batch)
        near(runtime.model, x, halves(runtime, x))
    assert runtime.report().recompiles == 0


UNSEEN = torch.Tensor.register_hook  # taken before anything records, as a library may


class Hooked(nn.Module):
    """A hook on a tensor, put there past all that is watched: it changes gradients, and no op shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 2)."""
        y = self.first(x)
        if y.requires_grad:
            UNSEEN(y, lambda g: g * 3)
        return self.last(y.relu())


def test_gradients_are_held_against_the_models_before_anything_is_compiled() -> None:
    with pytest.raises(VerificationError, match="the gradients through the split at cut:1 differ"):
        prepare_split(
            Hooked(),
            (torch.randn(3, 4),),
            split=SplitSpec("50%", trainable=True),
            mode="compiled",
            compile_options={"backend": "eager"},
        )
