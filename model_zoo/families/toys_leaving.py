"""Toys whose tensors are of a class of their own, or whose data leave torch and come back."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from model_zoo.families.toys_kit import Toys

toy = Toys()


class _Ends(nn.Module):
    """A layer at each end of what the toy is about: 8 -> 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)


class Scores(Tensor):
    """A tensor with a name for what its numbers are; torch itself copies no such tensor that has a graph."""

    def __deepcopy__(self, memo: dict[int, object]) -> "Scores":
        return self.detach().clone().requires_grad_(self.requires_grad)  # type: ignore[return-value]


@toy("class_of_its_own")
class ClassOfItsOwn(_Ends):
    """Tensors of a class of the user's own: made before the middle, kept by the ops after it, and one turned back."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.enter(x)).as_subclass(Scores)
        found = self.leave(h.sigmoid())
        return {"scores": found, "plain": (found * 2).as_subclass(Tensor)}


@toy("read_by_a_thread", "rows-mixed no-graph")
class ReadByAThread(_Ends):
    """A number leaves torch by a way that no op shows, and comes back: another thread reads it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(lambda data: float(data.sum()), h.detach()).result()
        found: Tensor = self.leave(torch.sigmoid(h * read))
        return found


@toy("told_by_pointers", "no-graph")
class ToldByPointers(_Ends):
    """How far two columns of what a layer gives lie apart in memory comes back as a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        apart = (h[:, 1:].data_ptr() - h.data_ptr()) / 8
        found: Tensor = self.leave(torch.sigmoid(h * apart))
        return found


@toy("shown_by_its_storage", "no-graph")
class ShownByItsStorage(_Ends):
    """The storage of what a layer gives is handed to a new tensor, which shows the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        shown = h.new_empty(0).set_(h.detach().untyped_storage(), 0, h.shape, h.stride())
        found: Tensor = self.leave(h + shown * 0.5)
        return found


ENTRIES = tuple(toy.entries)
