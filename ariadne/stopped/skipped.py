"""Forward with its part before the cut skipped: from what crossed alone, in any process that has the model.

Python runs forward from its beginning, and each call of torch before the cut gives a tensor without data, or what it gave on the
other side. Nothing is computed and nothing is drawn there, and what Python changes there is put back at the end: it happened once,
where the prefix ran. From the end of the module's call on forward runs as it is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ariadne import tree
from ariadne.errors import BoundaryError, named
from ariadne.guards import global_hooks
from ariadne.stopped.absent import ADDRESSES, ANSWERED, SET_DATA, Absent, Ghost, Standing, filled, present, settled
from ariadne.stopped.ambient import Saving, within_function
from ariadne.stopped.gate import Awaited
from ariadne.stopped.held import Held
from ariadne.stopped.laid import Laid
from ariadne.stopped.noted import CONTAINERS, Before, Lost, version_of
from ariadne.stopped.plain import Told, told_of
from ariadne.stopped.python import MISSING, Place, PythonState, Undoing, fill_kept, set_generators
from ariadne.stopped.unseen import Unseen, enter, leave

_ASTRAY = (
    "before the cut forward goes another way here than where the prefix ran ({}): what it follows differs, such as an attribute, a "
    "training flag, or the code. Have both sides the same model in the same state"
)


class Skipping(Unseen):
    """Gives for each call of torch what was noted for it, until the cut is passed; after it, has the state that crossed taken."""

    def __init__(
        self, state: dict[str, torch.Tensor], before: Before, crossed: Sequence[torch.Tensor], trains: bool
    ) -> None:
        super().__init__()
        self.trains = trains
        self.before, self.standing = before, Standing()
        self.at, self.names, self.outputs = 0, 0, len(crossed) - len(before.crossing)
        self.crossed, self.tensors = crossed, {}
        for name, t in zip(before.crossing, crossed[self.outputs :], strict=True):
            self.tensors[name] = t
        self.ghosts: dict[Any, Ghost] = {}
        self.made: list[weakref.ref[Ghost]] = []
        self.state = state
        strange = next((name for name in before.written if name not in self.state), None)
        if strange is not None:
            raise BoundaryError(_ASTRAY.format(f"the prefix writes {strange!r}, which this model has not"))
        self.stale = {id(self.state[name]): name for name in before.written}
        self.inputs = tree.map_leaves(self._input(), before.inputs)
        self.held = Held()  # what the inputs' containers hold at the cut

    def _input(self) -> Callable[[Any], Any]:
        count = iter(range(1 << 30))

        def leaf(value: Any) -> Any:
            at = next(count)
            if isinstance(value, Lost):
                raise BoundaryError(f"forward takes {value.what}, which can't be sent")
            return self._ghost(("input", at), value, f"input {at}") if isinstance(value, Absent) else value

        return leaf

    def _ghost(self, name: Any, kind: Absent, told: str) -> Ghost:
        made = self.ghosts[name] = Ghost.of(kind, name, told, self.standing)
        made.here = self.tensors.get(name)
        self.made.append(weakref.ref(made))
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERED:
            return func(*args, **(kwargs or {}))
        if self.standing.passed:
            return self._after(func, args, kwargs or {})
        if func in ADDRESSES:
            if not isinstance(args[0], Ghost):
                return func(*args, **(kwargs or {}))
            raise self.standing.fail(
                "before the cut forward asks where in memory a tensor's data lie, which has none where that part is skipped. Run "
                "the suffix in the process of the prefix, once; or cut elsewhere"
            )
        at, self.at = self.at, self.at + 1
        if at >= len(self.before.calls):
            raise self.standing.fail(_ASTRAY.format(f"it calls torch more than {at} times"))
        self.names = crc32((getattr(func, "__name__", None) or type(func).__name__).encode(), self.names)
        return self._given(self.before.calls[at], func, args, kwargs, at, [0])

    def _given(self, entry: Any, func: Any, args: Any, kwargs: Any, at: int, leaf: list[int]) -> Any:
        if type(entry) is int:
            number, leaf[0] = leaf[0], leaf[0] + 1
            told = f"what {getattr(func, '__name__', 'a call')} gave as call {at} of torch"
            return self._ghost(("call", at, number), self.before.kinds[entry], told)
        kind, *rest = entry
        if kind == "plain":
            return rest[0]
        if kind == "is":
            return [*tree.leaves((args, kwargs or {}))][rest[0]]
        if kind == "was":
            (name,) = rest
            return self.state[name[1]] if name[0] == "state" else self.ghosts[name]
        if kind == "many":
            found = [self._given(e, func, args, kwargs, at, leaf) for e in rest[1]]
            return CONTAINERS[rest[0]](found)
        raise self.standing.fail(f"before the cut forward asks torch for {rest[0]}, which can't be sent in a boundary")

    def _after(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call after the cut, where the prefix writes into the model's tensors: what crossed stands for those."""
        versions = []

        def current(t: Any) -> Any:
            found = self.as_left(t)
            if found is not t:
                versions.append((self.stale[id(t)], found, version_of(found)))
            return found

        args, kwargs = tree.map_leaves(current, (args, kwargs))
        if func == SET_DATA and isinstance(args[1], Ghost):  # no op, of which the ghost itself would hear
            raise self.standing.fail(
                f"after the cut forward puts {args[1].told}, which was made before it, in the place of a tensor's data "
                "(`t.data = ...`). Run the suffix in the process of the prefix; or cut elsewhere"
            )
        found = func(*args, **kwargs)
        for name, t, version in versions:
            if version_of(t) != version:
                raise self.standing.fail(
                    f"both sides of the cut write into {name!r}, a tensor of the model, which is one in one process only. "
                    "Run the suffix in the process of the prefix, once; or cut elsewhere"
                )
        return found

    def as_left(self, t: Any) -> Any:
        """What a tensor of the model is after the cut: as the prefix left it, where that writes into it."""
        name = self.stale.get(id(t))
        if name is None or self.state[name] is not t:
            return t
        if self.trains and t.requires_grad:
            raise self.standing.fail(
                f"the part before the cut writes into {name!r}, a parameter that the part after it uses: what crossed of it would "
                "get the gradient in its place. Train with the suffix in the process of the prefix, on the boundary itself; or cut "
                "elsewhere"
            )
        self.standing.used.append(("state", name))
        found = self.tensors.get(("state", name))
        if found is None:
            raise self.standing.fail(
                f"after the cut forward uses {name!r}, into which the part before it writes, and which did not cross: the "
                "examples of the side with the prefix did not use it there. Show it inputs like these, by more_examples=[...]"
            )
        return found

    def instead(self, told: Callable[[], Told | None]) -> torch.Tensor | None:
        """What crossed in place of the call of the cut's module, which begins; None where that is to run.

        `told` gives what there is to tell of that here. What has gone astray until now is left for `pass_cut` to say.
        """
        before = self.before
        if not before.entry or self.outputs != 1 or before.entry != (self.at, self.names, told()):
            return None
        self.at, self.names = len(before.calls), before.names
        return self.crossed[0]

    def pass_cut(self, output: Any) -> Any:
        """From here on forward runs as it is; gives the output of the module's call, with what crossed in it."""
        standing = self.standing
        if (self.at, self.names) != (len(self.before.calls), self.before.names):
            raise standing.fail(_ASTRAY.format(f"{self.at} calls of torch, where there were {len(self.before.calls)}"))
        leaves = [t for t in tree.leaves(output) if isinstance(t, torch.Tensor)]
        if len(leaves) != self.outputs:
            raise standing.fail(_ASTRAY.format(f"the module gives {len(leaves)} tensors, where it gave {self.outputs}"))
        for t, real in zip(leaves, self.crossed, strict=False):
            if isinstance(t, Ghost):
                t.here = real
        standing.passed = True  # first: what is asked here of tensors is no call of forward's
        self.held.note("inputs", self.inputs)
        inputs = [t for name, t in self.tensors.items() if name[0] == "input"]
        standing.watched = {
            id(t): (t, version_of(t)) for t in (*(self.crossed[i] for i in self.before.shared), *inputs)
        }
        return tree.map_leaves(settled, output, cached=True)

    def settle(self, model: nn.Module, output: Any, absent: bool) -> None:
        """Put what crossed in the place of each tensor without data that forward left in what it returns, or in what Python keeps.

        Where none crossed, raises `BoundaryError`, unless such may stay `absent`.
        """
        self.ghosts, self.inputs = {}, ()
        if any(one() is not None for one in self.made):
            seen: dict[int, Any] = {}
            filled(output, settled if absent else present, seen)
            fill_kept(model, settled if absent else present, seen)


