"""What goes on by itself after a split was prepared: buffers that forward fills at its first call, registries that grow."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import SplitSpec
from ariadne.errors import HalfError, ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers, same


class Filled(nn.Module):
    """One by a table, before all else; one by a mean that moves from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        h = self.b(self.a(x) + self.table)
        now = h.detach().mean(0)
        self.mean = now if self.mean is None else self.mean * 0.9 + now * 0.1
        return h + self.mean


class Inside(nn.Sequential):
    """Two such models, so that one is filled while the other is not."""

    def __init__(self) -> None:
        super().__init__(Filled(), nn.ReLU(), Filled())


@pytest.mark.parametrize("cut", ["10%", "50%", "90%"])
@pytest.mark.parametrize("kind", [Filled, Inside])
def test_later_calls_find_what_the_first_has_put_there(kind: type[nn.Module], cut: str) -> None:
    model = kind().eval()
    whole = copy.deepcopy(model)
    split = prepare_split(model, (numbers(2, 4),), split=cut)
    assert not [*model.buffers()]
    for batch in (2, 2, 3, 5):
        x = numbers(batch, 4, seed=batch)
        same(whole(x), split.run_suffix(split.run_prefix(x)), f"batch {batch}")
        same(dict(whole.named_buffers()), dict(model.named_buffers()), "buffers")


def test_so_it_is_in_training() -> None:
    model = Filled()
    whole = copy.deepcopy(model)
    split = prepare_split(model, (numbers(2, 4),), split=SplitSpec("50%", trainable=True))
    for step in range(3):
        x = numbers(2, 4, seed=step)
        whole(x).pow(2).mean().backward()
        boundary = split.run_training_prefix(x)
        _, gradients = split.train_suffix(boundary, loss_fn=lambda out, _: out.pow(2).mean())
        split.backward_prefix(boundary, gradients)
        same([p.grad for p in whole.parameters()], [p.grad for p in model.parameters()], f"step {step}")
        same(dict(whole.named_buffers()), dict(model.named_buffers()), f"step {step}")


def test_a_buffer_that_is_taken_away_again_is_told() -> None:
    model, x = Filled(), numbers(2, 4)
    split = prepare_split(model, (x,), split="50%")
    for _ in range(2):
        split.run_suffix(split.run_prefix(x))
    model.mean = None
    with pytest.raises(ModuleError, match="mean"):
        split.run_prefix(x)


def test_a_file_holds_what_is_filled_alike_at_each_call_and_refuses_the_rest(tmp_path: Path) -> None:
    model, x = Filled(), numbers(2, 4)
    split = prepare_split(model, (x,), split="after:a")
    split.save(tmp_path / "prefix", side="prefix")
    with pytest.raises(HalfError, match=r"fills the buffer 'mean' of the model at its first call.*Run the model once"):
        split.save(tmp_path / "suffix", side="suffix")
    model(x)
    whole = copy.deepcopy(model)
    again = prepare_split(model, (x,), split="after:a")
    for side in ("prefix", "suffix"):
        again.save(tmp_path / side, side=side)
    prefix, suffix = (ariadne.load(tmp_path / side) for side in ("prefix", "suffix"))
    for batch in (2, 3, 2):
        same(whole(numbers(batch, 4)), suffix.run_suffix(prefix.run_prefix(numbers(batch, 4))), f"batch {batch}")


SCALES = {"one": 2.0}


class Registered(nn.Module):
    """Looks itself up in a dict outside of it, into which others are entered later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * SCALES["one"]) * len(SCALES)


def test_where_a_dict_outside_has_grown_a_call_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Registered(), numbers(2, 4)
    split = prepare_split(model, (x,), split="50%")
    for name in ("two", "three"):
        monkeypatch.setitem(SCALES, name, 3.0)
        same(model(x), split.run_suffix(split.run_prefix(x)), name)
    assert len(split.plans) == 3


def test_where_it_holds_something_else_under_a_known_key_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Registered(), numbers(2, 4)
    split = prepare_split(model, (x,), split="50%")
    monkeypatch.setitem(SCALES, "two", 3.0)
    monkeypatch.setitem(SCALES, "one", 4.0)
    with pytest.raises(ModuleError, match="SCALES"):
        split.run_prefix(x)


def test_a_boundary_that_waits_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    split = prepare_split(Registered(), (numbers(2, 4),), split="50%")
    boundary = split.run_prefix(numbers(2, 4))
    monkeypatch.setitem(SCALES, "two", 3.0)
    with pytest.raises(ModuleError, match="SCALES"):
        split.run_suffix(boundary)


class Adapted(nn.Module):
    """One of several adapters, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.adapters = nn.ModuleDict({"one": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        found: Tensor = self.b(h + self.adapters["one"](h)) * len(self.adapters)
        return found


def test_where_a_dict_of_modules_has_one_more_a_call_is_captured_anew() -> None:
    model, x = Adapted(), numbers(2, 4)
    split = prepare_split(model, (x,), split="50%")
    model.adapters["two"] = nn.Linear(4, 4)
    same(model(x), split.run_suffix(split.run_prefix(x)), "with one more")
    del model.adapters["one"]
    with pytest.raises(ModuleError, match=r"'adapters.one' was replaced, added or removed"):
        split.run_prefix(x)
