"""Clocks and rounds: callables timed side by side in one process, every sample kept."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Run = Callable[[], Any]


class RoundError(RuntimeError):
    """A callable raised in the middle of rounds; `name` says which, and the cause is what it raised."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} raised in the rounds")
        self.name = name


def synchroniser(device: str) -> Callable[[], None]:
    """What waits until a device has done all that was queued; nothing to wait for on the CPU."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def seconds(run: Run, synchronise: Callable[[], None]) -> float:
    """The wall time of one call, with the device idle before it and done after it."""
    synchronise()
    start = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - start


def rounds(runs: Mapping[str, Run], count: int, order: random.Random, device: str = "cpu") -> dict[str, list[float]]:
    """The seconds of each callable in `count` rounds; a round runs each once, in an order of its own.

    The k-th samples of two callables were taken in the same round and make a pair. The garbage collector waits outside.
    Raises `RoundError` from what one of them raises.
    """
    synchronise, names = synchroniser(device), list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            order.shuffle(names)
            for name in names:
                try:
                    times[name].append(seconds(runs[name], synchronise))
                except Exception as error:
                    raise RoundError(name) from error
    finally:
        if enabled:
            gc.enable()
    return times


def calls(run: Run, count: int, device: str = "cpu") -> list[float]:
    """The seconds of `count` calls in a row, the first ones included."""
    synchronise = synchroniser(device)
    return [seconds(run, synchronise) for _ in range(count)]
