"""Graphs of a kernel: what is recorded, when it is played, and when it must not be. On a CPU, where the recording is a rerun."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.compiled import graphs, jit

Make = Callable[..., SplitRuntime]
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}] if HERE.type == "cuda" else [{"backend": "eager"}]


@pytest.fixture(params=OPTIONS, ids=str)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Prepares a model whose kernels are recorded. Where there is no CUDA, to play one is to run it again where its memory is."""

    def capture(self: graphs.Graphs, device: torch.device, args: tuple[Any, ...]) -> tuple[Callable[[], None], Any]:
        before = [(t, t.clone()) for t in args[self.inputs :]]
        results = self.run(*args)
        for t, was in before:  # while it is recorded, nothing is run
            t.copy_(was)
        for t in results:
            part(t).fill_(float("nan"))
        then = [same_memory(t) for t in args]  # a graph reads where they were, and as they lay

        def replay() -> None:
            for into, of in zip(results, self.run(*then), strict=True):
                part(into).copy_(part(of))

        return replay, results

    def same_memory(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return nn.Parameter(t.data, t.requires_grad) if isinstance(t, nn.Parameter) else t.data  # it counts no writes

    def part(t: Tensor) -> Tensor:
        return graphs._spans([(0, t)])[0].piece(t)

    if HERE.type == "cpu":
        monkeypatch.setattr(graphs, "DEVICE", "cpu")
        monkeypatch.setattr(graphs.Graphs, "_capture", capture)
        monkeypatch.setattr(jit, "cuda_graphs", lambda options: True)
        monkeypatch.setattr(jit, "_without_graphs", dict)

    def prepared(model: nn.Module, *inputs: Tensor, **options: Any) -> SplitRuntime:
        spec = SplitSpec(options.pop("boundary", "percent:50"), dynamic_batch=(1, 64), **options)
        return prepare_split(model, inputs, split=spec, mode="compiled", compile_options=request.param)

    return prepared


def equal(found: Tensor, expected: Tensor, runtime: SplitRuntime) -> bool:
    """Bit for bit, but for what a compiler wrote."""
    assert found.device.type == HERE.type
    exact = (runtime.settings.compile_options or {}).get("mode") is None
    return torch.equal(found, expected) if exact else torch.allclose(found, expected, atol=1e-4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).eval().to(HERE)


def randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device=HERE)


