"""The oracle: what must be true of the whole model before a split is held against it, and how near is near enough.

Same ops, same batch, same process: bit for bit (`conformance.suite.compare`). Where kernels may differ (compiled code, or a
batch against its single rows), both results are held against a run in float64: `beyond`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from conformance.suite.compare import REGISTRIES, Difference, difference, frozen, mapped, tensors
from conformance.suite.state import seed_all, undisturbed
from conformance.suite.statuses import Status, Stop

RMS, RMS_HALF, MAXIMUM = 2.0, 3.0, 8.0
USELESS = 0.3  # eager's own error over the reference's size: from here on, twice as much would pass anything
LIVE_SHARE = 0.5  # of the parameters that get a gradient, at least so many must get one that is not all zero
_HALF = (torch.float16, torch.bfloat16)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which says nothing of a model: on the CPU torch says so in words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def deterministic(run: Callable[[], Any], what: str) -> Any:
    """The result of `run`, which is called twice; Stop `nondeterministic` where it differs from itself."""
    first = run()
    stir()
    found = difference(first, run())
    if found:
        raise Stop(Status.NONDETERMINISTIC, f"{what} twice from equal state and seeds: {found}")
    return first


def stir() -> None:
    """Leave other numbers in freed memory than runs before did, so that what reads memory that nobody wrote differs from itself."""
    filled = [torch.full((2**k,), 1e30) for k in range(10, 22) for _ in range(2)]
    filled.clear()


def hold_informative(output: Any, other: Any) -> None:
    """Stop `degenerate` where the outputs for two different inputs would hide a difference.

    Every floating tensor must be finite, vary over its elements if it has several, and depend on the input, unless it is a
    parameter that the model hands out.
    """
    found = [(where, t) for where, t in tensors(output) if t.is_floating_point() and t.numel()]
    later = dict(tensors(other))
    if not found:
        raise Stop(Status.DEGENERATE, "the output holds no floating tensor")
    made = [(where, t) for where, t in found if not isinstance(t, nn.Parameter)]
    if not made:
        raise Stop(Status.DEGENERATE, "no output depends on the input")
    for where, t in found:
        if not bool(torch.isfinite(t).all()):
            raise Stop(Status.DEGENERATE, f"{where or 'the output'} is not finite everywhere")
    for where, t in made:
        if t.numel() > 1 and bool((t == t.flatten()[0]).all()):
            raise Stop(Status.DEGENERATE, f"{where or 'the output'} is constant over its elements")
        if where in later and difference(t, later[where]) is None:
            raise Stop(Status.DEGENERATE, f"{where or 'the output'} does not depend on the input")


def live_gradients(gradients: dict[str, torch.Tensor | None]) -> None:
    """Stop `degenerate` where gradients are missing, not finite, or mostly zero."""
    given = {name: g if g.layout is torch.strided else g.to_dense() for name, g in gradients.items() if g is not None}
    if not given:
        raise Stop(Status.DEGENERATE, "no parameter gets a gradient")
    for name, g in given.items():
        if not bool(torch.isfinite(g).all()):
            raise Stop(Status.DEGENERATE, f"the gradient of {name} is not finite everywhere")
    live = [name for name, g in given.items() if bool((g != 0).any())]
    if len(live) < LIVE_SHARE * len(given):
        raise Stop(Status.DEGENERATE, f"only {len(live)} of {len(given)} gradients are anything but zero")


@contextmanager
def _doubled() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def in_double(model: nn.Module, call: Callable[..., Any], inputs: Any, seed: int) -> Any:
    """The result of `call(model, inputs)` with both in float64; Stop `no_reference` where the model can't run so.

    Both are copied. Tensors that forward makes itself are float64 too, and so are dtypes that the model remembers.
    """
    wide = copy.deepcopy(model).double()
    own = {id(t) for t in (*wide.parameters(), *wide.buffers())}  # an LSTM keeps its parameters in a list, too

    def widened(t: torch.Tensor) -> torch.Tensor:
        return t if id(t) in own else _to_double(t)

    for module in wide.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.dtype) and value.is_floating_point:
                setattr(module, name, torch.float64)
            elif name not in REGISTRIES and isinstance(value, (torch.Tensor, list, dict)) and tensors(value):
                setattr(module, name, mapped(widened, value))
    given = mapped(_to_double, inputs)
    with undisturbed(), _doubled():
        seed_all(seed)
        try:
            return call(wide, given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"the model does not run in float64: {type(error).__name__}: {error}"
            raise Stop(Status.NO_REFERENCE, reason[:500]) from error


def _to_double(t: torch.Tensor) -> torch.Tensor:
    """A copy in float64 if it is a floating one, laid out as it was: Python may look at that."""
    made = frozen(t.detach())
    if not t.is_floating_point():
        found: torch.Tensor = made
    elif t.layout is not torch.strided:
        found = made.double()
    else:
        memory = torch.empty(0, dtype=t.dtype, device=t.device).set_(made.untyped_storage())
        found = memory.double().as_strided(t.size(), t.stride(), t.storage_offset())
    return found


def beyond(reference: Any, eager: Any, result: Any) -> tuple[Difference | None, dict[str, float]]:
    """Where a result is farthest beyond what eager's own error against the float64 reference allows, and the worst ratios.

    All leaves are looked at, and the words say how many are beyond. Per leaf: twice eager's error by RMS (three times for
    half types) and eight times by maximum. There is no absolute floor: where eager is exact, the result must be too. Stop
    `no_reference` where eager's own error is of the size of the reference, so that the two did not compute the same. Integers and
    booleans may differ only where the reference's margin is under the bound; where no margin can be computed, they must be equal.
    """
    wide, narrow, given = dict(tensors(reference)), dict(tensors(eager)), dict(tensors(result))
    if wide.keys() != narrow.keys() or narrow.keys() != given.keys():
        return Difference(Status.FAIL_STRUCTURE, "", f"{list(narrow)} against {list(given)}"), {}
    _hold_useful(wide, narrow)
    worst = {"rms": 0.0, "maximum": 0.0}
    wrong: list[tuple[float, str, str]] = []
    for where, expected in narrow.items():
        found = given[where]
        for what in ("dtype", "shape", "device"):
            if getattr(expected, what) != getattr(found, what):
                text = f"{what} {getattr(expected, what)} against {getattr(found, what)}"
                return Difference(Status.FAIL_STRUCTURE, where, text), worst
        if wide[where].shape != expected.shape:
            raise Stop(Status.NO_REFERENCE, f"{where}: the float64 run has the shape {list(wide[where].shape)}")
        if not expected.numel():
            continue
        if not (expected.is_floating_point() or expected.is_complex()):
            text = _discrete(where, wide, narrow, found)
            wrong += [(math.inf, where, text)] if text else []
        else:
            wrong += [(times, where, text) for times, text in _continuous(wide[where], expected, found, worst)]
    if not wrong:
        return None, worst
    _, where, text = max(wrong, key=lambda w: w[0])
    count = len({place for _, place, _ in wrong})
    return Difference(Status.FAIL_ACCURACY, where, f"{text} ({count} of {len(narrow)} tensors are beyond)"), worst


def _errors(reference: torch.Tensor, t: torch.Tensor) -> tuple[float, float]:
    """RMS and maximum of the error; places where both are the same infinity or NaN count as exact."""
    kind = torch.complex128 if reference.is_complex() else torch.float64
    a, b = reference.detach().to(kind), t.detach().to(kind)
    error = (a - b).abs()
    error[(a == b) | ((a != a) & (b != b))] = 0
    return error.pow(2).mean().sqrt().item(), error.max().item()


def _hold_useful(wide: dict[str, torch.Tensor], narrow: dict[str, torch.Tensor]) -> None:
    """Stop where eager and the reference, over all floating leaves, are as far apart as they are large."""
    own = size = 0.0
    for where, t in narrow.items():
        if t.is_floating_point() and t.numel() and wide[where].shape == t.shape:
            reference = torch.nan_to_num(wide[where].detach().double(), posinf=0, neginf=0)
            own += (torch.nan_to_num(t.detach().double(), posinf=0, neginf=0) - reference).pow(2).sum().item()
            size += reference.pow(2).sum().item()
    if own > USELESS**2 * size:
        reason = f"eager's own error against float64 is {(own / size) ** 0.5 if size else 1:.2g} of the outputs' size"
        raise Stop(Status.NO_REFERENCE, reason)


def _continuous(
    reference: torch.Tensor, eager: torch.Tensor, found: torch.Tensor, worst: dict[str, float]
) -> Iterator[tuple[float, str]]:
    """Of each measure by which it is beyond: how many times what is allowed, and that in words."""
    allowed = RMS_HALF if eager.dtype in _HALF else RMS
    for what, own, error, times in zip(
        ("rms", "maximum"), _errors(reference, eager), _errors(reference, found), (allowed, MAXIMUM), strict=True
    ):
        if not math.isfinite(own):
            raise Stop(Status.NO_REFERENCE, f"eager's own error against float64 is {own} by {what}")
        if not error <= times * own:  # NaN fails
            many = f"{error / own:.3g} times" if own else "where eager is exact, against"
            text = f"the error against float64 is {error:.3g} by {what}, {many} eager's {own:.3g}; {times:g} times is allowed"
            yield (error / own / times if own and error == error else math.inf), text
        worst[what] = max(worst[what], error / own if own else 0.0)


def _discrete(
    where: str, wide: dict[str, torch.Tensor], narrow: dict[str, torch.Tensor], found: torch.Tensor
) -> str | None:
    expected = narrow[where]
    differ = expected != found
    count = int(differ.sum())
    if not count:
        return None
    for source, values in wide.items():
        margin = _margin(wide[where], values)
        if margin is not None:
            # The decision is between two numbers, each of which may be off by the bound.
            bound = 2 * MAXIMUM * _errors(values, narrow[source])[1]
            clear = int((differ & (margin > bound)).sum())
            if clear:
                return f"{clear} of {expected.numel()} elements differ where {source or 'the output'} leaves no doubt"
            return None
    return f"{count} of {expected.numel()} elements differ, and no output explains them"


def _margin(decided: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """How clearly `values` decide each element: of an arg max over a dim, or of a threshold at 0 or 0.5; None if neither."""
    if not values.is_floating_point():
        return None
    if decided.dtype == torch.bool and decided.shape == values.shape:
        for threshold in (0.0, 0.5):
            if torch.equal(decided, values > threshold) or torch.equal(decided, values >= threshold):
                return (values - threshold).abs()
        return None
    for dim in range(values.dim()):
        if values.shape[dim] < 2 or decided.shape != values.shape[:dim] + values.shape[dim + 1 :]:
            continue
        if torch.equal(decided, values.argmax(dim).to(decided.dtype)):
            top = values.topk(2, dim).values
            return top.select(dim, 0) - top.select(dim, 1)
    return None
