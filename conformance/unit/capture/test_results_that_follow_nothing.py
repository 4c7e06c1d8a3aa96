"""Where a result follows nothing of what forward keeps, as behind a relu that leaves zeros alone: that counts all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture import first, ways
from ariadne.capture.example import Example
from ariadne.capture.ran import Answer
from ariadne.capture.reach import Reach
from ariadne.capture.written import Undone
from ariadne.compare import difference
from ariadne.errors import UnsupportedError


class Net(nn.Module):
    """(B, 4) -> (B, 4): zeros for small inputs, whatever they are multiplied by; `factor` may keep something in the network."""

    def __init__(self, factor: Callable[[Any, torch.Tensor], Any], **kept: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.a.weight)
        nn.init.constant_(self.a.bias, -50.0)
        self.factor = factor
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 4)."""
        zeros = torch.relu(self.a(x))
        return self.b(zeros * self.factor(self, x))  # type: ignore[no-any-return]


def inputs(batch: int, large: bool) -> tuple[torch.Tensor]:
    some = torch.rand(batch, 4, generator=torch.Generator().manual_seed(batch))
    return (some + 60.0 if large else some,)


def first_alone(net: Any, x: torch.Tensor) -> float:
    if net.is_first:
        net.is_first = False
        return 2.0
    return 3.0


def last_batch(net: Any, x: torch.Tensor) -> float:
    before, net.last = net.last, x.shape[0]
    return 2.0 if before == x.shape[0] else 3.0


def numbered(net: Any, x: torch.Tensor) -> float:
    return float(net.table.setdefault(x.shape[0], 1 + len(net.table)))


def of_weight(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.made is None:
        net.made = net.b.weight.detach().sum()
    return net.made  # type: ignore[no-any-return]


KEPT: dict[str, Callable[[], Net]] = {
    "a flag of the first call": lambda: Net(first_alone, is_first=True),
    "the batch of the last call": lambda: Net(last_batch, last=None),
    "a number for each batch": lambda: Net(numbered, table={}),
}


def built(kind: str) -> Net:
    torch.manual_seed(0)
    return (KEPT.get(kind) or (lambda: Net(of_weight, made=None)))().eval()


def whole_and_split(kind: str, ran: bool, change: Callable[[nn.Module], object] = lambda net: None) -> tuple[Net, Any]:
    """Twins, one of them split; where they `ran` before, that was at two batches."""
    nets = built(kind), built(kind)
    for net in nets:
        for batch in (3, 2) if ran else ():
            net(*inputs(batch, False))
        change(net)
    return nets[0], prepare_split(nets[1], inputs(2, False), split=SplitSpec("after:a", dynamic_batch=(1, 8)))


def held(whole: Net, runtime: Any) -> None:
    """Both give the same, call by call, on inputs that no relu makes zeros of."""
    for batch in (2, 3, 2, 5, 1, 2):
        some = inputs(batch, True)
        theirs = whole(*some)
        assert theirs.any()
        assert difference(theirs, runtime.run_suffix(runtime.run_prefix(*some))) is None, batch


@pytest.mark.parametrize("kind", sorted(KEPT))
@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
def test_what_later_calls_do_otherwise_is_refused_or_followed(kind: str, ran: bool) -> None:
    try:
        whole, runtime = whole_and_split(kind, ran)
        held(whole, runtime)
    except UnsupportedError:
        return
    assert (kind, ran) == ("a flag of the first call", True)  # which stays as it is from then on


def test_what_an_earlier_call_made_of_a_weight_stays_though_the_weight_is_another() -> None:
    @torch.no_grad()
    def change(net: Any) -> None:
        net.b.weight.mul_(1.5)

    held(*whole_and_split("what is made of a weight", True, change))


def test_a_dropout_that_leaves_zeros_alone_lets_no_plan_make_it_anew() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """(B, 4) -> (B, 4)."""
            if not hasattr(self, "made"):
                self.made = self.a.weight.detach().sum() * 2
            with torch.no_grad():
                dropped = torch.dropout(self.a(x).relu(), 0.9, self.training)
            return dropped * self.made + self.a(x)

    def run(of: Callable[..., Any], batch: int) -> Any:
        torch.manual_seed(batch)
        return of(*inputs(batch, True))

    torch.manual_seed(0)
    whole, split = Dropped(), Dropped()
    split.load_state_dict(whole.state_dict())
    runtime = prepare_split(split, inputs(2, True), split=SplitSpec("cut:1", dynamic_batch=(1, 8)))
    for net in (whole, runtime):
        run(net if net is whole else lambda *x: runtime.run_suffix(runtime.run_prefix(*x)), 2)
    with torch.no_grad():
        for net in (whole, split):
            net.a.weight.mul_(1.5)
    for batch in (1, 3, 1, 5, 2, 8):
        theirs = run(whole, batch)
        assert difference(theirs, run(lambda *x: runtime.run_suffix(runtime.run_prefix(*x)), batch)) is None, batch


@pytest.mark.planted
@pytest.mark.parametrize("kind", sorted(KEPT))
def test_without_a_look_at_what_ran_it_would_be_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "differs", lambda one, later: difference(one.output, later.output))
    monkeypatch.setattr(Example, "lively", lambda self, sign=1: self.turned())
    monkeypatch.setattr(ways, "differs_by_state", lambda *_: None)
    with pytest.raises(AssertionError):
        held(*whole_and_split(kind, kind == "the batch of the last call"))


