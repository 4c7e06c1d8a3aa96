"""Proof: a forward that is stopped and goes on is held against the model: results, gradients, state and random numbers."""

from __future__ import annotations

import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import ALL, NUMPY, PYTHON, TORCH, Example, Names, Snapshot, calls_class, without_saving_hooks
from ariadne.compare import difference
from ariadne.errors import AriadneError, ModuleError, UnsupportedError, VerificationError, named
from ariadne.guards import BOOKKEEPING, LEAVES, held, is_a, is_iterator, no_weights_cached, simple
from ariadne.stopped.calls import Measured, measure
from ariadne.stopped.forward import count, is_forwards
from ariadne.stopped.handed import NewlyFound, put_back
from ariadne.stopped.held import at
from ariadne.stopped.python import PythonState, reached_by
from ariadne.stopped.standins import older_nodes, refuse_met_again, stand_ins

_MOST = 1 << 16  # things that are looked into for iterators
_MORE = 4  # proofs at most that end since something was found which had been unknown


def isolated(
    model: nn.Module, example: Example, grad: bool, run: Callable[..., Any], drew: Names, batch: int | None = None
) -> Any:
    """What `run` gives on fresh inputs like the example; the model is left as found, with objects among the inputs, and so are the
    random generators that forward `drew` from: of others, another thread would get its numbers twice. Where there is no other, all
    are put back.

    Raises `UnsupportedError` where it moves on a generator of Python's, or another iterator, that the model holds or forward's
    functions reach, or what else can't be put back.
    """
    stood = [(where, one, at(one)) for where, one in _iterators(model)]
    args, kwargs = tree.unflatten(example.resized(batch or example.batch), example.spec)
    # An object among the inputs, such as a cache of keys and values, is the example's own.
    with as_found(model, drew, (args, kwargs)):
        with no_weights_cached(), torch.set_grad_enabled(grad):
            found = contextvars.copy_context().run(run, *args, **kwargs)
        if moved := next((where for where, one, stood_at in stood if stood_at != at(one)), None):
            raise UnsupportedError(_MOVED.format(moved))
    return found


_MOVED = (
    "forward moves on {}, which nothing can put back: what preparing took from it, calls miss. Keep such state in a buffer or in "
    "plain attributes, and prepare with a model made anew"
)


@contextmanager
def as_found(model: nn.Module, drew: Names, handed: Any = ()) -> Iterator[None]:
    """Leave the model as found after a block, with objects that were `handed` in, and the random generators that forward `drew`
    from, as `isolated` does. It runs without the caller's hooks on saved tensors.

    Raises `UnsupportedError` where something that it reaches stands otherwise then, and can't be put back.
    """
    snapshot, names = Snapshot(model, handed), counted(drew)  # a forward that waits is a thread, too
    held = PythonState(model).held
    snapshot.save_all()
    try:
        with put_back(held.locals), without_saving_hooks():
            yield
    finally:
        snapshot.restore(names)
        lost = held.put_back(alone=threading.active_count() == 1)
    if lost is not None:
        raise UnsupportedError(_MOVED.format(lost))


