"""mode="compiled": one artefact for every batch, an honest account, gradients within the bound, packages that can be kept."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.ahead import Ahead, _admitted
from ariadne.ahead import _keep as keep
from ariadne.compiled import SegmentReport
from ariadne.errors import CompileError, SpecError, VerificationError, WitnessError
from ariadne.expr import Expr
from ariadne.lift import lift
from ariadne.package import Layout
from ariadne.plan import Batches
from ariadne.spec import CompileOptions
from ariadne.tracing import batch_free_layouts, tracing
from conformance.oracle import beyond, in_double
from conformance.trap_kit import numbers, same

BATCHES = (2, 1, 3, 5, 8, 17)
compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


class Graphs(list):
    """A backend that keeps the graphs that it is given, and runs them as they are."""

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.append(graph)
        return graph.forward


class Conv(nn.Module):
    """Convolutions of each kind, BatchNorm, an in-place op, a view over the batch, and a size in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, stride=2)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.norm(self.stem(x)).relu()
        x = self.pointwise(self.depthwise(x)).relu_()
        pairs = x.reshape(x.shape[0] * 2, -1)
        return {"out": self.head(self.drop(pairs.view(-1, 72))), "batch": x.shape[0]}


class Offset(nn.Module):
    """Tensors of other kinds that forward reads: a constant, a buffer, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.shift = torch.linspace(-1, 1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale + self.shift
        return self.second(x.tanh()) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class Attention(nn.Module):
    """Attention that drops out at a rate of its own, whatever the mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.second, self.rate = nn.Linear(6, 6), nn.Linear(6, 6), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(F.scaled_dot_product_attention(x, x, x, dropout_p=self.rate)))


def made(build: Any, *shape: int, boundary: str = "percent:50", train: bool = False, **options: Any) -> SplitRuntime:
    torch.manual_seed(0)
    model = build().train(train)
    spec = SplitSpec(boundary, trainable=True)
    return prepare_split(model, (numbers(4, *shape),), split=spec, mode="compiled", compile_options=options)


def halves(runtime: SplitRuntime, x: torch.Tensor) -> Any:
    return runtime.run_suffix(runtime.run_prefix(x))


def whole(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(x)


def near(model: nn.Module, x: torch.Tensor, found: Any) -> None:
    """The float64 rule."""
    reference = in_double(model, whole, x, 0)
    wrong, _ = beyond(reference, whole(model, x), found)
    assert wrong is None, str(wrong)


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


# Options, failures, report


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": 1}, "compile_options has no 'speed'; there are 'backend', 'mode', .*'cache_dir'"),
        (
            {"backend": "aot_inductor", "mode": "max-autotune"},
            "'mode' is for torch.compile; backend 'aot_inductor' takes",
        ),
        ({"backend": "aot_inductor", "options": 3}, "options is a mapping of inductor's settings"),
        ({"cache_dir": "/tmp"}, "cache_dir goes with backend 'aot_inductor'"),
        ({"backend": "aot_inductor", "cache_dir": 3}, "cache_dir is the path of a directory; found int"),
        ({"on_compile_error": "ignore"}, "on_compile_error must be 'raise' or 'eager'; found 'ignore'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        CompileOptions.parse(options)


def fails(graph: Any, example_inputs: Any) -> Any:
    raise ValueError("no such instruction")


def test_a_failure_shows_the_segment_and_what_to_try() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend=fails)
    with pytest.raises(CompileError, match=r"(?s)no such instruction.*'on_compile_error': 'eager'.*first = linear\("):
        runtime.run_prefix(numbers(2, 5))


def test_a_backward_pass_that_can_not_be_compiled_fails_with_the_forward_pass() -> None:
    def runs(graph: Any, example_inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=runs, bw_compiler=fails)
    runtime = made(Offset, 5, boundary="after:first", train=True, backend=backend)
    with pytest.raises(CompileError, match=r"(?s)no such instruction.*first = linear\("):
        runtime.run_training_prefix(numbers(2, 5))
    runtime = made(Offset, 5, boundary="after:first", train=True, backend=backend, on_compile_error="eager")
    x = numbers(2, 5)
    loss, gradients = runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=lambda y, _: y.square().sum())
    assert runtime.report().fell_back
    assert loss.item() == whole(runtime.model, x).square().sum().item()
    assert all(g is not None for g in gradients.values())


