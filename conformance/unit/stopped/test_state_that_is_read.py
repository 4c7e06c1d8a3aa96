"""A Python split of a model whose part before the cut only reads state that the part after it writes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, prepare_split
from ariadne.errors import BoundaryError, PayloadError
from ariadne.stopped.noted import Before
from ariadne.stopped.standing import PYTHONS


class _Averages(nn.Module):
    """A buffer is read before the cut and written after it; no graph holds, since Python's own number is drawn."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.norm, self.how = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), how
        self.register_buffer("mean", torch.ones(4))
        self.noted = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        if random.random() > 2:
            return x
        if self.how == "stays":
            self.noted[0].add_(1)
        if self.how == "norm":
            assert self.norm.running_mean is not None
            h: Tensor = self.last(self.first(x - self.norm.running_mean))
            return self.norm(h)
        h = self.last(self.first(x + self.mean))
        if self.how == "adds and reads":
            h = h + self.mean
        if self.how in ("sets", "another"):
            self.mean = h.detach().sum(0) + (self.mean if self.how == "another" else 0)
        else:
            self.mean += h.detach().sum(0)
        return h


def _split(how: str) -> tuple[PythonSplit, nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, calls = _Averages(how).train(how == "norm"), [torch.randn(2, 4) for _ in range(2)]
    split = prepare_split(model, (calls[0],), split="after:first", fallback="python")
    assert isinstance(split, PythonSplit)
    assert bool(split.stays) == (how == "stays")
    return split, copy.deepcopy(model), calls


def _sent(boundary: BoundaryPayload) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


def _itself(boundary: BoundaryPayload) -> BoundaryPayload:
    return boundary


WAYS = ["adds", "adds and reads", "sets", "another", "norm"]
MOVED = r"another call, or you, wrote '(mean|norm\.running_mean)' of the model since"


@pytest.mark.parametrize("send", [_itself, _sent])
@pytest.mark.parametrize("how", WAYS)
def test_a_suffix_is_refused_whose_prefix_did_not_see_what_another_wrote(how: str, send: Callable[..., Any]) -> None:
    split, whole, calls = _split(how)
    with torch.no_grad():  # one call at a time goes on from call to call
        assert all(torch.equal(split.run_suffix(send(split.run_prefix(x))), whole(x)) for x in calls * 2)
    first, second = (send(split.run_prefix(x)) for x in calls)
    with torch.no_grad():
        assert torch.equal(split.run_suffix(first), whole(calls[0]))
    with pytest.raises(BoundaryError, match=MOVED):
        split.run_suffix(second)
    with pytest.raises(BoundaryError, match=MOVED):
        split.run_suffix(first)


@pytest.mark.parametrize("send", [_itself, _sent])
def test_a_step_is_refused_whose_prefix_did_not_see_what_another_wrote(send: Callable[..., Any]) -> None:
    split, _, calls = _split("adds")
    split.model.train()
    first, second = (send(split.run_training_prefix(x)) for x in calls)
    split.train_suffix(first, loss_fn=lambda output, _: output.sum())
    with pytest.raises(BoundaryError, match=MOVED):
        split.train_suffix(second, loss_fn=lambda output, _: output.sum())


def test_what_a_prefix_reads_is_known_where_nothing_else_of_it_is_noted() -> None:
    split, _, calls = _split("stays")
    first, second = (split.run_prefix(x) for x in calls)
    split.run_suffix(first)
    with pytest.raises(BoundaryError, match=MOVED):
        split.run_suffix(second)


def test_a_suffix_on_a_model_of_its_own_may_not_write_what_the_prefix_reads() -> None:
    split, _, calls = _split("adds")
    other = copy.deepcopy(split)
    other.prove()
    sent = _sent(split.run_prefix(calls[0]))
    with pytest.raises(
        BoundaryError, match="the suffix wrote 'mean' of the model, which the part before the cut reads"
    ):
        other.run_suffix(sent)


class _Reads(_Averages):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(self.first(x + self.mean)) * (random.random() < 2)
        return self.norm(h) + self.mean


def test_after_a_graph_a_suffix_may_not_write_what_the_prefix_reads() -> None:
    class Late(_Averages):
        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.last(self.first(x + self.mean)) * (random.random() < 2)
            self.mean += h.detach().sum(0)
            return h

    with pytest.raises(
        BoundaryError, match="the suffix wrote 'mean' of the model, which the part before the cut reads"
    ):
        prepare_split(Late("").eval(), (torch.randn(2, 4),), split="after:first", fallback="python-suffix")


def test_what_no_call_has_moved_is_in_nobodys_way() -> None:
    torch.manual_seed(0)
    model, calls = _Reads("").train(), [torch.randn(2, 4) for _ in range(2)]
    split = prepare_split(model, (calls[0],), split="after:first", fallback="python")
    assert isinstance(split, PythonSplit)
    whole, other = copy.deepcopy(model), copy.deepcopy(split)
    other.prove()
    with torch.no_grad():
        expected = [whole(x) for x in calls]
    first, second = (split.run_prefix(x) for x in calls)
    sent = [_sent(first), _sent(second)]
    with torch.no_grad():  # as an optimizer's step does, which is followed
        for p in (*split.model.parameters(), *other.model.parameters()):
            p.mul_(1)
    for boundary, at in ((first, 0), (second, 1), (first, 0), (sent[1], 1), (sent[0], 0)):
        assert torch.equal(split.run_suffix(boundary), expected[at])
    assert torch.equal(other.run_suffix(sent[0]), expected[0])
    with torch.no_grad():
        model.mean.add_(1)
    with pytest.raises(BoundaryError, match=MOVED):
        split.run_suffix(sent[0])


def test_what_a_stranger_tells_of_the_state_is_read_with_care() -> None:
    split, _, calls = _split("adds")
    told = split.run_prefix(calls[0]).crossing().raw[-1]
    assert Before.read(told).used.keys() == {"mean", PYTHONS}
    with pytest.raises(PayloadError, match="malformed; refuse the sender"):
        Before.read((*told[:-3], {"mean": 1}, *told[-2:]))
