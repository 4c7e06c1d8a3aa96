"""Owners: which side of a cut reads which parameters, and which optimizers would step them too early, or by too much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import Any
from weakref import WeakValueDictionary

import torch

from ariadne.errors import TrainingError
from ariadne.plan import storage_of
from ariadne.runtime.optimizers import refuse_other
from ariadne.runtime.waiting import led_to

# What is of neither side, and got a gradient from a loss whose suffix was trained from bytes; by id.
BY_A_LOSS: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_is_leaf = attrgetter("is_leaf")
_address: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
_get: Callable[[dict[str, Any], str], Any] = dict.get


@dataclass(frozen=True, slots=True)
class Owned:
    """The parameters that two sides read, each once, and those that both read; and the ids of them by side.

    `guessed`: an opaque part may use others than it did when the model was prepared.
    """

    prefix: Sequence[torch.nn.Parameter]
    suffix: Sequence[torch.nn.Parameter]
    shared: Sequence[torch.nn.Parameter]
    of_prefix: frozenset[int]
    of_suffix: frozenset[int]
    guessed: bool = False

    @classmethod
    def of(cls, prefix: Iterable[Any], suffix: Iterable[Any]) -> Owned:
        """What two sides own, from the parameters that each reads."""
        before, after = {id(p): p for p in prefix}, {id(p): p for p in suffix}
        both = [p for i, p in after.items() if i in before]
        return cls([*before.values()], [*after.values()], both, frozenset(before), frozenset(after))

    def registered(self, model: torch.nn.Module) -> Owned:
        """Those of them that `model.parameters()` has, as the whole model's optimizer would; and the others, as the suffix's.

        A parameter in a plain list, such as a teacher's that is to stay as it is, is read, but in no registry of the model. One
        that no part of forward reads may be the loss's, as the weights of several losses are, and that runs with the suffix.
        """
        known = {id(p): p for p in model.parameters()}
        prefix, suffix = ([p for p in side if id(p) in known] for side in (self.prefix, self.suffix))
        return Owned.of(prefix, [*suffix, *(p for i, p in known.items() if i not in self.of_prefix | self.of_suffix)])

    def refuse_input_of_suffix(self, given: torch.Tensor) -> None:
        """Raise `TrainingError` where an input was computed from a parameter that the suffix alone reads, or is one.

        That would get its gradient in two shares: the suffix's optimizer would step by one of them.
        """
        found = led_to([given], [p for p in self.suffix if id(p) not in self.of_prefix])
        if found:
            shape = next(tuple(p.shape) for p in self.suffix if id(p) in found)
            raise TrainingError(
                f"an input was computed, with gradients, from a parameter that the part after the cut uses (shape {shape}): its "
                "gradient would come in two shares, one of them after the suffix's optimizer has stepped. Compute the input inside "
                "of forward, detach it, or cut where the part before uses that parameter, too"
            )

    def refuse_common_source(self) -> None:
        """Raise `TrainingError` where what one side reads is computed from a leaf to which the other side leads as well.

        `torch.func` and its kin put such tensors in the place of parameters. Two backward passes would add to the leaf twice.
        """
        if all(map(_is_leaf, self.prefix)) and all(map(_is_leaf, self.suffix)):
            return
        for mine, others in ((self.prefix, self.suffix), (self.suffix, self.prefix)):
            computed = [p for p in mine if p.grad_fn is not None]
            both = led_to(computed, None) & led_to(others, None) if computed else ()
            if both:
                raise TrainingError(
                    f"a tensor that stands in for a parameter (shape {tuple(computed[0].shape)}) is computed from a leaf whose "
                    "gradient the other side of the cut adds to as well: the whole model adds all up before it accumulates, and "
                    "two halves can't. Put leaves in the place of parameters, and take their gradients further yourself"
                )


NOTHING_OWNED = Owned.of((), ())


class SideSlots:
    """Where the parameters of two sides stand; what they own is laid out again only where one was replaced."""

    def __init__(self, sides: Sequence[Sequence[tuple[dict[str, Any], str]]]) -> None:
        self.tables = [table for found in sides for table, _ in found]
        self.keys = [key for found in sides for _, key in found]
        self.count = len(sides[0])
        self.last: tuple[list[Any], Owned] = [], NOTHING_OWNED

    def owned(self) -> Owned:
        """What stands there now, by side."""
        now = list(map(_get, self.tables, self.keys))
        then, owned = self.last
        if len(now) != len(then) or any(map(is_not, now, then)):
            owned = Owned.of(*([p for p in side if p is not None] for side in (now[: self.count], now[self.count :])))
            self.last = now, owned
        return owned


NO_SLOTS = SideSlots(((), ()))


def refuse_shared(
    shared: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None, side: str, here: bool
) -> None:
    """Raise `TrainingError` if a side's optimizer owns a parameter whose gradient the other side has yet to complete."""
    if optimizer is None:
        return
    refuse_other(optimizer)
    ids = {id(p) for p in shared}
    owned = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) in ids]
    if owned and here:
        raise TrainingError(
            f"the optimizer of the suffix owns {len(owned)} parameter(s) that the prefix uses too (shape {owned[0]}), and would "
            "step before the prefix has added its gradient. Call train_suffix with optimizer=None, then backward_prefix, and "
            "step one optimizer that owns them; or leave them to the optimizer of the prefix alone"
        )
    if owned:
        raise TrainingError(
            f"the optimizer of the {side} owns {len(owned)} parameter(s) that both sides use (shape {owned[0]}). Prefix and suffix "
            "are trained in two processes, so the gradient here is one share of two: leave runtime.shared_parameters() out of the "
            "optimizers, add the shares of both processes, step both copies by the sum, then clear both gradients"
        )


