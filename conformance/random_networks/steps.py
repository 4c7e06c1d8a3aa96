"""The vocabulary of programs: every step by name, with the operands that it takes and the settings it can have.

A step's shape rule is the step itself, run on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision  # noqa: F401 - has nms
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from conformance.random_networks import beyond_steps, given_steps, held_steps, outside, python_steps, torch_steps
from conformance.random_networks.scripted_steps import CALLED, both, doubled_

RAMP = (*(1.0,) * 6, *(0.5 * batch for batch in range(6, 99)))  # what a batch is worth, the same for all up to 5


@dataclass(frozen=True)
class Frame:
    """The call that a step runs in: the network, its batch, whether tensors hold shapes alone, keywords as they came, the container
    that holds the inputs, and what is handed in beside them.
    """

    net: nn.Module
    batch: int
    meta: bool = False
    keywords: tuple[str, ...] = ()
    given: Any = None
    beside: Any = None


@dataclass(frozen=True)
class Step:
    """One kind of step. `run` takes the frame, the operands and the settings, and returns a tensor or a tuple of tensors.

    `takes` has one letter per operand: f floating, i integer, b bool, n a number of any kind, a anything, m several floating
    ones. `settings` lists what each setting may be drawn from. `refusable`: why a capture of it may be refused, if it may.
    `shaped` stands in for `run` on meta tensors, which hold no data to look at.
    """

    takes: str
    run: Callable[..., Any]
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refusable: str = ""
    shaped: Callable[..., Any] | None = None

    @property
    def writes(self) -> bool:
        """Whether it writes into its first operand."""
        return getattr(self.run, "writes", False)


def sized(frame: Frame, dims: list[Any]) -> list[Any]:
    """Sizes in which the letter B stands for the batch."""
    return [frame.batch if d == "B" else d for d in dims]


def written(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """A step that writes into its first operand and returns it."""

    def run(frame: Frame, target: Tensor, *others: Tensor, **settings: Any) -> Tensor:
        change(target, *others, **settings)
        return target

    run.writes = True  # type: ignore[attr-defined]
    return run


def _unary(op: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda frame, x: op(x)


def _called(frame: Frame, *operands: Tensor, module: str) -> Any:
    made = frame.net.parts[module](*operands)
    return (made[0], *made[1]) if isinstance(made, tuple) and isinstance(made[1], tuple) else made


def _branch(condition: Callable[[Frame, Tensor], Any]) -> Callable[..., Tensor]:
    return lambda frame, x: x * 2 if condition(frame, x) else x - 1


def _steps(frame: Frame, x: Tensor) -> Tensor:
    if (
        x.dim() != 3 or not x.numel() or x.shape[1] == frame.batch
    ):  # a plan follows lengths that are data or the batch's, not both
        raise ValueError("no sequences")
    return x.mean(1)


def _packed(frame: Frame, x: Tensor, total: bool, sort: bool) -> Tensor:
    """The mean over the steps of packed sequences, as far as the longest goes or to the end; their lengths are data."""
    lengths = (x.detach()[:, :, 0] > 0).sum(1).clamp(min=1).cpu()
    if sort:
        lengths = lengths.sort(descending=True)[0]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sort)
    return pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1] if total else None)[0].mean(1)


def _counted(kept: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A step that multiplies by the size of what is kept of the data."""
    return lambda frame, x: x * kept(x.detach()).shape[0]


def _repeats(x: Tensor) -> Tensor:
    return torch.repeat_interleave((x.flatten() > 0).long())


def _boxes(x: Tensor) -> Tensor:
    low = x.reshape(-1, 1).expand(-1, 2)
    found: Tensor = torch.ops.torchvision.nms(torch.cat([low, low + 1], 1), low[:, 0].contiguous(), 0.5)
    return found


def _window(x: Tensor, dim: int, start: int, stop: int | None, step: int = 1) -> Tensor:
    return x[(slice(None),) * (dim % max(1, x.dim())) + (slice(start, stop, step),)]


def _on_rows(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2)


def _scripted(takes: str, function: Any, use: Callable[..., Any]) -> Step:
    run, shaped = both(function, use)
    return Step(takes, run, shaped=shaped)


