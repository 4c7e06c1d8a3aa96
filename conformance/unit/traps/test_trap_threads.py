"""Traps 15 and 16: threads, several runtimes and boundaries, an exception inside a segment."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import BoundaryError, ConsumedError
from conformance.unit.trap_nets import Net
from conformance.unit.trap_twins import Twins, same, seeded, square_loss, state

# 15. Threads, several runtimes, several boundaries


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Run them all at once; raise what the first to fail raised."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            gate.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def test_two_threads_on_one_runtime_each_get_their_own_answer() -> None:
    twins = Twins(Net, seeded((2, 6)))

    def job(seed: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(40):
                x = seeded((1 + (seed + i) % 5, 6), seed * 100 + i)
                with torch.no_grad():
                    want = twins.whole(x)
                same(want, twins.runtime.run_suffix(twins.runtime.run_prefix(x)))
                assert torch.is_grad_enabled()

        return run

    in_threads([job(1), job(2), job(3)])


class ByBatch(nn.Module):
    """Another op at every batch, so that every batch needs a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        for i in range(int(x.shape[0])):
            x = (torch.tanh, torch.relu, torch.sigmoid)[i % 3](x) + x[i]
        return self.out(x)


def test_threads_may_meet_batches_that_no_plan_serves_yet() -> None:
    twins = Twins(ByBatch, seeded((2, 6)))
    state_before = {n: p.detach().clone() for n, p in twins.split.named_parameters()}

    def job(batches: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            for b in batches:
                x = seeded((b, 6), b)
                with torch.no_grad():
                    want = twins.whole(x)
                same(want, twins.runtime.run_suffix(twins.runtime.run_prefix(x)))

        return run

    in_threads([job((2, 4, 3, 5, 2, 1, 4)), job((5, 3, 4, 2, 1)), job((2,) * 60)])
    same(state_before, {n: p.detach() for n, p in twins.split.named_parameters()})


def test_two_threads_may_train_on_one_runtime() -> None:
    """Numbers are small integers, so that the order in which gradients add up does not show."""

    def whole_numbers() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        for p in net.parameters():
            p.data = torch.randint(-2, 3, p.shape).float()
        return net

    twins = Twins(whole_numbers, torch.ones(2, 4))
    inputs = [torch.randint(-2, 3, (b, 4), generator=torch.Generator().manual_seed(b)).float() for b in (2, 3, 4, 5)]
    for x in inputs * 5:
        twins.whole(x).sum().backward()

    def run() -> None:
        for x in inputs * 5 if threading.current_thread() is threading.main_thread() else mine[threading.get_ident()]:
            boundary = twins.runtime.run_training_prefix(x)
            _, gradients = twins.runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
            twins.runtime.backward_prefix(boundary, gradients)

    mine: dict[int, list[torch.Tensor]] = {}

    def job(share: list[torch.Tensor]) -> Callable[[], None]:
        def start() -> None:
            mine[threading.get_ident()] = share
            run()

        return start

    in_threads([job(inputs[:2] * 5), job(inputs[2:] * 5)])
    same(state(twins.whole)["gradients"], state(twins.split)["gradients"])


def test_two_runtimes_on_one_model_train_it_in_turns() -> None:
    twins = Twins(Net, seeded((2, 6)))
    other = prepare_split(twins.split, (seeded((3, 6)),), split="after:first")
    for runtime in (twins.runtime, other, twins.runtime, other):
        twins.train(seeded((3, 6)), cuts=[runtime])
        twins.replay(seeded((2, 6)), cuts=[other, twins.runtime])


def test_a_boundary_of_another_cut_or_model_is_refused() -> None:
    twins = Twins(Net, seeded((2, 6)))
    boundary = twins.runtime.resplit("after:first").run_prefix(seeded((2, 6)))
    with pytest.raises(BoundaryError, match="made by another split"):
        twins.runtime.resplit("after:second").run_suffix(boundary)


def test_boundaries_in_flight_may_be_consumed_in_any_order() -> None:
    twins = Twins(Net, seeded((2, 6)))
    inputs = [seeded((b, 6), b) for b in (2, 3, 4)]
    alone = []
    for x in inputs:
        twins.whole.zero_grad()
        loss = square_loss(twins.whole(x))
        loss.backward()
        alone.append((loss.detach(), {n: p.grad.clone() for n, p in twins.whole.named_parameters()}))
    for runtime in twins.cuts():
        twins.split.zero_grad()
        suffix_names = {id(p) for p in runtime.suffix_parameters()}
        flying = [runtime.run_training_prefix(x) for x in inputs]
        gradients = {}
        for i in (1, 2, 0):
            loss, gradients[i] = runtime.train_suffix(flying[i], loss_fn=square_loss)
            same(alone[i][0], loss)
        for i in (0, 2, 1):
            runtime.backward_prefix(flying[i], gradients[i])
        for name, p in twins.split.named_parameters():
            a, b, c = (1, 2, 0) if id(p) in suffix_names else (0, 2, 1)
            same((alone[a][1][name] + alone[b][1][name]) + alone[c][1][name], p.grad)


def test_replay_boundaries_in_flight_keep_their_values() -> None:
    twins = Twins(Net, seeded((2, 6)))
    inputs = [seeded((b, 6), b) for b in (2, 3, 4)]
    for runtime in twins.cuts():
        flying = [runtime.run_prefix(x) for x in inputs]
        for i in (2, 0, 1, 2):
            with torch.no_grad():
                same(twins.whole(inputs[i]), runtime.run_suffix(flying[i]))


@pytest.mark.parametrize("by", ["train_suffix", "backward_prefix"])
def test_a_boundary_consumed_twice_is_refused(by: str) -> None:
    runtime = Twins(Net, seeded((2, 6))).runtime
    boundary = runtime.run_training_prefix(seeded((3, 6)))
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
    if by == "backward_prefix":
        runtime.backward_prefix(boundary, gradients)
    before = {n: p.grad.clone() for n, p in runtime.model.named_parameters() if p.grad is not None}
    again = {
        "train_suffix": lambda: runtime.train_suffix(boundary, loss_fn=square_loss),
        "backward_prefix": lambda: runtime.backward_prefix(boundary, gradients),
    }
    with pytest.raises(ConsumedError, match=f"already taken by {by}.*run_training_prefix"):
        again[by]()
    same(before, {n: p.grad for n, p in runtime.model.named_parameters() if p.grad is not None})


def test_two_threads_that_race_for_one_boundary_train_it_once() -> None:
    runtime = Twins(Net, seeded((2, 6))).runtime
    for _ in range(10):
        boundary, taken, refused = runtime.run_training_prefix(seeded((3, 6))), [], []

        def job(boundary: Any = boundary, taken: list[Any] = taken, refused: list[Any] = refused) -> None:
            try:
                taken.append(runtime.train_suffix(boundary, loss_fn=square_loss))
            except ConsumedError as error:
                refused.append(error)

        in_threads([job, job, job])
        assert (len(taken), len(refused)) == (1, 2)


def test_parameters_that_stepped_while_a_boundary_was_in_flight_are_noticed() -> None:
    """The prefix's graph needs the old weight; autograd says so for the whole model, and for the split."""
    twins = Twins(Net, seeded((2, 6)))
    runtime = twins.runtime.resplit("cut:4")
    boundary = runtime.run_training_prefix(seeded((3, 6)))
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
    with torch.no_grad():
        twins.split.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runtime.backward_prefix(boundary, gradients)


# 16. An exception inside a segment


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Identity(), nn.Embedding(5, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.lin(x)) + self.inner(i))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_a_traceback_shows_the_generated_line_and_the_module(side: str, train: bool) -> None:
    model = Lookup()
    spec = SplitSpec("after:lin" if side == "suffix" else "after:inner")
    runtime = prepare_split(model, (torch.tensor([1, 2]), seeded((2, 4))), split=spec)
    bad = torch.tensor([1, 7])

    def act() -> None:
        if train:
            runtime.train_suffix(runtime.run_training_prefix(bad, seeded((2, 4))), loss_fn=square_loss)
        else:
            runtime.run_suffix(runtime.run_prefix(bad, seeded((2, 4))))

    with pytest.raises(IndexError) as raised:
        act()
    frames = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.filename.startswith("<ariadne")]
    assert len(frames) == 1
    assert side in frames[0].filename
    source = runtime.prefix_source if side == "prefix" else runtime.suffix_source
    line = source.splitlines()[frames[0].lineno - 1].strip()
    assert frames[0].line == line
    assert "embedding(" in line
    assert line.endswith("# inner.1")


def test_a_failed_call_leaves_the_modes_and_the_runtime_as_they_were() -> None:
    model = Lookup()
    runtime = prepare_split(model, (torch.tensor([1, 2]), seeded((2, 4))), split="after:inner")
    with pytest.raises(IndexError):
        runtime.run_prefix(torch.tensor([1, 7]), seeded((2, 4)))
    assert torch.is_grad_enabled()
    with torch.no_grad():
        want = model(torch.tensor([1, 2]), seeded((2, 4)))
    same(want, runtime.run_suffix(runtime.run_prefix(torch.tensor([1, 2]), seeded((2, 4)))))