@pytest.mark.planted
def test_without_a_look_at_what_is_filled_another_would_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "_is_as_left", lambda value, left: value is not None)
    monkeypatch.setattr(Answer, "differs", lambda one, later: difference(one.output, later.output))
    with pytest.raises(AssertionError):
        test_what_an_earlier_call_made_of_a_weight_stays_though_the_weight_is_another()


# What is a cache


def tables(net: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] not in net.table:
        net.table[x.shape[0]] = torch.linspace(1, 2, 4).cumsum(0)
    return net.table[x.shape[0]]  # type: ignore[no-any-return]


def of_last_size(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.shape != x.shape[1:]:
        net.shape, net.made = x.shape[1:], torch.arange(1.0, 1 + x.shape[1]) * 0.5
    return net.made  # type: ignore[no-any-return]


def of_longest(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.made is None or net.made.shape[0] < x.shape[1]:
        net.made = torch.arange(1.0, 1 + x.shape[1])
    return net.made[: x.shape[1]]  # type: ignore[no-any-return]


def taken_from_longest(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.made is None or net.made.shape[0] < x.shape[1]:
        net.made = torch.arange(1.0, 1 + x.shape[1])
    return net.made[torch.arange(x.shape[1])]  # type: ignore[no-any-return]


FILLS = {
    "a table": tables,
    "what is made for the last size": of_last_size,
    "what is cut from a longer one": of_longest,
    "what is taken from a longer one": taken_from_longest,
}


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_what_is_filled_with_the_same_at_each_first_call_is_none_the_less_a_cache(
    fill: Callable[[Any, torch.Tensor], Any], ran: bool
) -> None:
    torch.manual_seed(0)
    nets = Net(fill, table={}, shape=None, made=None).eval(), Net(fill, table={}, shape=None, made=None).eval()
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        for batch in (3, 2) if ran else ():
            net(*inputs(batch, False))
    held(nets[0], prepare_split(nets[1], inputs(2, False), split=SplitSpec("after:a", dynamic_batch=(1, 8))))


def answer(run: Callable[[], Any]) -> Answer:
    undone = Undone(Reach(nn.Identity()).snapshot((), {}))
    with undone:
        return Answer(run(), undone.ran)


def test_an_op_is_told_from_others_by_its_numbers_and_by_those_that_small_tensors_hold() -> None:
    x = torch.ones(2)
    runs: list[Callable[[], Any]] = [
        lambda: x * 2.0,
        lambda: x * 3.0,
        lambda: x * torch.tensor([2.0, 3.0]),
        lambda: x * torch.tensor([2.0, 4.0]),
        lambda: x * float("nan"),
        lambda: x.sum(0),
        lambda: x + 2.0,
    ]
    answers = [(answer(run), answer(run)) for run in runs]
    for i, (one, _) in enumerate(answers):
        for k, (_, other) in enumerate(answers):
            assert (one.ran.beyond(other.ran) is None) == (i == k), (i, k)


def test_what_memory_held_before_it_was_written_is_no_number() -> None:
    def run() -> Any:
        room = torch.empty(64)
        room[:32] = 1
        room[32:] = 2
        return room * 2

    kept = []
    for fill in (0.0, 7.0):
        kept.append(torch.full((64,), fill))
        kept.pop()  # the next one of this size is likely to lie where it did
        assert answer(run).differs(answer(run)) is None