@contextmanager
def held_as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Have what Python's own objects hold that forward reaches be after a block as it was before, as far as it can be put back.

    What this gives raises `UnsupportedError`, after the block, where something could not.
    """
    held, lost = PythonState(model).held, list[str]()

    def refuse() -> None:
        if lost:
            raise UnsupportedError(_MOVED.format(lost[0]))

    try:
        yield refuse
    finally:
        lost += filter(None, [held.put_back(alone=threading.active_count() == 1)])


def counted(drew: Names) -> Names:
    """The random generators that count: where other threads may draw, those that forward drew from."""
    return ALL if threading.active_count() == 1 else drew


def _iterators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The generators and iterators of Python's in a model's attributes, in what its functions reach, and in all that is held there;
    with words for which."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in BOOKKEEPING:
                yield from ((f"{_kind(v)} {name!r} of {named(path)}", v) for v in _held_by(value))
    for root in (*(reached := reached_by(model)).moving, *reached.roots):
        if not root.names:
            yield from ((f"{_kind(v)} {root.name}", v) for v in _held_by(root.now()))


def _held_by(value: Any) -> Iterator[Any]:
    """The iterators that a value leads to, by their bound methods (`count().__next__`), too."""
    todo, seen = [value], dict[int, Any]()
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if is_iterator(one):
            yield one
        elif type(one) not in LEAVES and id(one) not in seen:
            seen[id(one)] = one
            todo += [thing for _, thing in held(one)]


def _kind(iterator: Any) -> str:
    return "the Python generator" if is_a(iterator, GeneratorType) else f"the {type(iterator).__name__} in"


def in_its_thread(model: nn.Module, example: Example, trains: bool, drew: Names, prove: Callable[[], None]) -> None:
    """Run a proof, once more where it shows what belongs to a thread and was not known.

    Raises `UnsupportedError` where forward raises in a thread of its own and the model does not, in that of who calls.
    """
    for _ in range(_MORE):
        try:
            return prove()
        except NewlyFound:
            continue
        except Exception as error:  # whatever forward raises
            if isinstance(error, AriadneError) or not is_forwards(error):
                raise
            isolated(model, example, trains, model, drew)  # which may raise the same
            raise UnsupportedError(
                f"a Python split runs forward in a thread of its own, and there it raises {type(error).__name__}: {error}. In "
                "yours the model raises nothing, so it may use what belongs to one thread, such as a connection of sqlite3. Have "
                "forward make it where it uses it, ask for it before the call and pass the answer, or run the model itself"
            ) from error
    prove()


def measured_on(model: nn.Module, example: Example, trains: bool, *, plainly: bool = False) -> Measured:
    """What a run of the example shows of forward: one without gradients, or, where it raises then and the split `trains`, with.

    `plainly`: classes of tensors that it calls are called past what looks on. Raises `UnsupportedError` where forward runs with
    gradients alone and the split does not train.
    """

    drew = set[str]()

    def run(*args: Any, **kwargs: Any) -> Measured:
        found = measure(model, args, kwargs, drew, plainly=plainly)
        found.output = None
        return found

    found: Measured
    try:
        found = isolated(model, example, False, run, drew)
    except Exception as error:  # whatever forward raises
        if calls_class(error) and not plainly:
            return measured_on(model, example, trains, plainly=True)
        if isinstance(error, UnsupportedError):  # which forward doesn't raise
            raise
        without = error
    else:
        if trains:
            found.saving = isolated(model, example, True, run, drew).saving
        return found
    try:
        found = isolated(model, example, True, run, drew)
    except Exception:  # so it is not for want of gradients
        raise without from None
    if not trains:
        raise UnsupportedError(
            f"forward runs with gradients alone: without, it raises {type(without).__name__}: {without}. So there is no inference "
            "to split; ask for training, by SplitSpec(..., trainable=True), or have forward leave out what needs gradients where "
            "torch.is_grad_enabled() is False"
        ) from without
    found.needs_gradients = True
    return found


def see_draws(model: nn.Module, example: Example, grad: bool, drew: set[str]) -> None:
    """Add to `drew` what a run of the example draws from, where another thread may draw: a model that trains may draw from others.

    Raises what forward raises.
    """
    if threading.active_count() == 1:
        return  # all are put back

    def run(*args: Any, plainly: bool = False, **kwargs: Any) -> None:
        measure(model, args, kwargs, drew, plainly=plainly)

    try:
        isolated(model, example, grad, run, drew)
    except Exception as error:  # whatever forward raises
        if not calls_class(error):
            raise
        isolated(model, example, grad, partial(run, plainly=True), drew)


def traces(model: nn.Module, drew: Names) -> dict[str, Any]:
    """What a call leaves behind: the model's tensors, plain attributes of its modules, and the random generators it drew from."""
    plain = {
        f"the attribute {name!r} of {path or 'the model'}": value
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if type(value) in (bool, int, float, str) or (type(value) in (list, tuple, dict) and simple(value))
    }
    return {
        **{k: own(t) for k, t in tensors_of(model).items()},
        **{k: repr(v) for k, v in plain.items()},
        **drawn(drew),
    }


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers and parameters of a model, by what they are called in words."""
    tensors = {f"the buffer {name!r}": t for name, t in model.named_buffers()}
    return tensors | {f"the parameter {name!r}": t for name, t in model.named_parameters()}


def drawn(drew: Names) -> dict[str, Any]:
    """How the random generators stand that forward `drew` from, by what they are called in words."""
    found = dict[str, Any]()
    if TORCH in drew:
        found["torch's random generator"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            found["the generators of CUDA"] = torch.cuda.get_rng_state_all()
    if PYTHON in drew:
        found["random"] = random.getstate()
    if NUMPY in drew and "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (kind, keys.tolist(), *rest)
    return found


def move_on(drew: Names) -> None:
    """Draw one number from each of these random generators."""
    if TORCH in drew:
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
        for device in ("cpu", *devices):
            torch.rand(1, device=device)
    if PYTHON in drew:
        random.random()
    if NUMPY in drew and "numpy" in sys.modules:
        sys.modules["numpy"].random.random_sample()


def own(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values, outside of any graph."""
    with torch.no_grad():
        return t.detach().clone()


def kept(value: Any) -> Any:
    """A result, outside of any graph; of things that can't be compared, what they are."""
    return tree.map_leaves(_kept, value)


