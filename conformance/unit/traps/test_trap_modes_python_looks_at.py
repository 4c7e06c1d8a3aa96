"""Traps 17 and 18: Python that branches on the grad mode or on being traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import is_grad_enabled, nn

from ariadne import SplitRuntime, prepare_split, prepare_split_replay
from conformance.unit.trap_twins import Twins, seeded

# 17. Python that branches on the grad mode


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre, self.attention, self.out = (
            nn.Linear(8, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pre(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Looks(nn.Module):
    """Another op with gradients on; `how` asks for the mode."""

    def __init__(self, how: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x)
        return torch.relu(x) * 2 if self.how(x) else torch.sigmoid(x) * 2


WAYS_TO_ASK_FOR_GRADIENTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "torch.is_grad_enabled": lambda x: torch.is_grad_enabled(),
    "the same, imported by name": lambda x: is_grad_enabled(),
    "torch._C.is_grad_enabled": lambda x: torch._C.is_grad_enabled(),
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: not x.is_leaf,
    "is_inference_mode_enabled": lambda x: not torch.is_inference_mode_enabled() and torch.is_grad_enabled(),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("build", [encoder, Attention])
def test_fast_paths_of_torch_are_those_of_the_mode(build: Callable[[], nn.Module], train: bool) -> None:
    twins = Twins(build, seeded((2, 5, 8)), train=train)
    few = twins.cuts()[::4]
    for b in (1, 3):
        twins.replay(seeded((b, 5, 8), b), cuts=few)
        twins.train(seeded((b, 5, 8), b), cuts=few)


@pytest.mark.parametrize("prepare", [prepare_split, prepare_split_replay])
@pytest.mark.parametrize("way", WAYS_TO_ASK_FOR_GRADIENTS)
def test_python_that_looks_at_the_grad_mode_sees_that_of_the_call(
    way: str, prepare: Callable[..., SplitRuntime]
) -> None:
    Twins(lambda: Looks(WAYS_TO_ASK_FOR_GRADIENTS[way]), seeded((2, 6)), prepare=prepare).hold(6, batches=(1, 3))


def test_prepared_under_no_grad_it_trains_all_the_same() -> None:
    with torch.no_grad():
        twins = Twins(lambda: Looks(WAYS_TO_ASK_FOR_GRADIENTS["torch.is_grad_enabled"]), seeded((2, 6)))
    twins.hold(6, batches=(1, 3))


# 18. Python that branches on being traced


WAYS_TO_ASK_FOR_TRACING: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda x: torch.compiler.is_dynamo_compiling(),
    "torch._dynamo.is_compiling": lambda x: torch._dynamo.is_compiling(),
    "jit.is_tracing": lambda x: torch.jit.is_tracing(),
    "jit.is_scripting": lambda x: torch.jit.is_scripting(),
    "onnx.is_in_onnx_export": lambda x: torch.onnx.is_in_onnx_export(),
    "_get_tracing_state": lambda x: torch._C._get_tracing_state() is not None,
    "is_fx_tracing": lambda x: torch.fx._symbolic_trace.is_fx_tracing(),
    "the type of a tensor": lambda x: type(x) is not torch.Tensor,
    "the type of a size": lambda x: type(x.shape[0]) is not int,
    "a dispatch mode": lambda x: torch.utils._python_dispatch._get_current_dispatch_mode() is not None,
    "a function mode": lambda x: bool(torch.overrides._get_current_function_mode_stack()),
}


class Shy(nn.Module):
    """Does something else where it believes that it is being traced."""

    def __init__(self, traced: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.traced, self.a, self.b = traced, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        if self.traced(x):
            return torch.sigmoid(self.b(x) * 2)
        return torch.relu(self.b(x)) * 2


@pytest.mark.parametrize("way", WAYS_TO_ASK_FOR_TRACING)
def test_what_is_captured_is_the_forward_that_runs(way: str) -> None:
    Twins(lambda: Shy(WAYS_TO_ASK_FOR_TRACING[way]), seeded((2, 6))).hold(6, batches=(1, 3))
