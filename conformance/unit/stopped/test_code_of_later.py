"""Code that comes after a Python split was made, or between its halves: what it changes counts once, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, SplitSpec
from ariadne.errors import BoundaryError
from ariadne.prepare import _settings, example_of
from ariadne.stopped import prepared

X = torch.ones(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def before(self, x: Tensor) -> Tensor:
        return self.a(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.before(x))
        return self.c(h if h.sum() > 0 else -h)


def split(model: nn.Module) -> PythonSplit:
    settings = _settings(SplitSpec("after:b"), "generated_eager", None, None)
    return prepared(model.eval(), settings, example_of(model, (X,), None, settings.spec), "asked for", training=False)


def sent(runtime: PythonSplit) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(runtime.run_prefix(X).to_bytes())


COUNTS = """
N = 0
def counts(*given):
    global N
    N = N + 1
def calls(x):
    counts()
    return forward(x)
"""


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("global hook", "before"),
        ("global hook", "later"),
        ("hook", "later"),
        ("function of the module", "later"),
        ("variable", "later"),
    ],
)
def test_what_a_hook_or_a_function_counts_before_the_cut_is_found_whenever_that_came(where: str, when: str) -> None:
    table: dict[str, Any] = {"__name__": __name__}
    exec(COUNTS, table)
    helper: Callable[[], None] = lambda: None  # noqa: E731 - it is bound anew

    class Calls(Net):
        def before(self, x: Tensor) -> Tensor:
            helper()
            return super().before(x)

    net, handles = Calls(), list[Any]()

    def come() -> None:
        nonlocal helper
        if where == "hook":
            net.a.register_forward_hook(table["counts"])
        elif where == "global hook":
            handles.append(nn.modules.module.register_module_forward_pre_hook(table["counts"]))
        elif where == "variable":
            helper = table["counts"]
        else:
            table["forward"] = net.a.forward
            net.a.forward = table["calls"]  # type: ignore[method-assign]

    try:
        if when == "before":
            come()
        runtime = split(net)
        if when == "later":
            runtime.run_suffix(sent(runtime))
            come()
        with pytest.raises(BoundaryError, match="before the cut forward changes what 'N of the globals"):
            sent(runtime)
        assert table["N"]
    finally:
        for handle in handles:
            handle.remove()


def helper(h: Tensor) -> Tensor:
    return h * 5


class Looks(Net):
    @staticmethod
    def static(h: Tensor) -> Tensor:
        return h * 2

    @classmethod
    def of_class(cls, h: Tensor) -> Tensor:
        return h * 3

    def method(self, h: Tensor) -> Tensor:
        return h * 4

    def forward(self, x: Tensor) -> Tensor:
        known = self.method, self.static, self.of_class, helper
        h = self.b(self.before(x))
        for call in known:
            h = call(h)
        return self.c(h if h.sum() > 0 else -h)


def test_code_that_is_another_since_the_prefix_ran_is_refused_until_it_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = split(Looks())
    told, waits = sent(runtime), runtime.run_prefix(X)
    whole = runtime.run_suffix(told)
    others: list[tuple[Any, str, Any, str]] = [
        (Looks, "method", lambda self, h: h, "'method'"),
        (Looks, "static", staticmethod(lambda h: h), "'static'"),
        (Looks, "of_class", classmethod(lambda cls, h: h), "'of_class'"),
        (Looks.method, "__code__", (lambda self, h: h).__code__, "the code of Looks.method"),
        (helper, "__code__", (lambda h: h).__code__, "the code of helper"),
    ]
    for thing, name, other, what in others:
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, other)
            for boundary in (told, waits):
                with pytest.raises(BoundaryError, match=f"another call, or you, changed {what}"):
                    runtime.run_suffix(boundary)
        assert torch.equal(runtime.run_suffix(told), whole)
    assert torch.equal(runtime.run_suffix(waits), whole)