def _reshaped(frame: Frame, x: Tensor, how: str) -> Tensor:
    """What an op makes of a tensor, of other sizes from then on."""
    made = torch.stack([x, x])
    _RESHAPES[how](made)
    return made


def _appended(frame: Frame, x: Tensor) -> Tensor:
    frame.net.records.append(x)
    return x * 1


def _put(frame: Frame, x: Tensor, at: str) -> Tensor:
    frame.net.notes[at] = x
    return x * 1


_RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose_(0, -1),
    "swap": lambda x: x.swapdims_(0, 1),
    "unsqueeze": lambda x: x.unsqueeze_(1),
    "squeeze": lambda x: x.squeeze_(1),
    "as_strided": lambda x: x.as_strided_(x.shape[1:], x.stride()[1:]),
}
DIM = (-1, 0, 1, 2)
DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")
}
UNARY = ("relu", "tanh", "sigmoid", "neg", "sin", "abs")
WINDOW = {"dim": (1, 0, -1), "start": (0, 1), "stop": (None, 2, 1, 0)}
SHAPES = (["B", -1], [-1], ["B", 1, -1], ["B", -1, 1], [-1, "B"], [-1, 2], ["B", 2, -1])

_PATHS = "each path that data take has a plan: a suffix over a wire knows one, and there are so many at most"
_LEAVE = "data leave torch by a way that no op shows, or are numbers of Python's that decide the way"
_MADE = "what a first call made of a weight goes on with the old one when that changes"
_UNSEEN = "no op shows what happens at later batches: their plans are held against the model"
_TOLD = "what a file holds may change: no plan of it holds"
_OUT = "each number that Python reads out of a tensor has a plan: a suffix over a wire knows one, and there are so many at most"

