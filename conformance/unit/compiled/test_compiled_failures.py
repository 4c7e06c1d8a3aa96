"""mode="compiled": what means nothing, fails, dies or is given up is said, and fallen back from only where that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental import _config as shape_config

from ariadne import SplitRuntime, prepare_split
from ariadne.compiled.tracing import tracing
from ariadne.cut import CompileOptions
from ariadne.errors import CompileError, SpecError
from conformance.unit.compiled_kit import Conv, Offset, fails, halves, made, whole
from conformance.unit.trap_kit import numbers, same

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
        ({"backend": "inductor", "cache_dir": "/tmp"}, "cache_dir goes with backend 'aot_inductor'"),
        ({"backend": "aot_inductor", "cache_dir": 3}, "cache_dir is the path of a directory; found int"),
        ({"on_compile_error": "ignore"}, "on_compile_error must be 'raise' or 'eager'; found 'ignore'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        CompileOptions.parse(options)


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


class Chosen(nn.Module):
    """A side whose sizes follow data, which torch compiles in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chosen = x[x[:, 0] > -1e6]
        return self.second(chosen) if chosen.shape[0] else x


@pytest.mark.usefixtures("one_compilation")
def test_giving_up_on_a_piece_is_a_failure_too() -> None:
    runtime = made(Chosen, 5, boundary="after:first", backend="eager")
    assert _watched(runtime)
    same(whole(runtime.model, x := numbers(3, 5)), halves(runtime, x))
    runtime.model.second.weight.requires_grad_(False)
    with pytest.raises(CompileError, match=r"gave up \(after 1 compilations"):
        halves(runtime, numbers(3, 5))


def test_settings_are_changed_only_while_a_piece_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []

    def counted(seeded: bool) -> Any:
        entered.append(seeded)
        return tracing(seeded)

    monkeypatch.setattr("ariadne.compiled.jit.tracing", counted)
    runtime = made(Chosen, 5, boundary="after:first", backend="eager")
    kernel = runtime._now[False].suffix.__globals__["hot"].__self__
    assert kernel.lazy  # False would be right, and slower: each call changes settings
    halves(runtime, numbers(4, 5))
    first = len(entered)
    assert first > 1
    for seed in (1, 2):
        same(whole(runtime.model, x := numbers(4, 5, seed=seed)), halves(runtime, x))
    assert len(entered) == first
    runtime.model.second.weight.requires_grad_(False)
    same(whole(runtime.model, x), halves(runtime, x))
    assert len(entered) > first
    assert runtime.report().segments[1].recompiles == 1
    assert kernel.now.call is None


@pytest.mark.parametrize("lazy", [True, False])
def test_a_piece_is_compiled_under_the_settings_whether_or_not_torch_lets_them_wait(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lazy:
        monkeypatch.setattr("ariadne.compiled.jit.whenever_compiled", lambda function, around: False)
    seen: list[bool] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        seen.append(shape_config.backed_size_oblivious)
        return graph.forward

    runtime = made(Chosen, 5, boundary="after:first", backend=backend)
    for batch in (1, 3):
        same(whole(runtime.model, x := numbers(batch, 5)), halves(runtime, x))
    assert len(seen) > 1
    assert all(seen)
    assert not shape_config.backed_size_oblivious


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_pieces_of_which_none_is_compiled_are_a_failure(on_error: str) -> None:
    runtime = made(Chosen, 5, boundary="after:first", backend="eager", on_compile_error=on_error)
    assert _watched(runtime)
    boundary = runtime.run_prefix(numbers(3, 5))
    with switched_off():
        if on_error == "raise":
            with pytest.raises(CompileError, match="no part of it was compiled"):
                runtime.run_suffix(boundary)
            return
        for _ in range(2):
            same(whole(runtime.model, numbers(3, 5)), runtime.run_suffix(boundary))
    assert [s.state for s in runtime._now[False].reports] == ["compiled", "eager"]
    assert runtime.report().fell_back


@contextmanager
def switched_off() -> Iterator[None]:
    """As TORCH_COMPILE_DISABLE=1 does it; by hand, as in `one_compilation`."""
    config = torch._dynamo.config
    before, config.disable = config.disable, True
    try:
        yield
    finally:
        config.disable = before


def _watched(runtime: SplitRuntime) -> bool:
    """Whether the suffix is compiled in pieces."""
    return runtime._now[False].suffix.__globals__["hot"].__name__ == "watched"


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