def _kept(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return own(leaf)
    return leaf if simple(leaf) else f"<{type(leaf).__name__}>"


def hold(
    model: nn.Module,
    example: Example,
    grad: bool,
    whole: Callable[..., Any],
    split: Callable[..., Any],
    at: str,
    drew: Names,
) -> None:
    """Raise `VerificationError` unless `split` gives what `whole` gives and leaves behind what that leaves; each from one state.

    `drew`: the random generators that the whole draws from.
    """
    drew = counted(drew)

    def seen(run: Callable[..., Any]) -> Any:
        def with_traces(*args: Any, **kwargs: Any) -> Any:
            found = kept(run(*args, **kwargs))
            return {"": found, **traces(model, drew)}

        return isolated(model, example, grad, with_traces, drew)

    theirs, mine = seen(whole), seen(split)
    wrong = difference(theirs, mine)
    if not wrong:
        return
    moves = difference(theirs, seen(whole))
    if moves:
        raise UnsupportedError(
            f"the model gives another result when it runs again from the same state ({moves}): it keeps state outside of itself, "
            "or is not deterministic, so nothing can be said of a split. Keep state in buffers or attributes, draw from torch's, "
            "Python's or numpy's own random numbers, and prepare while no other thread draws from those that forward draws from"
        )
    raise VerificationError(
        f"stopped at {at} and gone on, forward differs from the model: {wrong}. It may look at the thread it runs in, at "
        "a setting of the process that is put back between, or at something that it changes before the cut and that no attribute "
        "or variable leads to; if it does none of this, it is a bug in Ariadne"
    )


def weighed(output: Any) -> torch.Tensor | None:
    """A loss in which each element of the output has a weight of its own; None where nothing requires grad."""
    losses = [
        (t.float() * torch.arange(t.numel(), device=t.device).view(t.shape).cos()).sum()
        for t in tree.leaves(output)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    return torch.stack(losses).sum() if losses else None


_HELD_MADE = (
    "before the cut forward reads a tensor that a graph of yours made, from where the graph of the prefix knows it by itself "
    "alone, such as a tuple, an attribute of another tensor or a variable ({}), so it can't be held against the model without "
    "walking through your graph. Put the tensor into an attribute of a module or a list, or take fallback='python'"
)


class Trained(Protocol):
    """A split that trains."""

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> Any:
        """As `SplitRuntime.run_training_prefix`."""

    def train_suffix(self, boundary: Any, targets: Any = None, *, loss_fn: Callable[[Any, Any], torch.Tensor]) -> Any:
        """As `SplitRuntime.train_suffix`."""

    def backward_prefix(self, boundary: Any, boundary_grads: Any) -> None:
        """As `SplitRuntime.backward_prefix`."""


def prove_step(model: nn.Module, example: Example, split: Trained, at: str, drew: Names) -> None:
    """Hold a training step against the whole model's, whose loss weighs each element of the output; both from one state."""
    parameters = dict(model.named_parameters())

    def gradients(args: Any, standing: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        inputs = {f"input{path}": t.grad for path, t in tree.paths(args) if isinstance(t, torch.Tensor) and t.is_leaf}
        made = {name: t.grad for name, t in standing.items()}
        return {**{name: p.grad for name, p in parameters.items()}, **inputs, **made}

    def clear() -> None:
        for p in parameters.values():
            p.grad = None

    def whole(*args: Any, **kwargs: Any) -> Any:
        clear()
        with stand_ins(model) as standing:
            loss = weighed(model(*args, **kwargs))
            if loss is not None:
                loss.backward()
        return gradients((args, kwargs), standing), loss

    def halves(*args: Any, **kwargs: Any) -> Any:
        clear()
        loss_fn: Any = lambda out, _: weighed(out)  # noqa: E731 - what gives no loss is refused there
        with stand_ins(model) as standing:
            try:
                boundary = split.run_training_prefix(*args, **kwargs)
            except ModuleError as error:  # of a graph before the cut
                if not standing:
                    raise
                raise UnsupportedError(_HELD_MADE.format(error)) from error
            loss, found = split.train_suffix(boundary, loss_fn=loss_fn)
            split.backward_prefix(boundary, found)
        return gradients((args, kwargs), standing), loss

    def wants(*args: Any, **kwargs: Any) -> tuple[bool, set[Any]]:
        clear()
        began = count()
        with stand_ins(model) as standing:
            loss = weighed(model(*args, **kwargs))
            if loss is not None:
                standing.refuse_joined(loss)
            older = older_nodes(loss, began)
            if loss is not None and not older:
                loss.backward()
        return loss is not None, older

    wanting, older = isolated(model, example, True, wants, drew)
    if older:  # a thread of forward's counts nodes by itself, and its nodes are others in each run
        refuse_met_again(older & isolated(model, example, True, wants, drew)[1])
    if wanting:
        hold(model, example, True, whole, halves, at, drew)
