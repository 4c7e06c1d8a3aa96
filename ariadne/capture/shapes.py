"""Shapes: for which batches a plan holds, by what its forward asked about sizes and by the shapes that its ops make.

Every question about a size that has the same answer at two batches leads the ops to the same shapes at both. So the
batches fall into cells; in each cell every op runs once, on fake tensors of the plan's shapes, and must make what the
plan says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import GuardSource, Source
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

from ariadne.capture.call import is_opaque_call
from ariadne.capture.foreseen import Unplaced, fake_mode, on_fake
from ariadne.capture.recorder import Recorder
from ariadne.errors import UnsupportedError
from ariadne.plan import WHOLE, Batches, Expr, Ref, TraceNode, TracePlan, substitute, where

MOST_CELLS = 6
_MOST_POINTS = 4096  # at which a condition is tried before it is left to each call


class PlainNumberError(UnsupportedError):
    """Forward made a plain number of a size that follows the batch, and nobody sees what it does with it."""


class Sizes(Unplaced):
    """A shape environment that keeps what was asked about sizes, apart by whether forward's Python or an op asked."""

    recorder: Recorder | None = None
    running: tuple[Any, Any] | None = None  # the op that runs, and its arguments

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        running = self.recorder.running if self.recorder is not None else self.running
        if running is not None and orig_expr.is_Relational and _chooses_kernel(*running):
            answer = orig_expr.xreplace(self.backed_var_to_val)
            if not answer.free_symbols:
                return answer
        in_forward = self.recorder is not None and not self.recorder.depth
        in_function = self.recorder is not None and running is None  # or that of an autograd.Function, which is one op
        if (
            in_forward
            and self.recorder
            and orig_expr.free_symbols
            and not (orig_expr.is_Relational or orig_expr.is_Boolean)
        ):
            # The plan would hold for one batch; and what forward makes of the number, it may keep outside of the model.
            told = f"forward makes a plain number of a size that follows the batch ({orig_expr}), so that a symbolic plan would "
            self.recorder.recording.read_size = told = f"{told}hold for one batch"
            raise (PlainNumberError if orig_expr.free_symbols & self.backed_var_to_val.keys() else UnsupportedError)(
                told
            )
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        asked = self.__dict__.setdefault("asked_by_forward" if in_function else "asked_by_op", {})
        asked[orig_expr] = answer
        return answer

    def asked(self, by: str, symbols: Mapping[Any, str]) -> dict[str, bool]:
        """The questions about these symbols alone, written with their names, and the answers that they had."""
        found = {}
        named = {symbol: type(symbol)(name, **symbol.assumptions0) for symbol, name in symbols.items()}
        for question, answer in self.__dict__.get(f"asked_by_{by}", {}).items():
            if question.free_symbols and question.free_symbols <= symbols.keys():
                text = PythonPrinter().doprint(question.xreplace(named))
                whole = question.is_Boolean or question.is_Relational
                found[text if whole else f"({text}) == {answer}"] = bool(answer) if whole else True
        return found


_CONVOLUTIONS = {"convolution", "_convolution"} | {f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)}