class PrefixMemory:
    """The state that the part before the cut reads, whose memory the suffix's optimizer may not step before it."""

    def __init__(self, reads: Callable[[], Iterable[Any]]) -> None:
        self._reads = reads
        self._groups: list[Any] = []  # what was looked at last, by whom, how many there were, and where they lay
        self._owned, self._count = NOTHING_OWNED, 0
        self._parameters: list[torch.Tensor] = []
        self._lay: list[int] = []

    def refuse_memory(self, optimizer: torch.optim.Optimizer, owned: Owned) -> None:
        """Raise `TrainingError` where a parameter of the optimizer shares memory with what the prefix reads, as another tensor.

        Looked at once for each optimizer, and again where a parameter was replaced, or got other memory.
        """
        refuse_other(optimizer)
        groups = optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        stands = self._groups is groups and self._owned is owned and self._count == count
        if stands and [*map(_address, self._parameters)] == self._lay:
            return
        read = [t for t in self._reads() if isinstance(t, torch.Tensor) and _lies_at(t) is not None]
        mine = [p for group in groups for p in group["params"] if _lies_at(p) is not None]  # frozen ones may thaw
        stores = {storage_of(t) for t in read}
        for p in [p for p in mine if storage_of(p) in stores]:
            other = next((t for t in read if t is not p and storage_of(t) == storage_of(p) and _meet(t, p)), None)
            if other is not None:
                raise TrainingError(
                    f"the optimizer of the suffix owns a parameter (shape {tuple(p.shape)}) whose memory is also that of another "
                    f"tensor, of shape {tuple(other.shape)}, which the part before the cut reads: it would step before the prefix "
                    "has gone back. Call train_suffix with optimizer=None, then backward_prefix, and step one optimizer; or make "
                    "them one parameter, as by model.b.weight = model.a.weight"
                )
        self._groups, self._owned, self._count = groups, owned, count
        self._parameters = [*mine, *(t for t in read if isinstance(t, torch.nn.Parameter))]
        self._lay = [*map(_address, self._parameters)]


def _lies_at(t: torch.Tensor) -> range | None:
    """The bytes of its storage that a dense tensor's elements lie between; None where it has none."""
    if storage_of(t) is None or not t.numel():
        return None
    start = t.storage_offset() * t.element_size()
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return range(start, start + (last + 1) * t.element_size())


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, others = _lies_at(one), _lies_at(other)
    return mine is not None and others is not None and mine.start < others.stop and others.start < mine.stop


def refuse_upstream(optimizer: torch.optim.Optimizer, graph: Iterable[Any], owned: Owned) -> None:
    """Raise `TrainingError` where the optimizer of the suffix owns what an input is, or was computed from, with gradients.

    `graph`: what crosses, with the graph of the part before the cut.
    """
    others = _of_neither(optimizer, owned)
    found = led_to(graph, others)
    if found:
        shape = next(tuple(p.shape) for p in others if id(p) in found)
        raise TrainingError(
            f"the optimizer of the suffix owns {len(found)} parameter(s) (shape {shape}) from which an input was computed: their "
            "gradient comes in backward_prefix, after this optimizer has stepped. Give them to the optimizer of the prefix; or "
            "call train_suffix with optimizer=None, then backward_prefix, and step one optimizer that owns them"
        )


def _of_neither(optimizer: torch.optim.Optimizer, owned: Owned) -> list[torch.Tensor]:
    known = owned.of_prefix | owned.of_suffix
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]


def refuse_of_loss(optimizer: torch.optim.Optimizer, owned: Owned) -> None:
    """Raise `TrainingError` where the optimizer of the prefix owns what a loss used whose suffix was trained from bytes, here.

    It has its gradient by now, which `backward_prefix` would clear; or one of an earlier round, of which it would not know.
    """
    found = [p for p in _of_neither(optimizer, owned) if p.grad is not None and BY_A_LOSS.get(id(p)) is p]
    if found:
        raise TrainingError(
            f"the optimizer of the prefix owns {len(found)} parameter(s) (shape {tuple(found[0].shape)}) that a loss uses, and the "
            "suffix of this boundary was trained from bytes: whether their gradient is of this round is not known here. Leave them "
            "to the optimizer of the suffix, or out of the loss; or pass optimizer=None, call zero_grad() before and step() after"
        )


def refuse_earlier(optimizer: torch.optim.Optimizer, earlier: Collection[int]) -> None:
    """Raise `TrainingError` where an optimizer would step a parameter of the suffix by gradients of earlier rounds, too."""
    found = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) in earlier]
    if found:
        raise TrainingError(
            f"the optimizer of the prefix owns {len(found)} parameter(s) of the suffix (shape {found[0]}), which had gradients "
            "before this round, and train_suffix added to them: only what it is given clears them. Give train_suffix an optimizer "
            "with these, and backward_prefix one with prefix_parameters(); or pass None to both, call zero_grad() before and "
            "step() after"
        )