def test_falling_back_is_asked_for_exact_and_reported() -> None:
    runtime = made(Conv, 3, 8, 8, backend=fails, on_compile_error="eager")
    for batch in (1, 3):
        same(whole(runtime.model, x := numbers(batch, 3, 8, 8)), halves(runtime, x))
    report = runtime.report()
    assert report.fell_back
    assert [s.state for s in report.segments] == ["eager", "eager"]
    assert all("no such instruction" in s.notes[0] for s in report.segments)


@pytest.fixture
def one_compilation() -> Iterator[None]:
    """Set by hand: config.patch and monkeypatch put it back by deleting it first, after which torch 2.11 finds it no more."""
    config = torch._dynamo.config
    before, config.recompile_limit = config.recompile_limit, 1
    yield
    config.recompile_limit = before


@pytest.mark.usefixtures("one_compilation")
def test_giving_up_after_too_many_compilations_is_a_failure() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="eager")
    halves(runtime, numbers(3, 5))
    runtime.model.second.weight.requires_grad_(False)
    with pytest.raises(CompileError, match=r"gave up \(after 1 compilations"):
        halves(runtime, numbers(3, 5))


def test_disable_runs_eagerly_as_torch_compile_does() -> None:
    runtime = made(Offset, 5, boundary="after:first", disable=True)
    same(whole(runtime.model, x := numbers(3, 5)), halves(runtime, x))
    assert runtime.report().seconds == 0


def test_other_modes_report_that_there_is_nothing_to_compile() -> None:
    runtime = prepare_split(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), (numbers(2, 5),), split="after:0")
    assert (runtime.report().mode, runtime.report().segments) == ("generated_eager", ())


def dies(graph: Any, example_inputs: Any) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("view size is not compatible")

    return run


def test_a_first_run_that_dies_is_a_failure_too() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend=dies)
    with pytest.raises(
        CompileError, match=r"(?s)first run .* raises RuntimeError: view size.*'on_compile_error': 'eager'"
    ):
        runtime.run_prefix(numbers(2, 5))
    runtime = made(Offset, 5, boundary="after:first", backend=dies, on_compile_error="eager")
    for batch in (2, 1):
        same(whole(runtime.model, x := numbers(batch, 5)), halves(runtime, x))
    assert [s.state for s in runtime.report().segments] == ["eager", "eager"]


def test_a_first_run_that_dies_after_it_wrote_into_the_model_is_not_run_again() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return self.second(self.first(x) + self.seen)

    def late(graph: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            graph(*args)
            raise RuntimeError("too late")

        return run

    runtime = made(Counts, 5, boundary="after:first", backend=late, on_compile_error="eager")
    with pytest.raises(CompileError, match=r"(?s)too late.*had written into its arguments"):
        runtime.run_prefix(numbers(2, 5))
    assert runtime.model.seen == 1


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


def test_an_lstm_trains_whose_input_wants_no_gradient() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 4, 1, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.head(self.lstm(x)[0])}

    runtime = made(Reads, 3, 5, train=True, backend="aot_eager")
    twin = copy.deepcopy(runtime.model)
    for batch in (3, 1, 5):
        runtime.model.zero_grad(), twin.zero_grad()
        x = numbers(batch, 3, 5, seed=batch)
        found = step(runtime, x)
        twin(x)["out"].pow(2).mean().backward()
        for a, p in zip(found, twin.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-5, atol=1e-7)


# Lifting


def test_a_kernel_holds_no_table_of_the_model_and_the_shell_no_op() -> None:
    runtime = made(Offset, 5, boundary="after:first", backend="eager")
    lifted = lift(runtime._main.suffix_source, runtime.plan)
    assert not [line for line in lifted.body if "['" in line]
    assert [text for text in lifted.state if "weight" in text] == ["p_second['weight']"]
    assert lifted.batch is not None
    assert lifted.batch.endswith(".shape[0]")


