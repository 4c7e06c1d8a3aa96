"""How a toy enters the table."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from model_zoo.definition import Entry
from model_zoo.sampling import Sampler, dense

_Make = TypeVar("_Make", bound=Callable[[], nn.Module])


class Toys:
    """Entries of the family `toys`, in the order in which they were decorated.

    A toy isolates one hard thing, which the docstring of its class (or function) says. It is a few small layers around
    that thing, so that cuts lie before it, in it and after it; it takes (batch, 8) unless a sampler says otherwise.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __call__(
        self,
        name: str,
        tags: str = "",
        sample: Sampler | None = None,
        dynamic: Mapping[str, Mapping[int, str]] | None = None,
        batch_dim: Mapping[str, int | None] | None = None,
    ) -> Callable[[_Make], _Make]:
        """Decorate what makes the model; the tags "toy" and "cheap" are added."""

        def enter(make: _Make) -> _Make:
            found = frozenset({"toy", "cheap", *tags.split()})
            entry = Entry(f"toys/{name}", found, make, sample or dense(8), dynamic=dynamic, batch_dim=batch_dim)
            self.entries.append(entry)
            return make

        return enter
