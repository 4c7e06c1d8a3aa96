"""Arguments that go by name where the example had them by position, and the other way round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import InputError


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, pair: Any, scale: float = 2.0) -> Tensor:
        h = self.a(x) * pair[0] * scale
        found: Tensor = self.b(h.relu() if x.shape[0] > 5 else h - pair[1])
        return found


class Alone(Masked):
    def forward(self, x: Tensor, pair: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, (pair, 1.0))


def inputs(batch: int, alone: bool) -> tuple[Tensor, Any]:
    x, m = (torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch + i)) for i in range(2))
    return x, m if alone else (m, m + 1)


FORMS: list[Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = [
    lambda x, pair: ((x, pair), {}),
    lambda x, pair: ((x,), {"pair": pair}),
    lambda x, pair: ((), {"pair": pair, "x": x}),
]


@pytest.mark.parametrize("kind", [Masked, Alone])
@pytest.mark.parametrize("example", FORMS, ids=["by position", "mixed", "by name"])
def test_a_call_in_any_form_is_that_call(kind: type[Masked], example: Any) -> None:
    model = kind().eval()
    args, kwargs = example(*inputs(2, kind is Alone))
    runtime = prepare_split(model, args, example_kwargs=kwargs, split=SplitSpec("after:a", dynamic_batch=(1, 9)))
    for batch in (3, 7):  # of which the second takes a plan of its own
        for form in FORMS:
            given, named = form(*inputs(batch, kind is Alone))
            with torch.no_grad():
                whole = model(*given, **named)
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(*given, **named)), whole)
    runtime.warmup(*FORMS[2](*inputs(3, kind is Alone))[0], **FORMS[2](*inputs(3, kind is Alone))[1])


def passes_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * (1 + len(kwargs))

    return wrapped


def decorated() -> nn.Module:
    class Decorated(Alone):
        forward = passes_on(Alone.forward)  # type: ignore[assignment]

    return Decorated().eval()


def hooked() -> nn.Module:
    model = Alone().eval()
    model.register_forward_pre_hook(lambda module, args: tuple(t * 2 for t in args))
    return model


@pytest.mark.parametrize("make", [decorated, hooked])
def test_where_the_forms_may_differ_each_has_a_plan(make: Callable[[], nn.Module]) -> None:
    x, m = inputs(2, True)
    model = make()
    runtime = prepare_split(model, (x, m), split="after:a")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, pair=m)), model(x, pair=m))
    assert len(runtime.plans) == 2


def test_another_argument_is_another_call() -> None:
    x, pair = inputs(2, False)
    runtime = prepare_split(Masked().eval(), (x, pair), split="after:a")
    for args, kwargs in (
        ((x, pair), {"x": x}),
        ((x,), {"mask": pair}),
    ):
        with pytest.raises(InputError, match="another structure than at capture"):
            runtime.run_prefix(*args, **kwargs)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        h = self.a(x) * scale
        found: Tensor = self.b(h if mask is None else h * mask)
        return found


LEFT_OUT: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((None,), {}),
    ((None, 2.0), {}),
    ((), {"mask": None}),
    ((), {"scale": Optional.forward.__defaults__[1], "mask": None}),  # type: ignore[index]
]


@pytest.mark.parametrize("example", range(len(LEFT_OUT)))
def test_a_default_that_is_passed_is_as_one_that_is_left_out(example: int) -> None:
    model, x = Optional().eval(), torch.randn(2, 4)
    args, kwargs = LEFT_OUT[example]
    runtime = prepare_split(model, (x, *args), example_kwargs=kwargs, split="after:a")
    for given, named in LEFT_OUT:
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, *given, **named)), model(x))
    assert len(runtime.plans) == 1
    mask = torch.full((2, 4), 3.0)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, mask)), model(x, mask))
