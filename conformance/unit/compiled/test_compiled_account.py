"""The account of what was compiled: over plans and threads, and where CUDA graphs are wanted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.compiled import cuda_graphs
from ariadne.compiled.jit import _without_graphs
from ariadne.cut import CompileOptions
from conformance.unit.compiled_kit import Offset, halves, made, whole
from conformance.unit.trap_kit import numbers, same


def test_what_is_compiled_for_a_further_plan_counts_as_compiled_again() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x).squeeze(), self.second(x)  # at batch 1 another plan

    runtime = made(Squeezed, 5, boundary="percent:50", backend="eager")
    for batch in (4, 3):
        halves(runtime, numbers(batch, 5))
    assert runtime.report().recompiles == 0
    same(whole(runtime.model, x := numbers(1, 5)), halves(runtime, x))
    report = runtime.report()
    assert len(report.segments) == 4
    assert [s.recompiles for s in report.segments] == [0, 0, 1, 1]
    assert report.recompiles == 2
    assert "2 recompiled" in str(report)
    for batch in (1, 5):
        halves(runtime, numbers(batch, 5))
    assert runtime.report().recompiles == 2


def test_plans_that_were_given_up_are_still_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(x.shape[0]):  # a plan for each batch
                x = x + 1
            return self.second(x)

    monkeypatch.setattr("ariadne.runtime.plans.MOST_PLANS", 4)
    options = {"backend": "eager"}
    runtime = prepare_split(
        Loops().eval(), (numbers(4, 5),), split="percent:50", mode="compiled", compile_options=options
    )
    for batch in (4, 2, 3, 5, 6):
        same(whole(runtime.model, x := numbers(batch, 5)), halves(runtime, x))
    report = runtime.report()
    assert len(runtime._variants) == 4
    assert sum(sum(s.compiled.values()) for s in report.segments) == 2 * 5
    assert report.recompiles == 8


def test_two_threads_that_miss_together_compile_once() -> None:
    started = threading.Barrier(2)
    graphs: list[Any] = []

    def slow(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        time.sleep(0.2)
        return graph.forward

    runtime = made(Offset, 5, boundary="after:first", backend=slow)

    def run() -> None:
        started.wait()
        runtime.run_prefix(numbers(3, 5))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(graphs) == 1
    assert runtime.report().recompiles == 0


@pytest.mark.parametrize(
    ("options", "graphs", "training"),
    [
        ({}, True, None),
        ({"dynamic": True}, False, None),
        ({"mode": "reduce-overhead"}, True, {"options": {"triton.cudagraphs": False}}),
        ({"options": {"triton.cudagraphs": True, "max_fusion_size": 8}}, True,
         {"options": {"triton.cudagraphs": False, "max_fusion_size": 8}}),
        ({"options": {"triton.cudagraphs": False}}, False, None),
        ({"mode": "max-autotune-no-cudagraphs"}, False, None),
        ({"backend": "cudagraphs"}, True, {"backend": "aot_eager"}),
        ({"backend": "aot_eager"}, False, None),
        ({"backend": "aot_inductor"}, False, None),
        ({"mode": "no such mode"}, False, None),
    ],
    ids=str,
)  # fmt: skip
def test_whether_cuda_graphs_are_wanted_and_training_without_them(
    options: dict[str, Any], graphs: bool, training: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cuda_graphs(CompileOptions.parse(options)), "on a CPU there are none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_graphs(CompileOptions.parse(options)) == graphs
    if training is not None:
        assert _without_graphs(options) == training


def test_where_graphs_are_recorded_warmup_runs_until_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_cuda, batches in ((False, [3, 1]), (True, [3, 3, 3, 1, 1, 1])):
        runtime = made(Offset, 5, boundary="after:first", mode="reduce-overhead")
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_cuda=on_cuda: on_cuda)
        ran: list[int] = []
        monkeypatch.setattr(runtime, "run_prefix", lambda x, ran=ran: ran.append(len(x)))
        monkeypatch.setattr(runtime, "run_suffix", lambda boundary: None)
        runtime.warmup(numbers(3, 5))
        assert ran == batches
