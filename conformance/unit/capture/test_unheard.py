"""What forward changes by no op of torch is refused by name: arrays in place, tensors by their arrays, context variables."""

from __future__ import annotations

import array
import contextvars
import decimal
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ariadne
from ariadne import prepare_split, prepare_split_replay
from ariadne.errors import UnsupportedError

X = torch.linspace(-1, 1, 8).view(2, 4)
OUTSIDE = np.zeros(8)
NOTED: ContextVar[Any] = ContextVar("noted", default=None)

Way = Callable[[Any, torch.Tensor], Any]


class Notes(nn.Module):
    """(B, 4) -> (B, 2); what `way` gives is added between two layers."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 8), nn.Linear(8, 2), way
        self.mean = np.zeros(8, np.float32)
        self.log = {"rows": [np.zeros(8)], "bytes": bytearray(8), "array": array.array("d", [0.0])}
        self.seen = memoryview(bytearray(8))
        self.register_buffer("ema", torch.zeros(8))
        self.view = np.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).relu()
        y: torch.Tensor = self.b(h + (self.way(self, h) or 0.0))
        return y


def refused(way: Way, words: str, model: nn.Module | None = None) -> None:
    """Preparing raises, with these words, and leaves the arrays of the model as they were."""
    model = Notes(way) if model is None else model
    before = {name: v.tobytes() for name, v in vars(model).items() if isinstance(v, np.ndarray)}
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=words):
        prepare_split(model, (X,), split="after:a")
    assert all(vars(model)[name].tobytes() == was for name, was in before.items())
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())


def by_slice(m: Any, h: torch.Tensor) -> None:
    m.mean[:] = h.detach().mean(0).tolist()


def by_ufunc(m: Any, h: torch.Tensor) -> None:
    np.add(m.mean, 1, out=m.mean)


def by_copy(m: Any, h: torch.Tensor) -> None:
    np.copyto(m.mean, h.detach().numpy().mean(0))


def by_index(m: Any, h: torch.Tensor) -> None:
    np.add.at(m.mean, h.detach().argmax(1).numpy(), 1)


def by_torch(m: Any, h: torch.Tensor) -> None:
    torch.from_numpy(m.mean).add_(h.detach().mean(0))


@pytest.mark.parametrize("way", [by_slice, by_ufunc, by_copy, by_index, by_torch])
def test_an_array_that_is_written_in_place_is_refused(way: Way) -> None:
    refused(way, r"in place into the attribute 'mean' of the model \(numpy.ndarray\)")


def in_a_list(m: Any, h: torch.Tensor) -> None:
    m.log["rows"][0] += 1


def in_bytes(m: Any, h: torch.Tensor) -> None:
    m.log["bytes"][1] = 3


def in_an_array(m: Any, h: torch.Tensor) -> None:
    m.log["array"].append(3.0)


def in_a_view(m: Any, h: torch.Tensor) -> None:
    m.seen[0] = 7


def outside(m: Any, h: torch.Tensor) -> None:
    OUTSIDE[0] += 1


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (in_a_list, r"'log'\['rows'\]\[0\] of the model"),
        (in_bytes, r"'log'\['bytes'\] of the model \(bytearray\)"),
        (in_an_array, r"'log'\['array'\] of the model \(array.array\)"),
        (in_a_view, r"the attribute 'seen' of the model \(bytearray\)"),
        (outside, r"into the global 'OUTSIDE' \(numpy.ndarray\)"),
    ],
)
def test_so_it_is_in_containers_in_bytes_and_outside(way: Way, words: str) -> None:
    refused(way, words)
    assert OUTSIDE[0] == 0


def test_a_write_that_another_batch_alone_shows_is_refused() -> None:
    def way(m: Any, h: torch.Tensor) -> None:
        m.mean[0] = h.shape[0]

    model = Notes(way)
    model.mean[0] = 2
    refused(way, "in place into the attribute 'mean'", model)


def test_an_array_that_is_an_input_is_refused_too() -> None:
    class Filled(Notes):
        def forward(self, x: torch.Tensor, out: Any = None) -> torch.Tensor:
            out[:] = x.sum().item()
            return super().forward(x)

    given = np.zeros(2)
    with pytest.raises(UnsupportedError, match=r"in place into input 1 \(numpy.ndarray\)"):
        prepare_split(Filled(lambda m, h: None), (X, given), split="after:a")
    assert not given.any()


@pytest.mark.variants  # as it takes two seconds
def test_what_an_opaque_part_writes_is_its_own() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = np.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            NOTED.set(float(self.count[0]))
            return x * float(self.count[0])

    model = nn.Sequential(nn.Linear(4, 8), ariadne.opaque(Part()), nn.Linear(8, 2)).eval()
    part: Any = model[1]
    runtime = prepare_split_replay(model, (X,), split="after:0")

    def left() -> tuple[torch.Tensor, float, Any]:
        part.count[:] = 0
        found = [call() for call in (run, run)]
        return found[1], float(part.count[0]), NOTED.get()

    run: Callable[[], torch.Tensor] = lambda: runtime.run_suffix(runtime.run_prefix(X))  # noqa: E731
    split = contextvars.copy_context().run(left)
    run = lambda: model(X)  # noqa: E731
    whole = contextvars.copy_context().run(left)
    assert torch.equal(split[0], whole[0])
    assert split[1:] == whole[1:] == (2.0, 2.0)


def buffer_by_array(m: Any, h: torch.Tensor) -> None:
    a = m.ema.numpy()
    a *= 0.9
    a += h.detach().numpy().mean(0)


def buffer_by_view(m: Any, h: torch.Tensor) -> None:
    np.add.at(np.asarray(m.ema.detach()[2:]), [0], 1)


def weight_by_array(m: Any, h: torch.Tensor) -> None:
    m.a.weight.detach().numpy()[0, 0] += 1


def between_two_ops(m: Any, h: torch.Tensor) -> None:
    a = m.ema.numpy()
    m.ema.add_(1)
    a += 1
    m.ema.mul_(2)


def result_of_an_op(m: Any, h: torch.Tensor) -> None:
    h.detach().numpy()[:] = 1


@pytest.mark.parametrize("way", [buffer_by_array, buffer_by_view, weight_by_array, between_two_ops, result_of_an_op])
def test_a_tensor_that_is_written_through_its_array_is_refused(way: Way) -> None:
    refused(way, r"through the array that .numpy\(\) gave it in the model itself")


def test_an_array_of_a_buffer_that_was_taken_before_is_one_of_the_model() -> None:
    def way(m: Any, h: torch.Tensor) -> None:
        m.view += 1

    model = Notes(way)
    model.view = model.get_buffer("ema").numpy()
    refused(way, "in place into the attribute 'view' of the model", model)


def test_ops_may_write_a_tensor_whose_array_is_read_alone() -> None:
    def way(m: Any, h: torch.Tensor) -> float:
        found = float(m.ema.numpy()[0])
        m.ema.add_(1)
        return found + float(np.asarray(m.ema)[0])

    model, whole = Notes(way).eval(), Notes(way).eval()
    whole.load_state_dict(model.state_dict())
    runtime = prepare_split_replay(model, (X,), split="after:a")
    for _ in range(2):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), whole(X))
    assert torch.equal(model.get_buffer("ema"), torch.full((8,), 2.0))


def set_each_time(m: Any, h: torch.Tensor) -> None:
    NOTED.set(h.detach().mean())


def set_to_the_batch(m: Any, h: torch.Tensor) -> None:
    NOTED.set(h.shape[0])


@pytest.mark.parametrize("way", [set_each_time, set_to_the_batch])
def test_a_context_variable_that_is_set_is_refused(way: Way) -> None:
    def run() -> None:
        NOTED.set(2)  # the batch of the example
        refused(way, "sets the context variable 'noted'")

    contextvars.copy_context().run(run)


def test_one_that_is_put_back_is_fine_and_so_are_settings_that_are_made_when_asked() -> None:
    def way(m: Any, h: torch.Tensor) -> float:
        token = NOTED.set(3)
        found = float(NOTED.get() + decimal.Decimal(1))
        NOTED.reset(token)
        return found

    def run() -> None:
        model = Notes(way).eval()
        runtime = prepare_split(model, (X,), split="after:a")
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
        assert NOTED not in contextvars.copy_context()

    contextvars.Context().run(run)


def test_no_run_of_forward_leaves_a_context_variable_to_the_next_one() -> None:
    def way(m: Any, h: torch.Tensor) -> None:
        assert NOTED.get() is None
        NOTED.set(1)

    runtime = prepare_split(Notes(way), (X,), split="after:a", fallback="python")
    assert isinstance(runtime, ariadne.PythonSplit)
    assert NOTED.get() is None
