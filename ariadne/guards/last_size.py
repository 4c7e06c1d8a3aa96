"""Last size: what forward makes of the model's tensors for one size, and keeps until a call has another.

A plan makes it anew in each. It is the same as long as what it was made of is as it was at the call that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ariadne.guards.first_calls import MadeOf, Then, first_calls, told_of_graph
from ariadne.guards.kept import Kept

Enter = Callable[..., tuple[Any, ...] | None]


class AsLast(Kept):
    """The tensors of a model from which forward made something for the batch of a call, and keeps it for others of that batch.

    Where attributes of the model say for which batch that is (`MadeOf.holders`), a call of another one makes it anew. Where no such
    attribute tells, no one knows which call does.
    """

    __slots__ = ("holders", "made", "tables")

    def __init__(self, thing: nn.Module, made: MadeOf) -> None:
        self.made, self.tables = made, made.tables(thing)
        self.holders = [(thing.get_submodule(path).__dict__, name) for path, name in sorted(made.holders or ())]
        super().__init__(thing)

    def look(self, thing: Any) -> Then:
        """As they are now."""
        return Then.of(self.tables, self.made.asks_graph())

    def words(self, held: Any) -> str:
        """Their names."""
        return self.made.words

    def is_same(self) -> bool:
        """Whether they are as at the call that made it, or the next call makes it anew."""
        return self._is_renewed() or (not self.lacks_graph() and all(then.holds(self.tables) for then in self._thens()))

    def lacks_graph(self) -> bool:
        """Whether an earlier call made it without gradients, and this one would make it with them."""
        known: dict[Any, Then] = first_calls(self.thing).get(self.made, {})
        return bool(known) and self.made.asks_graph() and not all(then.graph for then in self._thens())

    def asked(self) -> bool:
        """The same, for a call: where that makes it anew, the next ones of its batch are held against it."""
        if not self.is_same():
            return False
        calls, now = first_calls(self.thing), self._holding()
        known: dict[Any, Then] = calls.get(self.made, {})
        key = calls.batch if now else None
        then = None if self._is_renewed() else known.get(key)
        if then is None or not then.stands(self.tables):
            graph = self.made.asks_graph() if then is None else then.graph
            same = next((one for one in (*known.values(), self.held) if one.stands(self.tables)), None)
            seen = replace(same or self.look(self.thing), graph=graph)
            calls[self.made] = {at: one for at, one in known.items() if at in now} | {key: seen}
        return True

    def told(self, what: str) -> str:
        """What is wrong, in words, where they are not the same."""
        if self.lacks_graph() and not self._is_renewed():
            return told_of_graph(what)
        return (
            f"forward makes {what} of {self!r} for the batch of a call, and keeps it for the next ones of that batch; that was "
            "changed since, and the model goes on with what it made of the old one. Let forward make it in each call; or undo "
            "that, or call prepare_split again"
        )

    def holds(self, found: Any) -> bool:
        """Whether it is this model: in a copy, too, the thing stands that was made of them as they were."""
        return found is self.thing

    def anew(self, thing: Any) -> Kept:
        """The same of a copy, in which the thing stands as well."""
        copied, thens = type(self)(thing, self.made), self._thens()
        if self.made in first_calls(self.thing):
            same = all(then.holds(self.tables) for then in thens)
            then = replace(copied.held if same else thens[0], graph=all(then.graph for then in thens))
            first_calls(thing)[self.made] = dict.fromkeys(self._holding() or (None,), then)
        return copied

    def _holding(self) -> list[Any]:
        """The batch for which it was made, as the attributes say that hold it."""
        return [own.get(name) for own, name in self.holders]

    def _thens(self) -> list[Then]:
        """How they were at the call that made what stands there, as far as that is known; else at the earlier ones."""
        known: dict[Any, Then] = first_calls(self.thing).get(self.made, {})
        return [known[at] for at in self._holding() if at in known] or [*known.values()] or [self.held]

    def _is_renewed(self) -> bool:
        """Whether the call that asks will make it anew, as one of another batch does; or nothing stands there yet."""
        calls, now = first_calls(self.thing), self._holding()
        if self.made not in calls and self.made.spot.is_empty(self.thing):
            return True
        return bool(now) and calls.batch not in (None, *now)


def telling_batch(enter: Enter, baseline: Any) -> Enter:
    """An entrance, which tells such guards of the batch of a call, where there are any."""
    kept = next((value for *_, value in baseline.attributes if isinstance(value, AsLast)), None)
    if kept is None:
        return enter
    calls = first_calls(kept.thing)

    def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        found = enter(args, kwargs)
        if found is not None:
            calls.batch = found[0]
        return found

    return entered