def call(runtime: SplitRuntime, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return runtime.run_suffix(runtime.run_prefix(*inputs))


def counts(runtime: SplitRuntime) -> list[int]:
    return [s.recorded for s in runtime.report().segments]


def test_a_size_is_recorded_when_it_comes_again_and_played_from_then_on(recorded: Make) -> None:
    model = net()
    runtime = recorded(model, randn(2, 4))
    for batch in (2, 2, 2, 5, 2, 5, 5):
        x = randn(batch, 4)
        with torch.no_grad():
            assert equal(call(runtime, x), model(x), runtime)
    assert counts(runtime) == [2, 2]
    assert "2 CUDA graphs" in str(runtime.report())


def test_boundaries_and_results_of_earlier_calls_stay_what_they_were(recorded: Make) -> None:
    model = net()
    runtime = recorded(model, randn(2, 4))
    inputs = [randn(2, 4) for _ in range(5)]
    with torch.no_grad():
        boundaries = [runtime.run_prefix(x) for x in inputs]
        results = [runtime.run_suffix(b) for b in reversed(boundaries)]
        for x, found in zip(reversed(inputs), results, strict=True):
            assert equal(found, model(x), runtime)
    assert counts(runtime) == [1, 1]


def test_weights_that_are_written_are_followed_and_weights_elsewhere_recorded_anew(recorded: Make) -> None:
    model = net()
    runtime, x = recorded(model, randn(2, 4)), randn(2, 4)
    changes: list[Callable[[], Any]] = [
        lambda: model[0].weight.data.mul_(2),
        lambda: setattr(model[3].weight, "data", randn(4, 4)),
        lambda: setattr(model[3].weight, "data", model[3].weight.data.t()),
        lambda: model.load_state_dict({k: v.clone() + 1 for k, v in model.state_dict().items()}, assign=True),
    ]
    for change in changes:
        for _ in range(3):
            call(runtime, x)
        change()
        with torch.no_grad():
            assert equal(call(runtime, x), model(x), runtime)
    assert sum(counts(runtime)) > 4


def test_weights_that_move_at_each_call_are_not_recorded_for_ever(recorded: Make) -> None:
    model = net()
    runtime, x = recorded(model, randn(2, 4)), randn(2, 4)
    for _ in range(12):
        model[0].weight.data = model[0].weight.data.clone() + 1
        with torch.no_grad():
            assert equal(call(runtime, x), model(x), runtime)
    prefix, suffix = runtime.report().segments
    assert prefix.recorded <= graphs.MOVES + 1
    assert suffix.recorded == 1
    assert any("tensors of the model moved" in note for note in prefix.notes)


def test_torch_s_settings_are_part_of_what_is_recorded(recorded: Make) -> None:
    runtime, x = recorded(net(), randn(2, 4)), randn(2, 4)
    for _ in range(3):
        call(runtime, x)
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = not before
        for _ in range(2):
            call(runtime, x)
    finally:
        torch.backends.cudnn.benchmark = before
    assert counts(runtime) == [2, 2]


class Written(nn.Module):
    """Its suffix writes into what crosses, or into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        h.add_(1)
        return y + h


class Drawn(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        return self[3](h + torch.rand_like(h))


def test_kernels_that_write_into_what_they_are_given_or_draw_are_not_recorded(recorded: Make) -> None:
    for model, why in ((Written(), "which it is given"), (Drawn(*net()), "it draws random numbers")):
        boundary = "after:a" if isinstance(model, Written) else "after:0"
        runtime = recorded(model, randn(2, 4), boundary=boundary)
        for _ in range(4):
            x = randn(2, 4)
            torch.manual_seed(1)
            found = call(runtime, x)
            torch.manual_seed(1)
            with torch.no_grad():
                assert equal(found, model(x), runtime)
        prefix, suffix = runtime.report().segments
        assert (prefix.recorded, suffix.recorded) == (1, 0)
        assert any(why in note for note in suffix.notes)


def test_training_is_never_played(recorded: Make) -> None:
    model = net().train()
    twin = copy.deepcopy(model)
    runtime = recorded(model, randn(2, 4), trainable=True)
    for _ in range(4):
        x = randn(3, 4)
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda y, _: y.square().sum())
        runtime.backward_prefix(boundary, boundary_grads=gradients)
        other = twin(x).square().sum()
        other.backward()
        assert equal(loss, other, runtime)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert equal(p.grad, q.grad, runtime)  # type: ignore[arg-type]
    assert counts(runtime) == [0, 0]


def test_buffers_that_a_kernel_writes_are_written_once_a_call(recorded: Make) -> None:
    model = net().train()
    twin = copy.deepcopy(model)
    runtime = recorded(model, randn(2, 4))
    for _ in range(6):
        x = randn(3, 4)
        with torch.no_grad():
            assert equal(call(runtime, x), twin(x), runtime)
    for name, b in model.state_dict().items():
        assert equal(b, twin.state_dict()[name], runtime), name


def test_a_graph_s_writes_into_buffers_are_counted_as_an_op_s_are(recorded: Make) -> None:
    model = net().train()
    runtime = recorded(model, randn(2, 4))
    for _ in range(5):
        before = model[1].num_batches_tracked._version
        call(runtime, randn(3, 4))
        assert model[1].num_batches_tracked._version > before
    assert 1 in counts(runtime)


class Views(nn.Module):
    """What crosses: an expanded tensor, a slice with gaps, a transposed one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 12).to(HERE), nn.Linear(4, 4).to(HERE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        mean = q.mean(-1, keepdim=True).expand(-1, 4)
        h = self.b(v)
        return h * mean + (k.t() @ h.t().t()).sum() * 0 + q + k


def test_tensors_lie_as_they_did_where_a_graph_reads_them(recorded: Make) -> None:
    model = Views().eval()
    for boundary in ("percent:30", "percent:50", "percent:70"):
        runtime = recorded(model, randn(2, 4), boundary=boundary)
        for batch in (2, 2, 2, 3, 3, 3, 3):
            x = randn(batch, 4)
            with torch.no_grad():
                assert equal(call(runtime, x), model(x), runtime)
        assert min(counts(runtime)) > 0, str(runtime.report())


def test_inference_mode_and_no_grad_take_turns(recorded: Make) -> None:
    model = net()
    runtime = recorded(model, randn(2, 4))
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode) * 3:
        with mode():
            x = randn(2, 4)
            found = runtime.run_suffix(runtime.run_prefix(x))
            assert equal(found, model(x), runtime)
            assert found.is_inference() == (mode is torch.inference_mode)


