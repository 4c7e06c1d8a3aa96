"""Data that leave torch by a way that no op shows: refused, or the plan holds for those data alone; also beside a witness."""

from __future__ import annotations

import ctypes
import io
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ariadne.prepare
from ariadne import SplitSpec, prepare_split, prepare_split_replay
from ariadne.errors import UnsupportedError, WitnessError
from conformance.mutants.unseen import StorageInThePlan, nothing, put, without


class Out(nn.Module):
    """(B, 4) -> (B, 4), with `way` between two layers."""

    def __init__(self, way: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.way, self.a, self.b = way, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h * self.way(h))


def looks(h: torch.Tensor) -> None:
    """What leaves a witness in the plan."""
    if h.isnan().any():
        raise ValueError("not a number")


def elsewhere(h: torch.Tensor) -> list[torch.Tensor]:
    """A copy of `h` that another thread made."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(h.detach().clone()))
    thread.start()
    thread.join()
    return found


def by_pointer(h: torch.Tensor) -> float:
    return float(ctypes.c_float.from_address(h.detach().contiguous().data_ptr()).value)


def lent(h: torch.Tensor) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach()))


def behind_a_look(way: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def found(h: torch.Tensor) -> Any:
        looks(h)
        return way(h)

    return found


UNSEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "dlpack": lent,
    "a thread": lambda h: elsewhere(h)[0],
    "a number from a thread": lambda h: float(elsewhere(h)[0][0, 0]) if h.dim() else 0,
    "ctypes": by_pointer,
    "an element of a storage": lambda h: h.detach().storage()[0],
    "a byte of an untyped storage": lambda h: h.detach().untyped_storage()[0],
    "a list of a storage": lambda h: sum(h.detach().storage().tolist()),
    "a tensor set to a storage": lambda h: torch.tensor([]).set_(h.detach().untyped_storage()).sum(),
    "a difference of pointers": lambda h: h[:, 1:].data_ptr() - h.data_ptr(),
}


@pytest.mark.parametrize("witness", [False, True], ids=["alone", "after a witness"])
@pytest.mark.parametrize("way", UNSEEN)
def test_data_that_leave_torch_unseen_are_refused(way: str, witness: bool) -> None:
    torch.manual_seed(0)
    model = Out(behind_a_look(UNSEEN[way]) if witness else UNSEEN[way])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, of typed storages
        with pytest.raises(UnsupportedError, match="takes data out"):
            prepare_split_replay(model, (torch.randn(2, 4),), split=SplitSpec("50%", dynamic_batch=(1, 8)))


@pytest.mark.planted
@pytest.mark.parametrize("way", [name for name in UNSEEN if "storage" in name])
def test_a_storage_that_is_not_refused_is_noticed(way: str) -> None:
    reads = without(lambda owner, name: owner in (torch.UntypedStorage, torch.TypedStorage))
    replaced = ((ariadne.prepare, "prove", nothing), reads, *StorageInThePlan.replaced)
    with put(*replaced), pytest.raises((pytest.fail.Exception, AssertionError)):
        test_data_that_leave_torch_unseen_are_refused(way, False)


TEXT: dict[str, Callable[[torch.Tensor], Any]] = {
    "repr": lambda h: 2 if "-" in repr(h.sum()) else 3,
    "str": lambda h: 2 if "-" in str(h[0, 0]) else 3,
    "an f-string": lambda h: 2 if "-" in f"{h[:, 0]}" else 3,
    "a format": lambda h: 2 if "-" in f"{h.sum():.3f}" else 3,
    "a list's text": lambda h: 2 if "-" in str([h.sum()]) else 3,
    "percent": lambda h: 2 if "-" in "%s" % h.sum() else 3,  # noqa: UP031
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("way", TEXT)
def test_text_of_data_holds_for_those_data_alone(way: str, train: bool) -> None:
    torch.manual_seed(0)
    model, x = Out(TEXT[way]), torch.randn(2, 4)
    prepare = prepare_split if train else prepare_split_replay
    runtime = prepare(model, (x,), split=SplitSpec("50%", dynamic_batch=(1, 8), max_paths=1))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    with pytest.raises(WitnessError):
        runtime.run_suffix(runtime.run_prefix(-x * 3))


def shown(h: torch.Tensor) -> int:
    print(h, file=io.StringIO())
    return 2


def logged(h: torch.Tensor) -> int:
    logging.getLogger(__name__).warning("%s", h)
    return 2


SHOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "print": shown,
    "logging": logged,
}


@pytest.mark.parametrize("way", SHOWN)
def test_what_is_shown_to_people_alone_changes_nothing(way: str) -> None:
    torch.manual_seed(0)
    model = Out(SHOWN[way])
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (1, 2, 3, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


def test_a_model_that_refuses_other_numbers_is_prepared() -> None:
    def strict(h: torch.Tensor) -> int:
        if not given[0]:
            raise ValueError("seen before")
        return 2

    given = [True]

    class Picky(Out):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.detach().flatten()[0]) not in (0.0, 1.0):
                raise ValueError("ones and zeros alone")
            return super().forward(x)

    model = Picky(strict)
    x = torch.ones(2, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("50%", dynamic_batch=(2, 2)))
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


class ReadsItsCount(nn.Module):
    """Writes a tensor in place, and then takes all of it as plain numbers."""

    def __init__(self, whole: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.a, self.b = whole, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        assert isinstance(self.n, torch.Tensor)
        self.n += 1
        return self.b(h * self.whole(self.n))


@pytest.mark.parametrize("whole", [lambda n: n.tolist(), lambda n: float(n.numpy()), lambda n: float(f"{n}")])
def test_a_tensor_that_was_written_is_taken_whole(whole: Callable[[torch.Tensor], Any]) -> None:
    model, twin = ReadsItsCount(whole).eval(), ReadsItsCount(whole).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("50%", dynamic_batch=(1, 8)))
    for batch in (3, 2, 3):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), twin(x))
    assert torch.equal(model.n, twin.n)  # type: ignore[arg-type]


class Early(nn.Module):
    """Computes before a question about data what one of its answers alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        early, scale = h.tanh(), torch.tensor(2.0)
        return self.b(h) if h.sum() > 0 else self.b(early * scale)


@pytest.mark.parametrize("above", [False, True])
def test_what_one_path_alone_uses_of_what_was_computed_before_is_no_leak(above: bool) -> None:
    torch.manual_seed(0)
    model, x = Early(), torch.randn(3, 4)
    with torch.no_grad():
        model.a.bias.fill_(9.0 if above else -9.0)
    model.a.bias.requires_grad_(False)
    runtime = prepare_split(model, (x,), split="50%")
    for y in (x, -20 * x, 20 * x, -x):
        assert torch.equal(model(y), runtime.run_suffix(runtime.run_prefix(y)))
