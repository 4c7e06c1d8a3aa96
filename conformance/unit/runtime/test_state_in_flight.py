"""State that a prefix writes and a suffix reads, with several boundaries in flight: each call finds its own, or is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, FrontierError

OUTSIDE = torch.ones(4)
Forward = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Two linear layers, and a buffer that forward does something with."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("buffer", torch.ones(4))
        self.plain, self.held, self.go = torch.ones(4), {"here": torch.ones(4)}, forward

    def forward(self, x: Tensor) -> Any:
        return self.go(self, x)


def adds(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.buffer += h.detach().sum(0)
    return m.last(h) * m.buffer


def copies(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.buffer.copy_(h.detach().mean(0))
    return m.last(h) + m.buffer


def in_part(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.buffer[2] = h.detach().sum()
    m.buffer.mul_(0.5)
    return m.last(h) * m.buffer + m.buffer[1:2]


def by_a_view(m: Any, x: Tensor) -> Tensor:
    part = m.buffer[1:]
    h = m.first(x)
    m.buffer += h.detach().sum(0)
    return m.last(h) * part.sum()


def plain(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.plain.add_(h.detach().sum(0))
    return m.last(h) * m.plain


def in_a_dict(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.held["here"].add_(h.detach().sum(0))
    return m.last(h) * m.held["here"]


def outside(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    OUTSIDE.add_(h.detach().sum(0))
    return m.last(h) * OUTSIDE


def replaces(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.buffer = m.buffer + h.detach().sum(0)
    return m.last(h) * m.buffer


def writes_and_replaces(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    m.buffer.add_(h.detach().sum(0))
    m.buffer = m.buffer * 2
    return m.last(h) * m.buffer


def gives_it(m: Any, x: Tensor) -> Any:
    h = m.first(x)
    m.buffer += h.detach().sum(0)
    return m.last(h), m.buffer


def statistics(m: Any, x: Tensor) -> Tensor:
    return m.last(m.norm(m.first(x))) * m.norm.running_mean


KNOWN = [
    adds,
    copies,
    in_part,
    by_a_view,
    plain,
    in_a_dict,
    outside,
    replaces,
    writes_and_replaces,
    gives_it,
    statistics,
]


def total(output: Any, targets: Any = None) -> Tensor:
    return sum(t.pow(2).mean() for t in (output if isinstance(output, tuple) else (output,)))


def frozen(output: Any) -> list[Tensor]:
    return [t.detach().clone() for t in (output if isinstance(output, tuple) else (output,))]


def alike(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def afar(boundary: BoundaryPayload) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


@pytest.mark.parametrize("forward", KNOWN, ids=lambda f: f.__name__)
def test_each_of_several_in_flight_finds_the_state_that_its_prefix_left(forward: Forward) -> None:
    model = Net(forward).train(forward is statistics)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="80%")
    calls = [torch.randn(2, 4) for _ in range(3)]
    for cut in [c for c in runtime.candidates if c.safe]:
        for send in (lambda b: b, afar):
            OUTSIDE.fill_(1)
            split = copy.deepcopy(runtime).resplit(cut.split_id)
            if split._main.state.both:  # between two writes
                continue
            whole = copy.deepcopy(split.model)
            with torch.no_grad():
                expected = [frozen(whole(x)) for x in calls]
            OUTSIDE.fill_(1)
            boundaries = [send(split.run_prefix(x)) for x in calls]
            assert all(alike(frozen(split.run_suffix(b)), e) for b, e in zip(boundaries, expected, strict=True))
            assert alike(list(split.model.buffers()), list(whole.buffers()))
            if any(state in cut.live for state in ("buffer", "plain", "held_here")):
                assert alike(frozen(split.run_suffix(boundaries[0])), expected[0]), "and once more"


@pytest.mark.parametrize("forward", [adds, by_a_view, plain, gives_it, statistics], ids=lambda f: f.__name__)
def test_steps_in_flight_find_it_too(forward: Forward) -> None:
    model = Net(forward)
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("50%", trainable=True))
    calls = [torch.randn(2, 4) for _ in range(2)]
    for cut in [c for c in runtime.candidates if c.safe and c.trainable and not c.inexact]:
        split = copy.deepcopy(runtime).resplit(cut.split_id)
        whole, losses = copy.deepcopy(split.model), []
        for x in calls:
            losses.append(total(whole(x)))
            losses[-1].backward()
        for boundary in [split.run_training_prefix(x) for x in calls]:
            loss, gradients = split.train_suffix(boundary, loss_fn=total)
            split.backward_prefix(boundary, gradients)
            assert torch.equal(loss, losses.pop(0).detach())
        for mine, theirs in zip(split.model.parameters(), whole.parameters(), strict=True):
            assert mine.grad is theirs.grad is None or torch.equal(mine.grad, theirs.grad)


def both(m: Any, x: Tensor) -> Tensor:
    m.buffer += x.detach().sum(0)
    h = m.last(m.first(x)) * m.buffer
    m.buffer.mul_(0.5)
    return h


def ahead(m: Any, x: Tensor) -> Tensor:
    h = m.last(m.first(x) * m.buffer) + m.buffer
    m.buffer += h.detach().sum(0)
    return h


def twice(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.last(m.norm(m.first(x))))


@pytest.mark.parametrize("forward", [both, ahead, twice], ids=lambda f: f.__name__)
def test_what_both_sides_use_and_the_suffix_writes_is_had_by_one_call_at_a_time(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = prepare_split(Net(forward).train(forward is twice), (torch.randn(2, 4),), split="50%")
    whole, x, y = copy.deepcopy(split.model), torch.randn(2, 4), torch.randn(2, 4)
    with torch.no_grad():
        expected = [frozen(whole(t)) for t in (x, y)]
    assert alike(frozen(split.run_suffix(split.run_prefix(x))), expected[0])
    assert alike(frozen(split.run_suffix(split.run_prefix(y))), expected[1])
    assert alike(list(split.model.buffers()), list(whole.buffers()))
    first, second = (split.run_prefix(t) for t in (x, y))
    if forward is ahead:  # whose prefix reads, and does not write
        split.run_suffix(first)
    with pytest.raises(BoundaryError, match="another call, or you, wrote"):
        split.run_suffix(second if forward is ahead else first)
    split.run_suffix(afar(split.run_prefix(x)))
    sent, elsewhere = split.run_prefix(x).to_bytes(), copy.deepcopy(split)
    with pytest.raises(BoundaryError, match="another call, or you, wrote"):
        elsewhere.run_suffix(BoundaryPayload.from_bytes(sent))
    monkeypatch.setattr("ariadne.boundary.payload._SENT", {})  # as in another process
    with pytest.raises(BoundaryError, match="prefix ran elsewhere"):
        elsewhere.run_suffix(BoundaryPayload.from_bytes(sent))


def test_what_only_the_suffix_uses_goes_on_from_call_to_call() -> None:
    def late(m: Any, x: Tensor) -> Tensor:
        h: Tensor = m.last(m.first(x))
        m.buffer += h.detach().sum(0)
        return h * m.buffer

    split = prepare_split(Net(late).eval(), (torch.randn(2, 4),), split="after:first")
    whole, calls = copy.deepcopy(split.model), [torch.randn(2, 4) for _ in range(3)]
    with torch.no_grad():
        expected = [frozen(whole(x)) for x in calls]
    boundaries = [split.run_prefix(x) for x in calls]
    assert all(alike(frozen(split.run_suffix(b)), e) for b, e in zip(boundaries, expected, strict=True))


def test_a_write_by_the_user_or_by_the_whole_model_is_noticed() -> None:
    split = prepare_split(Net(adds).eval(), (torch.randn(2, 4),), split="80%")
    for write in (lambda: split.model.buffer.zero_(), lambda: split.model(torch.randn(2, 4))):
        boundary = split.run_prefix(torch.randn(2, 4))
        with torch.no_grad():
            write()
        with pytest.raises(BoundaryError, match="is a tensor of the model, which was written into"):
            split.run_suffix(boundary)


def read_after(m: Any, x: Tensor) -> Tensor:
    return m.last(m.norm(m.first(x))) + m.norm.running_mean


def on_both_sides(m: Any, x: Tensor) -> Tensor:
    h = m.first(x) + m.norm.running_mean
    return m.norm(m.last(h)) + m.norm.running_mean


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("forward", [read_after, on_both_sides])
def test_statistics_that_the_whole_model_moves_are_those_of_the_call_or_it_is_refused(
    forward: Forward, wire: bool
) -> None:
    """Batch norm writes its running statistics without counting it."""
    model, x = Net(forward), torch.randn(3, 4)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="cut:3")
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    trained, boundary = runtime.run_training_prefix(x), None
    if forward is on_both_sides:  # its prefix moves nothing
        boundary = runtime.run_prefix(x)
    with torch.no_grad():
        model(torch.randn(3, 4) * 5)
    if forward is on_both_sides:
        for one in (boundary, trained):
            with pytest.raises(BoundaryError, match="another call, or you, wrote 'running_mean' of 'norm'"):
                runtime.run_suffix(BoundaryPayload.from_bytes(one.to_bytes()) if wire else one)
        return
    seen: list[Tensor] = []
    sent = BoundaryPayload.from_bytes(trained.to_bytes()) if wire else trained
    runtime.train_suffix(sent, loss_fn=lambda output, _: (seen.append(output.detach()), output.sum())[1])
    assert torch.equal(seen[0], expected)


def test_a_plan_that_writes_moves_nothing_under_one_that_does_not() -> None:
    def at_times(m: Any, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            m.buffer.add_(1)
        return m.last(m.first(x)) * m.buffer

    split = prepare_split(
        Net(at_times).eval(), (torch.randn(2, 4),), split=SplitSpec("after:first", dynamic_batch=(1, 8))
    )
    few, many = split.run_prefix(torch.randn(2, 4)), split.run_prefix(torch.randn(6, 4))
    split.run_suffix(many)
    with pytest.raises(BoundaryError, match="another call, or you, wrote 'buffer'"):
        split.run_suffix(few)


def test_one_call_at_a_time_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        threading, "active_count", lambda: 1
    )  # other tests may have left threads; beside these it copies
    split = prepare_split(Net(adds).eval(), (torch.randn(2, 4),), split="80%")
    boundary = split.run_prefix(torch.randn(2, 4))
    at = split.model.buffer.data_ptr()
    assert any(t.data_ptr() == at for t in boundary.tensors.values())
    split.run_suffix(boundary)
    assert any(t.data_ptr() == at for t in boundary.tensors.values())
    split.run_prefix(torch.randn(2, 4))
    assert all(t.data_ptr() != at for t in boundary.tensors.values())


def test_a_suffix_beside_other_threads_runs_from_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    split = prepare_split(Net(adds).eval(), (torch.randn(2, 4),), split="80%")
    boundary, at = split.run_prefix(torch.randn(2, 4)), split.model.buffer.data_ptr()
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    split.run_suffix(boundary)
    assert all(t.data_ptr() != at for t in boundary.tensors.values())


def test_halves_in_files_refuse_such_a_cut(tmp_path: Any) -> None:
    split = prepare_split(Net(adds).eval(), (torch.randn(2, 4),), split="80%")
    with pytest.raises(FrontierError, match="would have one of its own"):
        split.save(tmp_path / "half.safetensors", side="prefix")


def fills(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    if m.buffer is None:
        m.buffer = h.detach().abs().mean(0)
    found: Tensor = m.last(h / m.buffer)
    return found


@pytest.mark.parametrize("trains", [False, True])
def test_a_suffix_whose_buffer_another_first_call_has_filled_says_what_to_do(trains: bool) -> None:
    model, twin = Net(fills).eval(), Net(fills).eval()
    model.buffer = twin.buffer = None  # type: ignore[assignment]
    x = torch.linspace(-1, 1, 12).view(3, 4)
    split = prepare_split(model, (x,), split=SplitSpec("after:first", trainable=trains))
    prefix = split.run_training_prefix if trains else split.run_prefix

    def suffix(boundary: BoundaryPayload) -> Any:
        if trains:
            return split.train_suffix(boundary, loss_fn=lambda out, _: out.sum())[0]
        return split.run_suffix(boundary)

    first, second = prefix(x), prefix(x + 1)
    found = [suffix(first)]
    with pytest.raises(
        BoundaryError, match=r"'buffer' of the model was None when its prefix ran.* Make the boundary again"
    ):
        suffix(second)
    found.append(suffix(prefix(x + 1)))
    with torch.no_grad():
        whole = [twin(given).sum() if trains else twin(given) for given in (x, x + 1)]
    assert all(map(torch.equal, found, whole))


def test_a_buffer_that_is_filled_before_the_cut_stops_no_suffix() -> None:
    model, twin = Net(fills).eval(), Net(fills).eval()
    model.buffer = twin.buffer = None  # type: ignore[assignment]
    x = torch.linspace(-1, 1, 12).view(3, 4)
    split = prepare_split(model, (x,), split="90%")
    boundaries = [split.run_prefix(given) for given in (x, x + 1)]
    with torch.no_grad():
        assert all(
            torch.equal(split.run_suffix(b), twin(given)) for b, given in zip(boundaries, (x, x + 1), strict=True)
        )
