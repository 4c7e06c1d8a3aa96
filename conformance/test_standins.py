"""Stand-ins say of a fake result what the op itself says: shape, layout, dtype, and whether it is in the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne import prepare_split, standins
from ariadne.shapes import Sizes, symbolic_batch

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it comes": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "every other": lambda t: t[..., ::2],
    "expanded": lambda t: t[..., :1].expand(-1, -1, -1, 4),
    "flat": lambda t: t.flatten(0, 2),
    "part": lambda t: t[:, :, 1:],
    "rows and columns swapped": lambda t: t.transpose(2, 3),
}
NORM = aten.batch_norm.default


def described(out: Any, given: torch.Tensor) -> tuple[Any, ...]:
    """All that a fake result is."""
    form = [str(n) for n in (*out.shape, *out.stride(), out.storage_offset())]
    return form, out.dtype, out.device, out.requires_grad, out.is_leaf, out is given, out._is_view()


@contextmanager
def fakes(grad: bool, of_input: bool, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sizes, torch.Tensor, Any]]:
    """Symbolic sizes, a fake (B, 3, 6, 4) that may be written, and what four fakes of 3 channels are made by."""
    sizes = Sizes()
    fake = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    x = symbolic_batch(fake, torch.ones(2, 3, 6, 4, dtype=dtype), "x", True)
    with fake, enable_python_dispatcher(), torch.set_grad_enabled(grad):
        x = x * torch.ones((), dtype=dtype, requires_grad=of_input)
        yield sizes, x, [torch.ones(3, dtype=dtype, requires_grad=grad and i < 2) for i in range(4)]


def found(sizes: Sizes, run: Callable[[torch.Tensor], Any], given: torch.Tensor) -> tuple[Any, ...]:
    """The result of `run`, and how much it asked of sizes."""
    asked = len(sizes.guards)
    out = run(given)
    return *described(out, given), len(sizes.guards) - asked


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_what_works_by_element_gives_what_its_stand_in_gives(layout: str, grad: bool) -> None:
    compared = 0
    with fakes(grad, of_input=True) as (sizes, x, _):
        for op in sorted(standins._QUICK, key=str):
            written = "_.default" in str(op)
            if layout == "expanded" and written:  # no op writes into that
                continue
            run, on = standins.stand_in(op, (x,))
            assert (run, on) == (aten.neg_.default if written else aten.neg.default, (x,))
            itself, stood = (found(sizes, f, LAYOUTS[layout](x * 1)) for f in (op, run))
            assert itself == stood, op
            compared += 1
    assert compared == (11 if layout == "expanded" else 21)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"flat"}))
def test_batch_norm_gives_what_its_stand_in_gives(layout: str, grad: bool, of_input: bool, training: bool) -> None:
    with fakes(grad, of_input) as (sizes, x, kept):
        given = (LAYOUTS[layout](x), *kept, training, 0.1, 1e-5, False)
        run, on = standins.stand_in(NORM, given)
        assert run is (aten.neg.default if of_input or not grad else NORM)  # else its weight puts it into the graph
        assert found(sizes, lambda _: NORM(*given), given[0]) == found(sizes, lambda _: run(*on), given[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_there_is_none_for_another_dtype(dtype: torch.dtype) -> None:
    with fakes(False, False, dtype) as (_, x, kept):
        assert standins.stand_in(aten.relu.default, (x,)) == (aten.relu.default, (x,))
        assert standins.stand_in(NORM, (x, *kept, True, 0.1, 1e-5, False))[0] is NORM


def test_there_is_none_for_real_tensors_another_op_or_under_autocast() -> None:
    assert standins.stand_in(aten.relu.default, (torch.ones(2),))[0] is aten.relu.default
    with fakes(False, False) as (_, x, kept):
        assert standins.stand_in(aten.sum.default, (x,))[0] is aten.sum.default
        with torch.autocast("cpu", torch.bfloat16):
            assert standins.stand_in(aten.relu.default, (x,))[0] is aten.relu.default
            assert standins.stand_in(NORM, (x, *kept, True, 0.1, 1e-5, False))[0] is NORM


def test_there_is_none_where_the_channels_are_not_known_or_statistics_are_of_another_dtype() -> None:
    with fakes(False, False) as (_, x, kept):
        rest = (True, 0.1, 1e-5, False)
        assert standins.stand_in(NORM, (x, *kept, *rest))[0] is aten.neg.default
        assert standins.stand_in(NORM, (x.transpose(0, 1), *kept, *rest))[0] is NORM
        assert standins.stand_in(NORM, (x, *kept[:3], kept[3].double(), *rest))[0] is NORM
        assert standins.stand_in(NORM, (x, *kept[:3], torch.ones(4), *rest))[0] is NORM
        assert standins.stand_in(NORM, (x, None, None, *kept[2:], *rest))[0] is aten.neg.default


class Normed(nn.Module):
    """Convolution, norm and activations, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, 8, 8) -> (B, 5)."""
        y = nn.functional.hardswish(self.norm(self.conv(x)), inplace=True)
        return (nn.functional.gelu(y) + nn.functional.relu6(y, inplace=True)).mean((2, 3))


@pytest.mark.parametrize("training", [False, True])
def test_a_plan_is_the_same_without_them(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared() -> Any:
        torch.manual_seed(0)
        return prepare_split(Normed().train(training), (torch.randn(2, 3, 8, 8),), split="50%")

    used: list[Any] = []
    monkeypatch.setattr("ariadne.recorder.stand_in", lambda f, a: (used.append(f), standins.stand_in(f, a))[1])
    quick = prepared().plan
    monkeypatch.setattr("ariadne.recorder.stand_in", lambda f, a: (f, a))
    assert prepared().plan.signature == quick.signature
    assert quick.captured_by == "symbolic"
    assert {aten.batch_norm.default, aten.hardswish_.default, aten.gelu.default} <= set(used)


class Penalised(nn.Module):
    """A gradient taken inside of forward, through an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) -> (B, 2)."""
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(nn.functional.hardswish(given).sum(), given)
        return self.last(x + slope)


def test_a_forward_with_a_backward_pass_in_it_is_captured_as_it_was() -> None:
    x = torch.randn(3, 4)
    model = Penalised().eval()
    runtime = prepare_split(model, (x,), split="90%")
    assert runtime.plan.captured_by == "symbolic"
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
