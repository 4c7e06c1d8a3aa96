"""Tensors of classes of the user's own: outputs come back in their class, gradients go through, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split, tree
from ariadne.errors import UnsupportedError, VerificationError
from ariadne.runtime.variant import Variant
from conformance.unit.trap_kit import Fn, Twins, loss_of, numbers, same


class Bare(torch.Tensor):
    """Only a name; torch itself does not copy such a tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()


class Speaking(torch.Tensor):
    """Adds an op of its own to what `linear` gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is nn.functional.linear else found


Forward = Callable[[Any, torch.Tensor], Any]
FORWARDS: dict[str, Forward] = {
    "the output": lambda s, x: s.b(torch.tanh(s.a(x))).as_subclass(Bare),
    "in the middle": lambda s, x: s.b(torch.tanh(s.a(x).as_subclass(Bare))),
    "and back": lambda s, x: s.b(torch.tanh(s.a(x).as_subclass(Bare))).as_subclass(torch.Tensor),
    "in a dict": lambda s, x: {"out": s.b(s.a(x)).as_subclass(Bare), "plain": torch.tanh(s.a(x))},
    "with ops of its own": lambda s, x: s.b(torch.tanh(s.a(x).as_subclass(Speaking))),
    "of an attribute": lambda s, x: s.b(torch.tanh(s.a(x) * s.kept)),
    "an input": lambda s, x: (s.b(torch.tanh(s.a(x.as_subclass(Bare)))), x.as_subclass(Bare)),
    "an input that is returned, too": lambda s, x: (lambda h: (s.b(torch.tanh(s.a(h))), h))(x.as_subclass(Bare)),
    "of an attribute, and back": lambda s, x: (s.b(s.a(x) * s.kept).as_subclass(torch.Tensor), x),
    "without a graph": lambda s, x: (s.b(s.a(x)), torch.Tensor._make_subclass(Bare, s.a(x))),
}


def made(name: str) -> nn.Module:
    return Fn(FORWARDS[name], a=nn.Linear(6, 6), b=nn.Linear(6, 6), kept=torch.linspace(0.5, 1.5, 6).as_subclass(Bare))


def classes(value: Any) -> list[tuple[type, bool]]:
    return [(type(t), t.requires_grad) for t in tree.leaves(value) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", FORWARDS)
def test_outputs_come_back_in_their_class_and_train_as_in_the_whole(name: str) -> None:
    twins = Twins(lambda: made(name), numbers(2, 6))
    for x in (numbers(2, 6), numbers(3, 6), numbers(1, 6)):
        twins.replay(x)
    for runtime in twins.cuts():
        with torch.no_grad():
            assert classes(twins.whole(numbers(3, 6))) == classes(runtime.run_suffix(runtime.run_prefix(numbers(3, 6))))
        boundary = runtime.run_training_prefix(numbers(3, 6))
        seen: list[Any] = []

        def loss(output: Any, targets: Any, seen: list[Any] = seen) -> torch.Tensor:
            seen.append(classes(output))
            return plain_loss(output)

        runtime.train_suffix(boundary, loss_fn=loss)
        assert seen == [classes(twins.whole(numbers(3, 6)))]
        twins.split.zero_grad()
    twins.train(numbers(3, 6), loss=plain_loss)


def plain_loss(output: Any, targets: Any = None) -> torch.Tensor:
    return loss_of(tree.map_leaves(lambda t: t.as_subclass(torch.Tensor), output))


@pytest.mark.parametrize("trainable", [False, True])
def test_the_interpreter_gives_the_same_classes(trainable: bool) -> None:
    model = made("in a dict")
    runtime = prepare_split(model, (numbers(2, 6),), split=SplitSpec("50%", trainable=trainable))
    slow = runtime.resplit(mode="debug_interpreter")
    assert classes(slow.run_suffix(slow.run_prefix(numbers(3, 6)))) == [(Bare, False), (torch.Tensor, False)]
    assert "Bare(" in str(runtime.plan)


@pytest.mark.parametrize("first", [torch.Tensor, Bare])
@pytest.mark.parametrize("name", ["the output", "and back", "of an attribute, and back"])
def test_inputs_of_another_class_than_at_capture_get_a_plan_of_their_own(name: str, first: type) -> None:
    model = made(name)
    runtime = prepare_split(model, (numbers(2, 6).as_subclass(first),), split="50%")
    for kind in (Bare, torch.Tensor, nn.Parameter, Bare):
        x = nn.Parameter(numbers(3, 6)) if kind is nn.Parameter else numbers(3, 6).as_subclass(kind)
        with torch.no_grad():
            expected = model(x)
            found = runtime.run_suffix(runtime.run_prefix(x))
        assert classes(expected) == classes(found)
        same(expected, found)


class Ending(torch.Tensor):
    """Ops give plain tensors of it, as of torchvision's `Image`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_inputs_of_a_class_whose_ops_give_plain_tensors_have_one_plan() -> None:
    model = made("and back")
    runtime = prepare_split(model, (numbers(4, 6).as_subclass(Ending),), split=SplitSpec("50%", trainable=False))
    for rows in (1, 3, 6):
        x = numbers(rows, 6).as_subclass(Ending)
        with torch.no_grad():
            expected, found = model(x), runtime.run_suffix(runtime.run_prefix(x))
        assert classes(expected) == classes(found)
        same(expected, found)
    assert len(runtime.plans) == 1


def tagged(s: Any, x: torch.Tensor) -> torch.Tensor:
    found: Any = s.b(s.a(x)).as_subclass(Bare)
    found.tag = "a"
    return found


def stored(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.last = s.a(x).as_subclass(Bare)
    return s.b(s.last)


KEPT: list[torch.Tensor] = []


def appended(s: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT.append(s.a(x).as_subclass(Bare))
    return s.b(KEPT[-1])


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (tagged, r"a Bare with attributes of its own \(tag\).* make the object outside"),
        (stored, r"a tensor of class Bare in attribute 'last' .* keep it as a plain tensor"),
        (
            appended,
            r"into the global 'KEPT'\[0\] that a plan can't hold, a tensor of class Bare; keep it as a plain tensor",
        ),
    ],
)
def test_what_a_class_keeps_beside_its_numbers_is_refused(forward: Forward, words: str) -> None:
    model = Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    with pytest.raises(UnsupportedError, match=words):
        prepare_split(model, (numbers(2, 6),), split="50%")


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_split_whose_outputs_lost_their_gradients_is_not_handed_out(
    all_of_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Variant.joined

    def lost(self: Variant, *args: Any, **kwargs: Any) -> Any:
        first, second = joined(self, *args, **kwargs)
        return first.detach() if all_of_them else first, second.detach()

    monkeypatch.setattr(Variant, "joined", lost)
    model = Fn(lambda s, x: (s.b(s.a(x)), s.a(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    with pytest.raises(
        VerificationError, match=r"output\[\d\] of the model is one that requires grad, and through the split"
    ):
        prepare_split(model, (numbers(2, 6),), split=SplitSpec("50%", trainable=True))