# Ahead of time


@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
@compiler
def test_a_package_serves_every_batch_follows_the_model_and_is_loaded_by_the_next_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    options = {"backend": "aot_inductor", "cache_dir": packages}
    first = made(Offset, 5, boundary="after:first", **options)
    first.warmup(numbers(1, 5))
    assert [(s.state, s.batches) for s in first.report().segments] == [("compiled", ("1 to 64",))] * 2
    for batch in (*BATCHES, 64):
        near(first.model, x := numbers(batch, 5, seed=batch), halves(first, x))
    with torch.no_grad():
        first.model.first.weight.mul_(2)
        first.model.shift.add_(1)
    first.model.second.weight = nn.Parameter(numbers(4, 6, seed=1))
    near(first.model, x, halves(first, x))
    strided = numbers(10, 64).t()[:, :5]
    near(first.model, strided, halves(first, strided))
    assert first.report().recompiles == 0
    with pytest.raises(CompileError, match="'aot_inductor' serves inference"):
        first.run_training_prefix(x)

    second = made(Offset, 5, boundary="after:first", **options)
    near(second.model, x, halves(second, x))
    assert [(s.state, s.loaded) for s in second.report().segments] == [("loaded", 1)] * 2

    card = next(packages.glob("*.json"))
    package = card.with_suffix(".pt2")
    package.write_bytes(package.read_bytes()[:-1] + b"\0\1")
    third = made(Offset, 5, boundary="after:first", on_compile_error="eager", **options)
    near(third.model, x, halves(third, x))
    assert sorted(s.state for s in third.report().segments) == ["compiled", "loaded"]
    assert any("its bytes are not those that were written" in n for s in third.report().segments for n in s.notes)
    for card in packages.glob("*.json"):
        card.write_text(json.dumps({**json.loads(card.read_text()), "name": "0" * 64}))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    fourth = made(Offset, 5, boundary="after:first", **options)
    with pytest.raises(CompileError, match="AOTInductor refused"):
        fourth.run_prefix(x)
    assert any("it was made for something else" in note for note in fourth.report().segments[0].notes)


@compiler
@pytest.mark.compiler
def test_a_package_takes_several_tensors_that_share_the_batch() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x.relu()) + x

    runtime = made(Residual, 5, boundary="cut:2", backend="aot_inductor")
    assert len(runtime.candidates[1].live) == 2
    for batch in (2, 1, 7):
        near(runtime.model, x := numbers(batch, 5), halves(runtime, x))
    assert [sum(s.compiled.values()) for s in runtime.report().segments] == [1, 1]