def _chooses_kernel(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that the op can ask of a size is which kernel to take: a convolution, of its batch and its images' sizes.

    An image that is too small for it makes no other shapes either: the convolution raises, as it does in the model.

    Without this, a model with convolutions holds questions such as `B >= 16`, and each answer costs a run.
    """
    if not isinstance(op, OpOverload) or op.namespace != "aten" or len(args) < 2:
        return False
    if op._schema.name.removeprefix("aten::") not in _CONVOLUTIONS:
        return False
    x, weight = args[:2]
    return x.dim() == weight.dim() and all(type(n) is int for n in (*x.shape[1:2], *weight.shape))


@dataclass(frozen=True)
class _Named(Source):
    """Where a symbol comes from, by name alone. torch._dynamo has such a class too, and takes two seconds to import."""

    of: str

    @cached_property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return self.of


def with_symbols(fake: FakeTensorMode, leaf: torch.Tensor, name: str, dims: Collection[int]) -> torch.Tensor:
    """The leaf as a fake tensor whose `dims` are symbols; equal sizes are one symbol, over all leaves."""
    sizes = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(leaf.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * leaf.dim())
    return fake.from_tensor(leaf, source=_Named(name), symbolic_context=context)


def within_questions(plan: TracePlan, questions: Mapping[str, bool]) -> TracePlan:
    """The plan for those of its batches at which every question of forward has the answer that it had."""
    kept, excluded = plan.batches, list(plan.excluded)
    for text, answer in questions.items():
        holds = _where(plan, text, answer, kept)
        if holds != kept:
            excluded.append(
                f"batch {kept - holds}: {text} is {answer} at batch {plan.traced_batch}, and forward goes on from there"
            )
            kept = holds
    return replace(plan, batches=kept, excluded=tuple(excluded))


def under_conditions(plan: TracePlan, questions: Mapping[str, bool], ranges: Mapping[str, range]) -> TracePlan:
    """The plan for those of its batches, and of the sizes in `ranges`, at which every question has the answer that it had.

    Questions about the batch alone are settled here, others become conditions, but for those that hold throughout.
    """
    above = {symbol: sizes[sizes[0] < 2 :] for symbol, sizes in ranges.items()}
    domain: dict[str, Batches | range] = {plan.batch_symbol: plan.batches, **above}
    of_batch: dict[str, bool] = {}
    found: list[Expr] = [Expr(f"{symbol} > 1") for symbol, sizes in ranges.items() if sizes[0] < 2]  # as symbols are
    for text, answer in questions.items():
        try:
            condition = Expr(text if answer else f"not ({text})")
        except ValueError as error:
            raise UnsupportedError(f"forward asks something of its sizes that can't be followed: {error}") from error
        if condition.names == {plan.batch_symbol}:
            of_batch[text] = answer
        elif condition not in found and not _throughout(condition, domain):
            found.append(condition)
    return replace(within_questions(plan, of_batch), conditions=tuple(found))


def _throughout(condition: Expr, ranges: Mapping[str, Batches | range]) -> bool:
    """Whether a condition is true at all sizes, where these are few enough to look at each."""
    names = [*condition.names]
    if math.prod(len(ranges[name]) for name in names) > _MOST_POINTS:
        return False
    points = itertools.product(*(ranges[name] for name in names))
    return all(condition.holds(dict(zip(names, sizes, strict=True))) for sizes in points)


def within_shapes(plan: TracePlan, known: Batches, answers: Mapping[str, bool] | None = None) -> TracePlan:
    """The plan for those of its batches at which every op makes as many tensors, of such shapes, as the plan says.

    `known`: batches for which that is known, from real runs. `answers`: what ops asked when the plan was made on fake tensors,
    which is known to hold wherever these answers are the same.
    """
    kept, excluded = plan.batches & known, list(plan.excluded)
    rest = plan.batches - kept
    blind: set[int] = set()
    looked = answers is None
    if answers is not None:
        same = _cell(plan, answers, rest)
        kept, rest = kept | same, rest - same
    elif rest:
        run = _Run(plan, plan.traced_batch, blind, first=True)
        if run.wrong:
            raise UnsupportedError(f"on fake tensors, {run.wrong}")
        told = {i for i in blind if all(_is_told(plan, i, n) for n in plan.nodes[i].outputs)}
        unseen = sorted({*(blind - told), *(i for i, node in enumerate(plan.nodes) if _is_python(plan, node))})
        if unseen:
            node = plan.nodes[unseen[0]]
            excluded.append(f"batch {rest}: what op {unseen[0]} ({node.target}) makes there can't be foreseen")
            rest = Batches(())
        same = _cell(plan, run.asked, rest)
        kept, rest = kept | same, rest - same
    wrong: dict[str, Batches] = {}
    for _ in range(MOST_CELLS):
        if not rest:
            break
        at = rest.ranges[0][0]
        run = _Run(plan, at, blind)
        if run.wrong and not looked:  # is it the batch, or an op that never runs on fake tensors?
            looked = True
            _Run(plan, plan.traced_batch, blind, first=True)
            run = _Run(plan, at, blind) if blind else run
        same = _cell(plan, run.asked, rest) | Batches(((at, at),))
        rest -= same
        if run.wrong:
            wrong[run.wrong] = wrong.get(run.wrong, Batches(())) | same
        else:
            kept |= same
    excluded += [f"batch {found}: {why}" for why, found in wrong.items()]
    if rest:
        excluded.append(f"batch {rest}: sizes in forward follow the batch in too many ways to tell what they are there")
    return replace(plan, batches=kept, excluded=tuple(excluded))


def _where(plan: TracePlan, text: str, answer: bool, batches: Batches) -> Batches:
    try:
        question = Expr(text)
    except ValueError as error:
        raise UnsupportedError(f"forward asks something of its batch that can't be followed: {error}") from error
    return where(question, plan.batch_symbol, answer, batches)


def _cell(plan: TracePlan, answers: Mapping[str, bool], batches: Batches) -> Batches:
    for text, answer in answers.items():
        batches = _where(plan, text, answer, batches)
    return batches


def _is_told(plan: TracePlan, i: int, name: str) -> bool:
    """Whether of what an op makes no size is relied on: a number that is compared at each call, or a nested tensor."""
    value = plan.values[name]
    return (value.kind == "scalar" and plan.nodes[i].is_witness) or value.is_nested


def _is_python(plan: TracePlan, node: TraceNode) -> bool:
    """Whether an op is Python that reads a tensor whose sizes follow the batch, and may do with them what it likes.

    What an opaque part makes of them is asked in each call.
    """
    if is_opaque_call(node):
        return False
    shapes = (plan.values[name].shape for name in node.reads if name in plan.values)
    return node.target.startswith("python.") and any(isinstance(d, Expr) for shape in shapes for d in shape)


def _overload(node: TraceNode) -> OpOverload:
    namespace, name, overload = node.target.split(".", 2)
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


class _Run:
    """The ops of a plan, each kind once, on fake tensors of the plan's shapes at one batch.

    `wrong` says which op makes other shapes than the plan says, `asked` what was asked about sizes. The ops in `blind` are
    left out; the `first` run, at the batch of the plan, takes up those that can't run so.
    """

    def __init__(self, plan: TracePlan, batch: int, blind: set[int], *, first: bool = False) -> None:
        self.plan, self.blind, self.first = plan, blind, first
        self.sizes = sizes = Sizes()
        self.fake = fake_mode(sizes)
        self.fake.cache_enabled = False  # no kind of op comes twice, and to keep what one makes takes as long again
        size: Any = with_symbols(self.fake, torch.empty(batch, 0), "batch", (0,)).shape[0]
        self.batch, symbol = size, size.node.expr  # of which an equality that holds makes a number
        self.symbol, self.seen = str(symbol), set[str]()
        self.wrong = ""
        with (
            enable_python_dispatcher(),
            self.fake,
            torch.no_grad(),
        ):  # some composite ops ask the size itself without it
            for i, node in enumerate(plan.nodes):
                if i not in blind and self._may_differ(node):
                    self.wrong = self._differs(i, node)
                    if self.wrong:
                        break
        self.asked = sizes.asked("op", {symbol: plan.batch_symbol})

    def _may_differ(self, node: TraceNode) -> bool:
        """Whether the batch goes into an op, and nothing goes into it that only a real run shows."""
        if node.target in (WHOLE, "aten.sym_size.int") or node.target.startswith("python.") or not node.outputs:
            return False
        symbol, follows = self.plan.batch_symbol, False
        for name in node.reads:
            value = self.plan.values.get(name)
            dims = value.shape if value is not None else ()
            if name != symbol and (value is None or value.dtype is None):
                return False
            symbols = {s for d in dims if isinstance(d, Expr) for s in d.names}
            if symbols - {symbol}:
                return False
            follows = follows or name == symbol or bool(symbols)
        return follows

    def _size(self, dim: int | Expr) -> Any:
        return dim.evaluate({self.plan.batch_symbol: self.batch}) if isinstance(dim, Expr) else dim

    def _dummy(self, atom: Ref | Expr) -> Any:
        if isinstance(atom, Expr):
            return self._size(atom)
        value = self.plan.values[atom.name]
        return torch.empty([self._size(d) for d in value.shape], dtype=value.dtype, device=value.device)

    def _differs(self, i: int, node: TraceNode) -> str:
        values = self.plan.values
        types = [(values[n].shape, values[n].dtype) if n in values else n for n in (*node.reads, *node.outputs)]
        names = {n: f"t{k}" for k, n in enumerate(node.reads)}
        args = substitute((node.args, node.kwargs), lambda a: names[a.name] if isinstance(a, Ref) else a)
        key = repr((node.target, types, args))
        if key in self.seen:
            return ""
        self.seen.add(key)
        try:
            args = substitute(node.args, self._dummy)
            kwargs = {k: substitute(v, self._dummy) for k, v in node.kwargs}
            self.sizes.running = overload, args = _overload(node), args
            if (
                overload is torch.ops.aten.select.int
                and not -args[0].shape[args[1]] <= args[2] < args[0].shape[args[1]]
            ):
                raise IndexError(f"index {args[2]} is out of range")  # which fake tensors of torch 2.11 do not check
            out = on_fake(overload)(*args, **kwargs)
        except Exception as error:  # whatever a fake kernel, or its absence, raises
            if self.first:
                self.blind.add(i)
                return ""
            return f"op {i} can't run there ({self.plan.show(node)}): {str(error).partition(chr(10))[0]}"
        finally:
            self.sizes.running = None
        made = list(out) if node.unpack else [out]
        if len(made) != len(node.outputs):
            return f"op {i} makes {len(made)} tensor(s) there, {len(node.outputs)} in the plan: {self.plan.show(node)}"
        for name, t in zip(node.outputs, made, strict=True):
            value = values[name]
            if not isinstance(t, torch.Tensor) or value.dtype is None:
                continue
            pairs = list(zip(t.shape, value.shape, strict=False))
            pairs = [(a, d) for a, d in pairs if isinstance(d, int) or d.names <= {self.plan.batch_symbol}]
            if t.dim() != len(value.shape) or not all(bool(a == self._size(d)) for a, d in pairs):
                sizes = ", ".join(map(str, t.shape)).replace(self.symbol, self.plan.batch_symbol)
                return f"op {i} makes sizes [{sizes}] there, others in the plan: {self.plan.show(node)}"
        return ""
