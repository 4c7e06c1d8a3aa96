"""Trap 28: no activation outlives its last use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ariadne import prepare_split, tree
from conformance.unit.trap_nets import step
from conformance.unit.trap_twins import Twins, seeded, square_loss


class Meter(TorchDispatchMode):
    """The bytes of all storages made while it is on that are alive now, and the most that there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree.leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        for t in tree.leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key in self.known or key in given:
                    continue
                self.known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def measured(act: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes alive during `act`, and those alive after it while its result is."""
    gc.disable()  # what only the collector would free is held
    try:
        with Meter() as meter:
            result = act()
            after = meter.now
        del result
        return meter.peak, after
    finally:
        gc.enable()


WIDE = 256


def chain() -> nn.Module:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDE, WIDE), nn.Tanh())], nn.Linear(WIDE, 4))


class Hourglass(nn.Module):
    """Wide, narrow, wide; skips; chunks of which one dies early."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8 * WIDE), nn.Linear(8 * WIDE, 16)
        self.mix, self.out = nn.Linear(16, 16), nn.Linear(4 * WIDE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(torch.relu(self.down(torch.tanh(self.up(x)))))
        first, second = torch.chunk(torch.tanh(self.up(x)), 2, dim=1)
        kept = torch.sin(first) + 1
        return self.out(torch.cos(kept) * second.sigmoid())


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_the_halves_never_hold_more_than_the_model_but_for_the_payload(build: Callable[[], nn.Module]) -> None:
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))
    with torch.no_grad():
        most, _ = measured(lambda: twins.whole(x))
    for runtime in twins.cuts():
        peak, after = measured(lambda: runtime.run_prefix(x))  # noqa: B023
        boundary = runtime.run_prefix(x)
        assert peak <= most, (runtime.split_id, peak, most)
        crossing = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in boundary.tensors.values()}
        assert after <= sum(crossing.values()), (runtime.split_id, after, crossing)
        later, last = measured(lambda: runtime.run_suffix(boundary))  # noqa: B023
        assert later <= most, (runtime.split_id, later, most)
        assert last == 32 * 4 * 4


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_a_split_forward_peaks_where_the_model_does(build: Callable[[], nn.Module]) -> None:
    """But for the payload, which the caller holds while the suffix runs, so that it can be run again."""
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))
    with torch.no_grad():
        most, _ = measured(lambda: twins.whole(x))
    over = {}
    for runtime in twins.cuts():
        peak, _ = measured(lambda: runtime.run_suffix(runtime.run_prefix(x)))  # noqa: B023
        if peak > most * 1.05 + runtime.run_prefix(x).nbytes:
            over[runtime.split_id] = round(peak / most, 2)
    assert not over


@pytest.mark.parametrize("build", [chain, Hourglass])
def test_split_training_holds_no_more_than_a_step_of_the_model(build: Callable[[], nn.Module]) -> None:
    width = WIDE if build is chain else 16
    x = seeded((32, width))
    twins = Twins(build, x, batches=(1, 64))

    def whole_step() -> None:
        square_loss(twins.whole(x)).backward()

    whole_step()
    most, _ = measured(whole_step)
    for runtime in twins.cuts():
        step(runtime, x)
        peak, after = measured(lambda: step(runtime, x))  # noqa: B023
        boundary_bytes = runtime.run_prefix(x).nbytes
        held = 2 * boundary_bytes  # the boundary and its gradients, which the caller holds
        assert peak <= most * 1.05 + held, (runtime.split_id, peak, most)
        assert after == 0, (runtime.split_id, after)


def test_activations_of_the_prefix_are_gone_once_it_was_walked_back() -> None:
    """Though the boundary itself is still held."""
    x = seeded((32, WIDE))
    twins = Twins(chain, x, batches=(1, 64))
    runtime = twins.runtime
    step(runtime, x)

    def act() -> Any:
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
        runtime.backward_prefix(boundary, gradients)
        del gradients
        return boundary

    _, after = measured(act)
    assert after <= 32 * WIDE * 4 + 64


def test_each_side_lets_go_of_a_value_at_the_op_that_reads_it_last() -> None:
    """Of a chain of equal sizes, two values are alive at any time, as in the model."""
    x = seeded((32, WIDE))
    model = nn.Sequential(*[nn.Tanh() for _ in range(10)])
    runtime = prepare_split(model, (x,), split="50%")
    one = 32 * WIDE * 4
    with torch.no_grad():
        assert measured(lambda: model(x))[0] == 2 * one
    assert measured(lambda: runtime.run_prefix(x))[0] == 2 * one


def test_nothing_piles_up_over_many_calls() -> None:
    x = seeded((8, WIDE))
    runtime = Twins(chain, x).runtime
    runtime.run_suffix(runtime.run_prefix(x))

    def act() -> None:
        for _ in range(20):
            runtime.run_suffix(runtime.run_prefix(x))

    peak, after = measured(act)
    assert after == 0
    assert peak <= 4 * 8 * WIDE * 4


def test_a_call_that_failed_holds_nothing() -> None:
    x = seeded((8, WIDE))
    runtime = Twins(chain, x).runtime

    def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
        raise KeyError("no loss")

    def act() -> None:
        with pytest.raises(KeyError):
            runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=loss)

    act()
    with Meter() as meter:
        act()
        gc.collect()
        assert meter.now == 0