def run_rest(
    model: nn.Module,
    module: nn.Module,
    number: int,
    before: Before,
    crossed: Sequence[torch.Tensor],
    *,
    known: frozenset[Place],
    laid: Laid | None = None,
    trains: bool = False,
    watch: bool = False,
) -> tuple[Any, list[Any]]:
    """The model's output, from what crossed; and the names of what the suffix used.

    `crossed`: the tensors of the module's output, then those of `before.crossing`. `known`: attributes that may be set.
    `laid`: what was laid out of the model before. `trains`: whether gradients go back from there.
    `watch`: what it puts in the place of a tensor's data after the cut, too, of which nobody hears else.
    """
    if before.refusal:
        raise BoundaryError(f"this boundary can't be run from what crossed alone: {before.refusal}")
    if not torch.is_grad_enabled():
        crossed = _copies(crossed)  # forward may write into them, and the boundary may be run again
    start = PythonState(model, laid)
    _set_attributes(model, before, known)
    skipping = Skipping(start.tensors(), before, crossed, trains)
    undoing: list[Any] = []

    saving: list[Saving | None] = []

    def reached(output: Any) -> Any:
        saving.append(Saving.now() if trains else None)
        if trains and (function := within_function(run_rest.__code__)):
            raise skipping.standing.fail(
                f"the cut lies within the forward of an autograd.Function ({function}), where nothing leads back to what is before "
                "it. Train with the suffix in the process of the prefix, on the boundary itself; or cut outside of it"
            )
        set_generators({name: start.generators[name] for name in before.generators if name in start.generators})
        _refuse_other(model, before)
        output = skipping.pass_cut(output)
        undoing.append(start.undoing())
        if not skipping.stale and not watch:
            leave(skipping)
        return output

    set_generators({name: state for name, state in before.generators.items() if name in start.generators})

    def told() -> Told | None:
        if laid is None or not start.hookless or global_hooks():
            return told_of(module)
        found: Told | None = laid.once(model, module, told_of)
        return found

    awaited = Awaited(module, number, reached, lambda: skipping.instead(told))
    args, kwargs = skipping.inputs
    result = None
    depth = torch._C._len_torch_function_stack()
    try:
        enter(skipping)
        try:
            output = model(*args, **kwargs)
            if not skipping.standing.passed:
                raise skipping.standing.fail(_ASTRAY.format("it returns before the cut comes"))
            result = tree.map_leaves(lambda t: present(skipping.as_left(t)), output, cached=True)
            if any(one is not None and one.goes_on for one in saving):
                raise skipping.standing.fail(
                    "the cut lies within torch.utils.checkpoint, whose part the backward pass runs again from its beginning, and "
                    "that lies before the cut. Train with the suffix in the process of the prefix, on the boundary itself; or "
                    "cut at the end of that part"
                )
        except Exception as error:
            if skipping.standing.error is not None and error is not skipping.standing.error:
                raise skipping.standing.error from error
            if not skipping.standing.passed and not isinstance(error, BoundaryError):
                raise BoundaryError(_ASTRAY.format(f"{type(error).__name__}: {error}")) from error
            raise
        finally:
            if torch._C._len_torch_function_stack() > depth:
                leave(skipping)
            awaited.close()
    except BaseException:
        _end(start, undoing)
        args = kwargs = output = None
        skipping.settle(model, None, absent=True)
        if not skipping.standing.passed or skipping.standing.error is not None:
            set_generators(start.generators)
        raise
    if skipping.standing.error is None:
        strange = undoing[0].changed_since()
        if strange is not None:
            skipping.standing.fail(
                f"after the cut forward changes what {strange!r} holds, which the part before the cut made or changed; where "
                "that part is skipped, there is another one. Set it anew after the cut, run the suffix in the process of the "
                "prefix, once; or cut elsewhere"
            )
        elif skipping.held.changed() is not None:
            skipping.standing.fail(
                "after the cut forward changes what a list or a dict among its inputs holds; that one is the caller's, where the "
                "prefix ran, and would stay as it was. Return the new state, run the suffix in the process of the prefix, once; or "
                "cut elsewhere"
            )
    _end(start, undoing)
    args = kwargs = output = None
    skipping.settle(model, result, absent=skipping.standing.error is not None)
    if skipping.standing.error is not None:
        set_generators(start.generators)
        raise skipping.standing.error
    return result, skipping.standing.used


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory where these do, and are laid out alike."""
    plain = (t for t in tensors if type(t) is torch.Tensor and t.layout is torch.strided and not t.requires_grad)
    alone = {
        t.untyped_storage().data_ptr(): t
        for t in plain
        if t.is_contiguous() and not (t.is_conj() or t.is_neg() or t.is_inference() or t.__dict__ or t.is_quantized)
        if t.untyped_storage().nbytes() == t.nbytes and t.grad_fn is None
    }
    if len(alone) == len(tensors):  # each has its memory for itself
        return [t.clone() for t in tensors]
    if any(t.grad_fn is not None for t in tensors):
        raise BoundaryError(
            "before the cut forward switches gradients on, where the caller has them off, so that what crosses has a graph, which "
            "no bytes hold. Run the suffix in the process of the prefix, once; or cut elsewhere"
        )
    return copy.deepcopy([*tensors])  # whose memo keeps shared memory shared


def _end(start: PythonState, undoing: list[Undoing]) -> None:
    for one in undoing or [start.undoing()]:
        one.run()


def _set_attributes(model: nn.Module, before: Before, known: frozenset[Place]) -> None:
    """Have what the prefix's part changes as it was when that began."""
    for place, was, _ in before.attributes:
        path, table, name = place
        if place not in known:
            raise BoundaryError(
                f"the prefix changed the attribute {name!r} of {named(path)}, which it did in no example of this side; run the "
                "suffix in the process of the prefix, or show both sides such inputs, by more_examples=[...]"
            )
        found = _table(model, path, table)
        if was == ():
            found.pop(name, None)
        elif was != "tensors":
            found[name] = was[0]


def _refuse_other(model: nn.Module, before: Before) -> None:
    """Raise `BoundaryError` unless what the skipped part changed is now as it was at the cut where the prefix ran."""
    for (path, table, name), _, after in before.attributes:
        now = _table(model, path, table).get(name, MISSING)
        if after == "tensors" or (now is MISSING and after == ()):
            continue
        if not after or not tree.identical(now, after[0]):
            raise BoundaryError(_ASTRAY.format(f"the attribute {name!r} of {named(path)} comes out as {str(now)[:80]}"))


def _table(model: nn.Module, path: str, table: str) -> dict[str, Any]:
    found = model.get_submodule(path).__dict__
    return found if table == "__dict__" else found[table]
