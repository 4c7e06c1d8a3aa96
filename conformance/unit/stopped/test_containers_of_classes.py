"""Containers whose classes have methods of their own are read, compared and put back by those of Python's."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.guards import contents_of, refill
from ariadne.prepare import _settings, example_of
from ariadne.stopped import held as now_held
from ariadne.stopped import prepared, python

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def refuses(*_: Any) -> NoReturn:
    raise TypeError("not so")


class OneArgument(dict[Any, Any]):
    """As a registry of transformers is: asked for a thing by its class, and for nothing else."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(str(key), value)

    def get(self, key: Any) -> Any:  # type: ignore[override]
        return super().get(str(key)) or {}


class Closed(dict[Any, Any]):
    get = items = keys = values = update = clear = copy = refuses
    __iter__ = __len__ = __contains__ = refuses  # type: ignore[assignment]


class ClosedInOrder(OrderedDict[Any, Any]):
    get = update = clear = copy = refuses  # type: ignore[assignment]


class ClosedList(list[Any]):
    extend = clear = copy = refuses  # type: ignore[assignment]
    __iter__ = __len__ = refuses  # type: ignore[assignment]


class ClosedDeque(deque[Any]):
    extend = clear = copy = refuses  # type: ignore[assignment]
    __iter__ = __len__ = refuses  # type: ignore[assignment]


class ClosedSet(set[Any]):
    update = clear = copy = refuses  # type: ignore[assignment]
    __iter__ = __len__ = refuses  # type: ignore[assignment]


REGISTRY = OneArgument({"kept": 1})
KINDS: dict[str, Callable[[], Any]] = {
    "one_argument": lambda: OneArgument({"kept": 1}),
    "closed": lambda: Closed({"kept": 1}),
    "in_order": lambda: ClosedInOrder({"kept": 1}),
    "list": lambda: ClosedList([1]),
    "deque": lambda: ClosedDeque([1]),
    "set": lambda: ClosedSet([1]),
    "user_dict": lambda: UserDict({"kept": 1}),
}


class Net(nn.Module):
    """Holds a container; where it `puts`, something is put there before and after the cut."""

    def __init__(self, kept: Any, puts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.kept, self.puts = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), kept, puts

    def put(self, at: str) -> None:
        if not self.puts:
            return
        kept = self.kept.data if isinstance(self.kept, UserDict) else self.kept
        own = next(k for k in (OrderedDict, dict, list, deque, set) if isinstance(kept, k))
        if issubclass(own, dict):
            own.__setitem__(kept, at, own.get(kept, at, 0) + 1)
        elif own is set:
            set.add(kept, at)
        else:
            own.append(kept, at)

    def forward(self, x: Tensor) -> Tensor:
        REGISTRY.get(self)
        self.put("before")
        y = self.b(self.a(x).relu())
        self.put("after")
        return self.c(y * 2 if y.sum() > 0 else y.sin())


def split(net: nn.Module) -> PythonSplit:
    settings = _settings(SplitSpec("after:b"), "generated_eager", None, None)
    return prepared(net, settings, example_of(net, (X,), None, settings.spec), "told to", training=True)


def held(net: Net) -> Any:
    return contents_of(net.kept.data if isinstance(net.kept, UserDict) else net.kept)


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_that_holds_one_is_stopped_and_goes_on(kind: str, puts: bool) -> None:
    net, whole = Net(KINDS[kind](), puts), Net(KINDS[kind](), puts)
    runtime = split(net)
    assert held(net) == held(whole)
    for x in (X, -X):
        with torch.no_grad():
            assert difference(whole(x), runtime.run_suffix(runtime.run_prefix(x))) is None
        assert held(net) == held(whole)
    boundary = runtime.run_training_prefix(X)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.square().sum())
    runtime.backward_prefix(boundary, gradients)
    (theirs := whole(X).square().sum()).backward()
    assert difference(theirs.detach(), loss) is None
    assert difference([p.grad for p in whole.parameters()], [p.grad for p in net.parameters()]) is None


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "user_dict"])
def test_contents_are_copied_and_put_back(kind: str) -> None:
    thing = KINDS[kind]()
    was = contents_of(thing)
    assert type(was) in (dict, list, set)
    refill(thing, type(was)())
    assert not contents_of(thing)
    refill(thing, was)
    assert contents_of(thing) == was


def test_what_was_changed_before_a_stop_is_put_back_by_pythons_own_methods() -> None:
    net = Net(KINDS["closed"](), False)
    state = python.PythonState(net)
    dict.__setitem__(net.kept, "new", 2)
    undoing = state.undoing()
    assert "kept" in str(state.changed_inside())
    undoing.run()
    assert held(net) == {"kept": 1}


@pytest.mark.planted
def test_a_get_of_the_classs_own_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(now_held, "same_items", lambda thing, was: now_held.names_stand(thing.get, was))
    with pytest.raises(TypeError):
        split(Net(KINDS["one_argument"](), False))


@pytest.mark.variants
@pytest.mark.parametrize("training", [False, True])
def test_a_model_of_transformers_that_keeps_such_a_registry(training: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    net = transformers.LlamaForCausalLM(config).train(training)
    whole, given = copy.deepcopy(net), {"input_ids": ids, "labels": ids, "use_cache": True}
    runtime = prepare_split(net, (), split="after:model.layers.0", example_kwargs=given, fallback="python")
    with torch.no_grad():
        mine, theirs = runtime.run_suffix(runtime.run_prefix(**given)), whole(**given)
    assert difference([theirs.loss, theirs.logits], [mine.loss, mine.logits]) is None
    boundary = runtime.run_training_prefix(**given)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.loss)
    runtime.backward_prefix(boundary, gradients)
    whole(**given).loss.backward()
    assert difference([p.grad for p in whole.parameters()], [p.grad for p in net.parameters()]) is None
