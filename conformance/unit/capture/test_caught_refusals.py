"""A refusal that forward catches stands all the same: what forward did from there on, it does in no call that is not recorded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.errors import UnsupportedError

Body = Callable[[Any, torch.Tensor], Any]
CATCHING: dict[str, tuple[Body, str]] = {
    "a hook": (lambda m, x: x.register_hook(lambda g: 3 * g), r"calls Tensor\.register_hook"),
    "a seed": (lambda m, x: torch.manual_seed(3), r"calls torch\.manual_seed"),
    "where a generator stands": (lambda m, x: torch.get_rng_state(), r"calls torch\.get_rng_state"),
    "the address": (lambda m, x: x.data_ptr(), r"calls Tensor\.data_ptr"),
    "pickle": (lambda m, x: torch.save(x, io.BytesIO()), r"__reduce_ex__"),
    "history": (lambda m, x: x._version, "asks '_version'"),
    "a transform": (lambda m, x: torch.func.vmap(torch.sin)(x), r"torch\.func \(vmap\)"),
    "what wants a gradient": (
        lambda m, x: m.b.bias.requires_grad_(False),
        "sets requires_grad of a tensor of the model",
    ),
}


class Net(nn.Module):
    def __init__(self, body: Body, kind: type[Exception] = Exception, instead: Body | None = None) -> None:
        super().__init__()
        self.a, self.b, self.body, self.kind, self.instead = nn.Linear(4, 4), nn.Linear(4, 4), body, kind, instead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.instead is None:
            with suppress(self.kind):
                self.body(self, x)
            return self.b(self.a(x).relu())  # type: ignore[no-any-return]
        y = self.a(x)
        try:
            return self.b(self.body(self, y))  # type: ignore[no-any-return]
        except self.kind:
            return self.b(self.instead(self, y))  # type: ignore[no-any-return]


def split(model: nn.Module, x: torch.Tensor) -> Any:
    return prepare_split(model, (x,), split=SplitSpec("after:a", dynamic_batch=(1, 8)))


@pytest.mark.parametrize(("body", "words"), CATCHING.values(), ids=CATCHING)
def test_a_refusal_that_forward_catches_is_raised_by_name(body: Body, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        split(Net(body), torch.randn(2, 4))


def test_an_error_of_forwards_own_after_a_refusal_leaves_the_refusal_to_be_read() -> None:
    def gives_up(m: Any, x: torch.Tensor) -> Any:
        raise ValueError("no way is left")

    model = Net(lambda m, x: x.data_ptr(), instead=gives_up)
    with pytest.raises(UnsupportedError, match=r"calls Tensor\.data_ptr"):
        split(model, torch.randn(2, 4))


def test_an_error_of_torchs_that_forward_catches_is_followed() -> None:
    model = Net(lambda m, x: x @ torch.ones(5, 4), kind=RuntimeError, instead=lambda m, x: x.tanh())
    runtime = split(model, torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), copy.deepcopy(model)(x))


def test_text_of_a_size_that_forward_asks_for_and_catches_is_captured_by_real_runs() -> None:
    model = Net(lambda m, x: x * len(f"{x.shape[0]}"), instead=lambda m, x: x * 7)
    runtime = split(model, torch.randn(2, 4))
    for batch in (2, 3, 8):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), copy.deepcopy(model)(x))