@pytest.mark.parametrize(
    ("build", "sizes", "train", "words"),
    [
        (Conv, (3, 8, 8), True, "writes into|random numbers"),
        (Conv, (3, 8, 8), False, None),
        (partial(Attention, 0.5), (4, 6), False, "draws random numbers"),
        (partial(Attention, 0.0), (4, 6), False, None),
    ],
)
def test_what_native_code_can_not_do_is_refused_before_the_compiler_runs(
    build: Any, sizes: tuple[int, ...], train: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def stopped(*args: Any, **options: Any) -> Any:
        ran.append(args)
        raise RuntimeError("the compiler was reached")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", stopped)
    runtime = made(build, *sizes, train=train, backend="aot_inductor")
    with pytest.raises(CompileError, match=words or "the compiler was reached"):
        halves(runtime, numbers(2, *sizes))
    assert bool(ran) == (words is None)


def test_batches_for_which_the_compiler_s_assumptions_fail_are_not_admitted() -> None:
    import sympy  # noqa: PLC0415 - torch's own dependency

    s, t, u, v = (sympy.Symbol(name, integer=True) for name in "stuv")

    class Guard:
        def __init__(self, expr: Any) -> None:
            self.expr = expr

    class Env:
        def __init__(self, *guards: Any) -> None:
            self.guards, self.var_to_range = [Guard(g) for g in guards], {}
            self.replacements: dict[Any, Any] = {u: s}

    one, both = {s: Expr("B")}, {s: Expr("B"), t: Expr("2*B")}
    assert _admitted(Env(s < 16), one, "B", Batches(((1, 64),))) == Batches(((1, 15),))
    assert _admitted(Env(sympy.Eq(s % 8, 0)), one, "B", Batches(((1, 20),))) == Batches(((8, 8), (16, 16)))
    assert _admitted(Env(sympy.Eq(s * 2, t), t < 9), both, "B", Batches(((1, 64),))) == Batches(((1, 4),))
    assert _admitted(Env(sympy.Eq(u, s), u > 2), one, "B", Batches(((1, 9),))) == Batches(((3, 9),))
    assert not _admitted(Env(s < v), one, "B", Batches(((1, 64),)))
    # A size that was fixed to the example's, or to twice another: torch writes it into the guard, which is then true.
    fixed, tied = Env(sympy.Eq(s * 32, 256)), Env()
    fixed.replacements |= {s: sympy.Integer(8)}
    tied.replacements |= {t: s + 4}
    assert _admitted(fixed, one, "B", Batches(((1, 64),))) == Batches(((8, 8),))
    assert _admitted(tied, both, "B", Batches(((1, 64),))) == Batches(((4, 4),))
    assert not _admitted(Env(), {}, "B", Batches(((1, 64),)))
    # A size that follows data: open; taken for a number, for the batch, for another such size.
    assert _admitted(Env(s < 16), one, "B", Batches(((1, 64),)), [v]) == Batches(((1, 15),))
    number = Env()
    number.replacements |= {v: sympy.Integer(6)}
    assert not _admitted(number, one, "B", Batches(((1, 64),)), [v])
    assert not _admitted(Env(), one, "B", Batches(((1, 64),)), [s])
    assert not _admitted(Env(), one, "B", Batches(((1, 64),)), [v, v])
    assert not _admitted(Env(), one, "B", Batches(((1, 64),)), [2 * v])


def taking(sizes: tuple[Any, ...], folder: Path | None = None) -> Ahead:
    """A kernel of one input of these sizes, for batches 1 to 64, that was compiled for nothing yet."""
    lifted = SimpleNamespace(
        inputs=["x"],
        sizes={"x": sizes},
        symbol="B",
        batch="x.shape[0]",
        has_witness=False,
        name="prefix",
        kernel=lambda **_: SimpleNamespace(text=""),
    )
    plan = SimpleNamespace(batches=Batches(((1, 64),)), objects=(), signature="p")
    report = SegmentReport("prefix", "cut:1")
    options = SimpleNamespace(cache_dir=folder, given={}, on_error="raise")
    return Ahead(lifted, plan, "prefix", options, report, None, CompileError, threading.RLock())  # type: ignore[arg-type]


@pytest.fixture
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A compiler that makes nothing, for all batches; what it was asked for: the layouts of the inputs, and how the state lies."""
    asked: list[Any] = []

    def quick(self: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, *more: Any) -> Any:
        asked.append((layouts, [t.stride() for t in state]))
        return lambda tensors: [t.clone() for t in tensors], served

    monkeypatch.setattr(Ahead, "_compile", quick)
    return asked


@pytest.mark.parametrize(
    ("batch", "shape", "words"),
    [
        (3, (3, 4), r"'x' has size 4 in dim 1, where capture saw 5 \(here 5\)"),
        (3, (2, 5), r"'x' has size 2 in dim 0, where capture saw B \(here 3\)"),
    ],
)
def test_native_code_is_given_no_fewer_elements_than_it_reads(
    batch: int, shape: tuple[int, ...], words: str, compiled_for: list[Any]
) -> None:
    ahead = taking((Expr("B"), 5))
    with torch.no_grad():
        ahead(3, torch.ones(3, 5))
        ahead(7, torch.ones(7, 5))
        with pytest.raises(CompileError, match=words):
            ahead(batch, torch.ones(shape))
    assert len(compiled_for) == 1


def test_a_size_that_follows_data_is_open_from_2_on(compiled_for: list[Any]) -> None:
    ahead = taking((Expr("B"), Expr("k")))
    with torch.no_grad():
        for batch, size in ((3, 4), (3, 9), (2, 2), (3, 1), (5, 1), (3, 0), (3, 4)):
            ahead(batch, torch.ones(batch, size))
    assert [layouts[0].sizes for layouts, _ in compiled_for] == [(Expr("B"), n) for n in (None, 1, 0)]


def test_native_code_reads_the_model_s_tensors_as_they_lay_when_it_was_compiled(compiled_for: list[Any]) -> None:
    ahead = taking((Expr("B"), 5))
    wide = numbers(4, 10)
    part, x = wide[:, :5], torch.ones(3, 5)
    with torch.no_grad():
        for state in (part, part.contiguous(), part, wide[:, 5:], numbers(4, 5)):
            found = ahead(3, x, state)[1]
            assert torch.equal(found, state)
    assert [state for _, state in compiled_for] == [[(10, 1)], [(5, 1)]]
    assert ahead.report.recompiles == 1


@pytest.mark.compiler
@compiler
def test_a_tensor_of_the_model_that_lies_otherwise_is_compiled_for_anew() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 5)
            self.register_buffer("part", numbers(4, 10)[:, :5])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()) @ self.part.t()

    runtime = made(Narrow, 5, boundary="after:first", backend="aot_inductor")
    x, part = numbers(3, 5), runtime.model.part
    for state in (part, part.contiguous(), part):
        runtime.model.part = state
        near(runtime.model, x, halves(runtime, x))
    assert runtime.report().recompiles == 1


def test_what_is_compiled_serves_though_it_can_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").write_text("a file in its place")
    monkeypatch.setattr("ariadne.ahead._loaded", lambda path: lambda tensors: tensors[:1])
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, package_path, **_: None)
    runtime = made(Offset, 5, boundary="after:first", backend="aot_inductor", cache_dir=tmp_path / "packages")
    with torch.no_grad():
        assert len(runtime.run_prefix(numbers(2, 5)).tensors)
    assert any(note.startswith("not kept for the next process: ") for note in runtime.report().segments[0].notes)


def test_packages_that_serve_few_batches_are_kept_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def few(
        self: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, hint: int, folder: Path, name: str
    ) -> Any:
        compiled.append(hint)
        (made := tmp_path / "made").write_bytes(b"code")
        keep(folder, name, str(made), Batches.of([hint]))
        return print, Batches.of([hint])

    monkeypatch.setattr(Ahead, "_compile", few)
    monkeypatch.setattr("ariadne.ahead._loaded", lambda path: print)
    for batches in ((2, 3), (2, 3), (3, 2)):
        ahead = taking((Expr("B"), 5), tmp_path / "packages")
        for batch in batches:
            x = torch.ones(batch, 5)
            assert batch in ahead._find(batch, [x], [], None).batches  # type: ignore[union-attr]
    assert compiled == [2, 3]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_inputs_are_laid_out_as_a_package_expects_them_at_every_batch(form: torch.memory_format) -> None:
    example = torch.empty(2, 3, 4, 5).to(memory_format=form)
    layout = Layout.of(example, (Expr("B"), 3, 4, 5))
    for batch in (1, 2, 7):
        t = numbers(batch, 3, 4, 5)
        laid = layout.lay(t)
        assert torch.equal(laid, t)
        assert laid.stride() == torch.empty(batch, 3, 4, 5).to(memory_format=form).stride() or batch == 1
        assert layout.lay(laid) is laid


@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
@compiler
def test_inductor_compiles_each_side_once_and_stays_within_the_float64_bound() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": super().forward(x)}

    def build() -> nn.Module:
        return Net(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    runtime = made(build, 5, train=True)
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
    whole_range = made(Attends, 6, 8)
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