def test_no_more_sizes_are_recorded_than_memory_is_meant_for(recorded: Make) -> None:
    model = net()
    runtime = recorded(model, randn(2, 4))
    for batch in [*range(1, 40)] * 3:
        x = randn(batch, 4)
        with torch.no_grad():
            assert equal(call(runtime, x), model(x), runtime)
    assert counts(runtime) == [graphs.MOST, graphs.MOST]


class Inverse(nn.Module):
    """Its suffix looks at the device, which can't be recorded, and no plan tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.linalg.inv(torch.eye(4, device=HERE) * 3 + h.t() @ h))


def test_what_fails_while_it_is_recorded_runs_as_before_and_leaves_nothing_behind(
    recorded: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Inverse().eval()
    runtime = recorded(model, randn(2, 4), boundary="after:a")
    if HERE.type == "cpu":
        capture = graphs.Graphs._capture

        def failing(self: graphs.Graphs, *given: Any) -> Any:
            if self.report is runtime.report().segments[1]:
                raise RuntimeError("operation not permitted when stream is capturing")
            return capture(self, *given)

        monkeypatch.setattr(graphs.Graphs, "_capture", failing)
    for _ in range(5):
        x = randn(2, 4)
        with torch.no_grad():
            assert equal(call(runtime, x), model(x), runtime)
    prefix, suffix = runtime.report().segments
    if HERE.type == "cpu" or suffix.recorded == 0:  # a compiler may have an inverse that does not look
        assert any("recording failed" in note for note in suffix.notes), suffix.notes
        assert (prefix.recorded, suffix.recorded) == (1, 0)
    other = recorded(net(), randn(2, 4))
    for _ in range(3):
        call(other, randn(2, 4))
    assert counts(other) == [1, 1]


def test_weights_that_autocast_keeps_cast_are_not_what_a_graph_reads(recorded: Make) -> None:
    model = net()
    runtime = recorded(model, randn(2, 4))
    for _ in range(2):
        with torch.autocast(HERE.type, torch.bfloat16):
            for _ in range(3):
                x = randn(2, 4)
                with torch.no_grad():
                    found, expected = call(runtime, x), model(x)
                assert torch.allclose(found.float(), expected.float(), atol=0.05)
                assert found.dtype == expected.dtype
        model[0].weight.data.mul_(2)


class Tied(nn.Module):
    """Reads a weight by two names, and a number that a tensor on the CPU holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)
        self.b.weight = self.a.weight
        self.scale = torch.tensor([2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * self.scale[1]


def test_one_weight_by_two_names_and_numbers_on_the_cpu(recorded: Make) -> None:
    model = Tied().eval()
    runtime = recorded(model, randn(2, 4), boundary="after:a")
    for _ in range(3):
        for _ in range(3):
            x = randn(2, 4)
            with torch.no_grad():
                assert equal(call(runtime, x), model(x), runtime)
        model.scale.data.add_(1)
        model.b.weight.data.mul_(2)
    prefix, suffix = runtime.report().segments
    assert prefix.recorded == 1
    assert suffix.recorded == (3 if HERE.type == "cuda" else 1)
    y = randn(2, 4)
    model.b.weight = nn.Parameter(randn(4, 4))
    with torch.no_grad():
        assert equal(call(runtime, y), model(y), runtime)


class Counted(Tied):
    """Counts in a tensor on the CPU, which no graph writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.counted.add_(1)
        return self.b(self.a(x)) * 2


@pytest.mark.skipif(HERE.type == "cpu", reason="where all is on the CPU, a rerun writes there, too")
def test_what_is_written_on_the_cpu_is_written_at_each_call(recorded: Make) -> None:
    model, twin = Counted().eval(), Counted().eval()
    runtime = recorded(model, randn(2, 4), boundary="after:a")
    for _ in range(5):
        x = randn(2, 4)
        with torch.no_grad():
            call(runtime, x), twin(x)
    assert torch.equal(model.counted, twin.counted)


class Masked(nn.Module):
    """Combines masks by an operator of Python's, whose op by its name tries other types first, and prints its arguments for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * ((h > 0) & (h < 1)))


def test_code_that_runs_as_python_calls_what_the_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    model, x = Masked().eval(), randn(2, 4)
    options = {"backend": refuses, "on_compile_error": "eager"}
    spec = SplitSpec("after:a", dynamic_batch=(1, 8))
    runtime = prepare_split(model, (x,), split=spec, mode="compiled", compile_options=options)
    call(runtime, x)
    assert runtime.report().fell_back

    def shown(self: Tensor, **_: Any) -> str:
        raise AssertionError("a tensor was printed")

    monkeypatch.setattr(Tensor, "__repr__", shown)
    with torch.no_grad():
        assert torch.equal(call(runtime, x), model(x))


class Shared(nn.Module):
    """Gives results that share memory: with each other, with its input, with a buffer; from its prefix, and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)
        self.register_buffer("kept", torch.ones(3, 4, device=HERE))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = x.view(-1, 2, 2)
        h = self.a(x)
        rows = h.view(-1, 2, 2)
        y = self.b(h).tanh()
        return {"early": early, "h": h, "rows": rows, "first": y[0], "y": y, "t": y.t(), "kept": self.kept[1:]}


def test_results_that_share_memory_share_it_when_they_are_played(recorded: Make) -> None:
    model = Shared().eval()
    for boundary in ("after:a", "percent:70"):
        runtime = recorded(model, randn(2, 4), boundary=boundary)
        for _ in range(5):
            x = randn(2, 4)
            with torch.no_grad():
                found, expected = call(runtime, x), model(x)
                for name, t in expected.items():
                    assert equal(found[name], t, runtime), name
                    assert found[name].stride() == t.stride()
                if (runtime.settings.compile_options or {}).get("mode"):
                    continue
                for thing, other in ((found, x), (expected, x)):
                    thing["y"].mul_(2), thing["h"].add_(1)
                    assert torch.equal(thing["y"].t(), thing["t"])
                    assert torch.equal(thing["y"][0], thing["first"])
                    assert torch.equal(thing["h"].view(-1, 2, 2), thing["rows"])
                    assert thing["early"].data_ptr() == other.data_ptr()
                    assert thing["kept"].data_ptr() == model.kept[1:].data_ptr()
        assert sum(counts(runtime)) > 0, str(runtime.report())


@torch.library.custom_op("ariadne_graphs::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """By a number that Python keeps."""
    return x * SCALE[0]


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


SCALE = [2.0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).to(HERE), nn.Linear(4, 4).to(HERE)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(scaled(self.a(x)))


def test_ops_of_the_user_s_are_not_recorded(recorded: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = recorded(Custom().eval(), randn(2, 4), boundary="after:a")
    for _ in range(4):
        call(runtime, randn(2, 4))
    prefix, suffix = runtime.report().segments
    assert (prefix.recorded, suffix.recorded) == (1, 0)
    assert any("may do what no graph holds" in note for note in suffix.notes)
