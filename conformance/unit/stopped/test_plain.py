"""A plain module whose call ends at the cut is not run once more for a suffix from what crossed; any other one is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, PayloadError
from ariadne.stopped import noted, skipped
from ariadne.stopped.noted import Before

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """A part that is called with a list and may put something there, and a rest that counts that, and branches on data."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.enter, self.part, self.head = nn.Linear(4, 4), part, nn.Linear(4, 2)
        self.takes_list = isinstance(part, Appends)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[int] = []
        h = self.enter(x).relu()
        h = self.part(h, seen) if self.takes_list else self.part(h)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(h + len(seen) if h.sum() > 0 else h - len(seen))


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        return self.inner(x) + 2


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hooked() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    made[0].register_forward_hook(lambda module, args, output: output * 2)
    return made


def overridden() -> nn.Module:
    made = nn.Linear(4, 4)
    made.forward = lambda x: nn.functional.linear(x, made.weight) * 3  # type: ignore[method-assign]
    return made


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(4, 4),
    "layers": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(4)), nn.Dropout()
    ),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)),
}


def of_the_user(x: Tensor) -> Tensor:
    return x.relu()


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a function of the user's": lambda: nn.TransformerEncoderLayer(
        4, 2, 8, activation=of_the_user, dropout=0.0
    ).train(),
    "a class of the user's": lambda: nn.Sequential(Own(4, 4)),
    "a hook": hooked,
    "a forward of its own": overridden,
    "a list": Appends,
    "what came in": nn.Identity,
    "written in place": lambda: nn.ReLU(inplace=True),
    "a tuple": lambda: nn.LSTM(4, 4),
}


def split(part: Callable[[], nn.Module], train: bool = False) -> PythonSplit:
    torch.manual_seed(0)
    net = Net(part()).train(train)
    made = prepare_split(net, (X,), split=SplitSpec("after:part", max_paths=1, trainable=False), fallback="python")
    assert isinstance(made, PythonSplit)
    assert not made.stays
    return made


def sent(runtime: PythonSplit, x: Tensor = X) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(runtime.run_prefix(x).to_bytes())


def run(runtime: PythonSplit, boundary: BoundaryPayload, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """What the suffix gives, and how many calls of torch were gone through before the cut."""
    calls = []
    given = skipped.Skipping._given

    def counted(self: Any, entry: Any, func: Any, *args: Any) -> Any:
        calls.append(func)
        return given(self, entry, func, *args)

    monkeypatch.setattr(skipped.Skipping, "_given", counted)
    found = runtime.run_suffix(boundary)
    monkeypatch.undo()
    return found, len(calls)


@pytest.mark.parametrize("part", PLAIN)
def test_a_plain_module_is_not_run_once_more(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split(PLAIN[part])
    for x in (X, X - 3):
        with torch.no_grad():
            whole = runtime.model(x)
        boundary = sent(runtime, x)
        assert Before.read(boundary.raw[-1]).entry
        for _ in range(2):
            found, calls = run(runtime, boundary, monkeypatch)
            assert torch.equal(found, whole)
            assert calls == 2  # `enter` and `relu`


@pytest.mark.parametrize("part", OTHERS)
def test_another_module_runs_again(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split(OTHERS[part])
    with torch.no_grad():
        whole = runtime.model(X)
    boundary = sent(runtime)
    assert not Before.read(boundary.raw[-1]).entry
    found, calls = run(runtime, boundary, monkeypatch)
    assert torch.equal(found, whole)
    assert calls > 2 or part == "what came in"


def test_a_part_that_is_taken_for_plain_though_it_is_not_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (noted, skipped):
        monkeypatch.setattr(where, "told_of", lambda module: (1,))
    torch.manual_seed(0)
    net = Net(Appends()).eval()
    runtime: Any = prepare_split(
        net, (X,), split=SplitSpec("after:part", max_paths=1, trainable=False), fallback="python"
    )
    assert "differ" in runtime.stays


def test_statistics_that_the_part_writes_keep_it_running(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split(lambda: nn.BatchNorm1d(4), train=True)
    boundary = sent(runtime)
    assert not Before.read(boundary.raw[-1]).entry
    assert run(runtime, boundary, monkeypatch)[1] > 2


def hook(model: Any) -> None:
    model.part.register_forward_hook(lambda module, args, output: None)


def override(model: Any) -> None:
    model.part[0].forward = lambda x: nn.functional.linear(x, model.part[0].weight, model.part[0].bias)


def other_class(model: Any) -> None:
    model.part[1][0] = nn.Hardtanh(0)


DIFFERENT: dict[str, Callable[[Any], None]] = {
    "a flag": lambda model: model.part.train(),
    "a hook": hook,
    "a forward": override,
    "a class": other_class,
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_a_part_that_differs_on_the_other_side_runs_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = split(PLAIN["layers"])
    other, boundary = copy.deepcopy(runtime), sent(runtime)
    with torch.no_grad():
        whole = runtime.model(X)
    found, calls = run(other, boundary, monkeypatch)
    assert torch.equal(found, whole)
    assert calls == 2
    DIFFERENT[change](other.model)
    if change == "a class":
        with pytest.raises(BoundaryError, match="goes another way here than where the prefix ran"):
            other.run_suffix(boundary)
        return
    found, calls = run(other, boundary, monkeypatch)
    assert torch.equal(found, whole)
    assert calls > 2


def test_what_went_another_way_before_the_part_is_refused() -> None:
    runtime = split(PLAIN["layers"])
    other: Any = copy.deepcopy(runtime)
    other.model.enter.register_forward_hook(lambda module, args, output: output.cos())
    with pytest.raises(BoundaryError, match="goes another way here than where the prefix ran"):
        other.run_suffix(sent(runtime))


@pytest.mark.parametrize("entry", [(1,), (1, 2, 3), ("1", 2, ()), (1, 2, (), 4)])
def test_an_entry_that_is_none_is_refused(entry: tuple[Any, ...]) -> None:
    told = split(PLAIN["a layer"]).run_prefix(X).crossing().raw[-1]
    at = [type(part) for part in told].index(str) + 1
    with pytest.raises(PayloadError, match="malformed"):
        Before.read((*told[:at], entry))


def test_a_list_that_was_made_anew_of_the_same_lets_a_suffix_run_twice() -> None:
    class Anchors(Net):
        made: Any = None
        cells = (torch.ones(1), torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            h = self.part(self.enter(x))
            self.made = [*self.cells]
            return self.head(h) * self.made[0] if h.sum() > 0 else self.head(h)

    torch.manual_seed(0)
    net = Anchors(nn.Linear(4, 4)).eval()
    runtime = prepare_split(net, (X,), split=SplitSpec("after:part", max_paths=1, trainable=False), fallback="python")
    boundary = BoundaryPayload.from_bytes(runtime.run_prefix(X).to_bytes())
    first = runtime.run_suffix(boundary)
    with torch.no_grad():
        whole = net(X)  # which makes the list anew
    assert torch.equal(first, whole)
    assert torch.equal(runtime.run_suffix(boundary), whole)
    net.made = [torch.zeros(1), torch.ones(2)]
    with pytest.raises(BoundaryError, match="'made'"):
        runtime.run_suffix(boundary)
