"""`ariadne.benchmark`: what is timed is what is said, and the model is left as found."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import benchmark, prepare_split
from ariadne.errors import SpecError, TrainingError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def test_measure_all_leaves_training_out_of_what_is_compiled_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    for name in ("measure_split", "measure_suffix"):  # as the compiler would be at work in them
        monkeypatch.setattr(benchmark, name, lambda *args, name=name, **options: timed.append(name))
    options = {"modes": ("compiled",), "compile_options": {"backend": "aot_inductor"}, "iterations": 1, "warmup": 0}
    assert len(benchmark.measure_all(Net().eval(), (X,), split="after:norm", **options)) == 3
    assert timed == ["measure_split", "measure_suffix"]


def test_measure_all_times_each_part_in_each_mode() -> None:
    results = benchmark.measure_all(Net().eval(), (X,), split="after:norm", iterations=3, warmup=1)
    parts = ["prefix_suffix", "suffix_replay", "suffix_training", "prefix_backward"]
    modes = ("debug_interpreter", "generated_eager")
    assert [(r.what, r.mode) for r in results] == [("direct_forward", "eager"), *((p, m) for m in modes for p in parts)]
    assert [r.split_id for r in results] == [None, *["cut:2"] * 8]
    for result in results:
        assert (result.batch, len(result.seconds), result.cuda_peak_bytes) == (4, 3, None)
        assert result.average == pytest.approx(result.total / 3)
        assert min(result.seconds) <= result.median <= max(result.seconds)
    assert re.fullmatch(
        r"suffix_replay \(generated_eager at cut:2\), batch 4: [\d.]+ ms on average, [\d.]+ s in 3 calls",
        str(results[6]),
    )


def test_the_compiled_mode_takes_its_options() -> None:
    results = benchmark.measure_all(
        Net().eval(), (X,), split="after:norm", modes=("compiled",), compile_options={"backend": "eager"}, iterations=1
    )
    assert {r.mode for r in results} == {"eager", "compiled"}


@pytest.mark.parametrize(
    ("measure", "slow", "counted"),
    [
        (benchmark.measure_split, "run_prefix", True),
        (benchmark.measure_split, "run_suffix", True),
        (benchmark.measure_suffix, "run_prefix", False),
        (benchmark.measure_suffix, "run_suffix", True),
        (benchmark.measure_suffix_training, "run_training_prefix", False),
        (benchmark.measure_suffix_training, "train_suffix", True),
        (benchmark.measure_prefix_backward, "run_training_prefix", False),
        (benchmark.measure_prefix_backward, "train_suffix", False),
        (benchmark.measure_prefix_backward, "backward_prefix", True),
    ],
)
def test_what_is_timed_is_what_the_name_says(
    measure: Callable[..., benchmark.BenchmarkResult], slow: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = prepare_split(Net(), (X,), split="after:norm")
    original, clock = getattr(runtime, slow), [0.0]

    def slowed(*args: Any, **kwargs: Any) -> Any:
        clock[0] += 100.0
        return original(*args, **kwargs)

    monkeypatch.setattr(runtime, slow, slowed, raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure(runtime, (X,), iterations=2, warmup=1).seconds == ((100.0,) * 2 if counted else (0.0,) * 2)


def test_measuring_leaves_the_model_as_found() -> None:
    model = Net().train()
    model(X).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    rng = torch.get_rng_state()
    benchmark.measure_all(model, (X,), split="after:norm", iterations=2, warmup=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    now = [p.grad for p in model.parameters()]
    assert all(g is old and torch.equal(g, was) for g, (old, was) in zip(now, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_no_iterations_and_a_prefix_without_parameters_are_refused() -> None:
    runtime = prepare_split(Net().eval(), (X,), split="after:norm")
    with pytest.raises(SpecError, match="iterations is at least 1 and warmup at least 0; found 0 and 5"):
        benchmark.measure_split(runtime, (X,), iterations=0)
    model = Net().eval()
    model.first.requires_grad_(False)
    model.norm.requires_grad_(False)
    runtime = prepare_split(model, (X,), split="after:norm")
    with pytest.raises(TrainingError, match="no parameter to train, so there is no backward pass to time; cut later"):
        benchmark.measure_prefix_backward(runtime, (X,))
    assert "prefix_backward" not in {
        r.what for r in benchmark.measure_all(model, (X,), split="after:norm", iterations=1, warmup=0)
    }