STEPS: dict[str, Step] = {
    "call": Step("a", _called),
    # elementwise
    **{name: Step("f", _unary(getattr(torch, name))) for name in UNARY},
    "gelu": Step("f", lambda f, x: nn.functional.gelu(x)),
    "scale": Step("f", lambda f, x, by: x * by, {"by": (2, 0.5, -1, 0)}),
    "shift": Step("n", lambda f, x, by: x + by, {"by": (1, 0.25)}),
    "add": Step("nn", lambda f, x, y: x + y),
    "sub": Step("nn", lambda f, x, y: x - y),
    "mul": Step("nn", lambda f, x, y: x * y),
    "maximum": Step("nn", lambda f, x, y: torch.maximum(x, y)),
    "lerp": Step("ff", lambda f, x, y: torch.lerp(x, y, 0.25)),
    # in place
    **{f"{name}_": Step("f", written(getattr(torch, f"{name}_"))) for name in UNARY},
    "scale_": Step("f", written(lambda x, by: x.mul_(by)), {"by": (2, 0.5)}),
    "shift_": Step("n", written(lambda x, by: x.add_(by)), {"by": (1, 3)}),
    "add_": Step("nn", written(lambda x, y: x.add_(y))),
    "mul_": Step("nn", written(lambda x, y: x.mul_(y))),
    "copy_": Step("an", written(lambda x, y: x.copy_(y))),
    "zero_": Step("a", written(lambda x: x.zero_())),
    "masked_fill_": Step("fb", written(lambda x, m: x.masked_fill_(m, 0.5))),
    "put_": Step("f", written(lambda x, value, **at: _window(x, **at).fill_(value)), {**WINDOW, "value": (0.5, 2)}),
    "put_tensor_": Step("ff", written(lambda x, y, **at: _window(x, **at).copy_(y)), WINDOW),
    "swap_rows_": Step("f", written(lambda x: x.copy_(x.flip(0)))),
    # views, and what may be one
    "reshape": Step("a", lambda f, x, to: x.reshape(sized(f, to)), {"to": SHAPES}),
    "view": Step("a", lambda f, x, to: x.view(sized(f, to)), {"to": SHAPES}),
    "transpose": Step("a", lambda f, x, a, b: x.transpose(a, b), {"a": (-1, 0), "b": (-2, 1)}),
    "unsqueeze": Step("a", lambda f, x, dim: x.unsqueeze(dim), {"dim": DIM}),
    "squeeze": Step("a", lambda f, x: x.squeeze(1) if x.dim() > 1 else x),
    "window": Step("a", lambda f, x, **at: _window(x, **at), WINDOW),
    "every_other": Step("a", lambda f, x, dim, start: _window(x, dim, start, None, 2), {"dim": (1, 0), "start": (0, 1)}),
    "select": Step("a", lambda f, x, dim, at: x.select(dim, at), {"dim": DIM, "at": (0, -1)}),
    "expand": Step("a", lambda f, x, to: x.expand(sized(f, to)), {"to": (["B", -1], ["B", -1, -1], ["B", 3, -1])}),
    "diagonal": Step("a", lambda f, x: x.diagonal(dim1=-2, dim2=-1)),
    "unfold": Step("a", lambda f, x: x.unfold(-1, 2, 1)),
    "detach": Step("f", lambda f, x: x.detach()),
    "contiguous": Step("a", lambda f, x: x.contiguous()),
    "reshaped_": Step("a", _reshaped, {"how": tuple(_RESHAPES)}),
    "clone": Step("a", lambda f, x: x.clone()),
    "flip": Step("a", lambda f, x, dim: x.flip(dim), {"dim": DIM}),
    "roll": Step("a", lambda f, x, dim: x.roll(1, dim), {"dim": DIM}),
    # several at once
    "chunk": Step("a", lambda f, x, n, dim: x.chunk(n, dim), {"n": (2, 3), "dim": DIM}),
    "split": Step("a", lambda f, x, dim: x.split([1, x.shape[dim] - 1], dim), {"dim": DIM}),
    "unbind": Step("a", lambda f, x, dim: x.unbind(dim), {"dim": (-1, 1, 2)}),
    "topk": Step("f", lambda f, x, k: tuple(x.topk(k, -1)), {"k": (1, 2)}),
    # On meta tensors torch takes any dim.
    "sort": Step("n", lambda f, x, dim: tuple(torch.sort(x, dim=range(x.dim())[dim], stable=True)), {"dim": DIM}),
    "minimum_at": Step("f", lambda f, x, dim: tuple(x.min(dim)), {"dim": DIM}),
    "var_mean": Step("f", lambda f, x, dim: torch.var_mean(x, dim, correction=0), {"dim": DIM}),
    "cat": Step("m", lambda f, *xs, dim: torch.cat(xs, dim), {"dim": DIM}),
    "stack": Step("m", lambda f, *xs, dim: torch.stack(xs, dim), {"dim": (1, 0, -1)}),
    # over a dim
    "sum": Step("n", lambda f, x, dim, keepdim: x.sum(dim, keepdim=keepdim), {"dim": DIM, "keepdim": (False, True)}),
    "mean": Step("f", lambda f, x, dim, keepdim: x.mean(dim, keepdim=keepdim), {"dim": DIM, "keepdim": (False, True)}),
    "amax": Step("n", lambda f, x, dim: x.amax(dim), {"dim": DIM}),
    "argmax": Step("n", lambda f, x, dim: x.argmax(dim), {"dim": DIM}),
    "softmax": Step("f", lambda f, x, dim: x.softmax(range(x.dim())[dim]), {"dim": DIM}),
    "cumsum": Step("n", lambda f, x, dim: x.cumsum(dim), {"dim": DIM}),
    "total": Step("f", lambda f, x: x.sum()),
    "matmul": Step("ff", lambda f, x, y: x @ y),
    "rows_by_rows": Step("f", lambda f, x: _on_rows(x)),
    # int and bool
    "above": Step("nn", lambda f, x, y: x > y),
    "positive": Step("n", lambda f, x: x > 0),
    "both": Step("bb", lambda f, x, y: x & y),
    "not": Step("b", lambda f, x: ~x),
    "not_": Step("b", written(lambda x: x.logical_not_())),
    "any": Step("b", lambda f, x, dim: x.any(dim), {"dim": DIM}),
    "where": Step("bnn", lambda f, m, x, y: torch.where(m, x, y)),
    "masked": Step("fb", lambda f, x, m: x.masked_fill(m, -1.0)),
    "to": Step("a", lambda f, x, dtype: x.to(DTYPES[dtype]), {"dtype": tuple(DTYPES)}),
    "half": Step("i", lambda f, x: x // 2),
    "one_hot": Step("i", lambda f, x: nn.functional.one_hot(x.remainder(3), 3)),
    "gather": Step("fi", lambda f, x, i: x.gather(-1, i.remainder(x.shape[-1]))),
    "pick_rows": Step("fi", lambda f, x, i: x[i.remainder(x.shape[0])]),
    # born in forward, from the batch, or at random
    "zeros": Step("", lambda f, to: torch.zeros(sized(f, to)), {"to": (["B", 3], ["B"], [1, 3])}),
    "numbers": Step("", lambda f: torch.tensor([0.5, -1.0, 2.0])),
    "arange": Step("", lambda f: torch.arange(f.batch)),
    "like": Step("a", lambda f, x, value: torch.full_like(x, value), {"value": (0, 1)}),
    "times_batch": Step("f", lambda f, x: x * f.batch),
    "over_batch": Step("f", lambda f, x: x / f.batch),
    "by_table": Step("f", lambda f, x: x * RAMP[f.batch]),
    "by_float": Step("f", lambda f, x: x * max(1.0, 0.2 * f.batch)),
    "by_text": Step("f", lambda f, x: x * {"6": 2.0, "7": 3.0}.get(f"{f.batch}", 1.0)),
    "by_bytes": Step("f", lambda f, x: x * max(5, *bytes([f.batch]))),
    "noise": Step("", lambda f, to: torch.randn(sized(f, to)), {"to": (["B", 3], ["B", 1], [3])}),
    "noise_like": Step("f", lambda f, x: torch.rand_like(x)),
    "noise_": Step("f", written(lambda x: x.normal_())),
    "dropout": Step("f", lambda f, x, p: nn.functional.dropout(x, p, f.net.training), {"p": (0.5, 0.25)}),
    "permuted": Step("f", lambda f, x: x[torch.randperm(f.batch)] if x.shape[0] == f.batch else x),
    # functions under torch.jit.script
    **{name: _scripted(*called) for name, called in CALLED.items()},
    "scripted_double_": Step("f", written(doubled_), shaped=lambda f, x: x.mul_(2)),
    # Python that looks at what it runs under
    "if_training": Step("f", _branch(lambda f, x: f.net.training)),
    "if_grad": Step("f", _branch(lambda f, x: torch.is_grad_enabled())),
    "if_batch": Step("f", _branch(lambda f, x: f.batch > 2)),
    "if_int": Step("f", _branch(lambda f, x: type(f.batch) is int and isinstance(f.batch, int) and f.batch > 5)),
    "if_contiguous": Step("f", _branch(lambda f, x: x.is_contiguous())),
    "if_wanted": Step("f", _branch(lambda f, x: x.requires_grad)),
    # what stands outside of the network
    "by_function": Step("f", lambda f, x: outside.called(x)),
    "by_kept_value": Step("f", lambda f, x, asked: x * outside.KEPT[asked](), {"asked": tuple(outside.KEPT)}),
    "by_setting": Step("f", lambda f, x: outside.asked(x)),
    "by_number": Step("f", held_steps.by_number, {"asked": ("number", "branch")}, _OUT, lambda f, x, asked: x * 2),
    "by_tensor": Step("f", lambda f, x: held_steps.by_number(f, x, "tensor"), shaped=lambda f, x: x * 2),
    "by_teacher": Step("f", held_steps.by_teacher, shaped=lambda f, x: x * x.detach()),
    "by_cache": Step("f", held_steps.by_cache, shaped=lambda f, x: x * 2),
    "by_object": Step("f", held_steps.by_object, {"asked": ("len", "iter", "contains", "item", "attribute", "table")}),
    "by_held_function": Step("f", held_steps.by_held_function, {"asked": ("class", "module", "object", "function")}),
    # how a network is reached beside its attributes
    "by_keywords": Step("f", held_steps.by_keywords),
    "by_reference": Step("f", held_steps.by_reference, {"asked": ("list", "dict")}, shaped=lambda f, x, asked: x * 1),
    "by_length": Step(
        "f", held_steps.by_length, {"asked": ("own", "joined", "product", "pieces")}, shaped=lambda f, x, asked: x * 2
    ),
    "by_first_call": Step("f", held_steps.by_first_call, shaped=lambda f, x: x * 1),
    "by_first_weight": Step("f", held_steps.by_first_weight, {}, _MADE, lambda f, x: x * 1),
    "by_first_in_part": Step("f", held_steps.by_first_in_part, {}, _MADE, lambda f, x: x * 1),
    # what stays in a container of the network
    "append": Step("f", _appended, shaped=lambda f, x: x * 1),
    "note": Step("f", _put, {"at": ("a", "b")}, shaped=lambda f, x, at: x * 1),
    # what a call is given beside tensors
    "hand_on": Step("f", given_steps.hand_on, {"how": ("put", "more", "out")}, shaped=lambda f, x, how: x * 1),
    "by_beside": Step("f", given_steps.by_beside, {"asked": ("array", "object", "inner")}),
    # what a first call makes by sizes, and is made anew at others
    "by_shape_table": Step("f", held_steps.by_shape_table, {"how": ("dict", "attribute")}, shaped=lambda f, x, how: x * 1),
    # what stands on its class
    "class_append": Step("f", python_steps.appended_to_class, shaped=lambda f, x: x * 1),
    "class_bind": Step("f", python_steps.bound_to_class, shaped=lambda f, x: x * 1),
    "by_class": Step("f", python_steps.by_class, {"asked": ("class", "network")}),
    # what the machine tells
    "timed": Step("f", python_steps.timed, {"clock": ("monotonic", "time_ns")}),
    "by_a_file": Step("f", python_steps.by_a_file, {"asked": ("whether", "text")}, _TOLD),
    # a number that is not there at one batch
    "divided": Step("f", python_steps.divided, {"at": (6, 4, 1), "how": ("floor", "rest", "share", "caught")}),
    # parts that run again in the backward pass, or are taken as they are
    "checkpointed": Step("f", python_steps.checkpointed, {"reentrant": (True, False)}, shaped=python_steps.unchecked),
    "opaque": Step("f", lambda f, x: python_steps.sharpened(x), shaped=lambda f, x: x * 2),
    "opaque_double_": Step("f", written(python_steps.doubled_), shaped=lambda f, x: x.mul_(2)),
    # tensors of a class of the user's own, and data that leave torch
    "marked": Step("f", beyond_steps.marked),
    "bare": Step("f", beyond_steps.bare),
    "left_torch": Step("f", beyond_steps.left_torch, {"by": tuple(beyond_steps.WAYS)}, _LEAVE, lambda f, x, by: x * 2),
    # what torch does by more than one op
    "grown": Step("f", torch_steps.grown, {"how": ("add", "product", "twice")}, shaped=lambda f, x, how: x * 2),
    "functional_if": Step("f", torch_steps.functional_if, shaped=lambda f, x: x * 2),
    "slope": Step("f", torch_steps.slope, {"by": tuple(torch_steps.SLOPES)}, shaped=lambda f, x, by: x * 2),
    "unseen_later": Step("f", torch_steps.unseen_later, {"how": tuple(torch_steps.UNSEEN)}, _UNSEEN, lambda f, x, how: x * 2),
    # the answer hangs on data
    "if_positive": Step("f", _branch(lambda f, x: x.sum() > 0), {}, _PATHS, lambda f, x: x * 2),
    "times_item": Step("f", lambda f, x: x * x.sum().item(), {}, _PATHS, lambda f, x: x * 2),
    "compress": Step("b", lambda f, x: x.nonzero(), {}, "a size follows data", lambda f, x: x.long().view(-1, 1)),
    "packed": Step("f", _packed, {"total": (True, False), "sort": (True, False)}, "", lambda f, x, **_: _steps(f, x)),
    "count_kept": Step("f", _counted(lambda x: x[x > 0]), {}, "a size follows data", lambda f, x: x * 2),
    "count_nonzero": Step("f", _counted(lambda x: x.relu().nonzero()), {}, "a size follows data", lambda f, x: x * 2),
    "count_unique": Step("f", _counted(lambda x: (x > 0).unique()), {}, "a size follows data", lambda f, x: x * 2),
    "count_repeats": Step("f", _counted(_repeats), {}, "a size follows data", lambda f, x: x * 2),
    "count_nms": Step("f", _counted(_boxes), {}, "a size follows data", lambda f, x: x * 2),
}  # fmt: skip

UNDER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
