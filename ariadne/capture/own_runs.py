"""Runs of Ariadne's own: the model is left as found, and hooks of the caller's don't hear of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ariadne.capture import generators
from ariadne.capture.state import Snapshot
from ariadne.guards import calls_of, not_called
from ariadne.plan import TracePlan

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Within the block this thread has no hooks on saved tensors but those that are entered in it.

    The caller's count, write files or draw random numbers, and a part of the caller's under `torch.utils.checkpoint` counts the
    tensors that its ops save. A run that the whole model does not make is none of theirs.
    """
    hidden = []
    while (hooks := _top_hooks(True)) is not None:
        hidden.append(hooks)
        _pop_hooks()
    try:
        yield
    finally:
        for hooks in reversed(hidden):
            _push_hooks(*hooks)


@contextmanager
def left_as_found(
    model: nn.Module,
    plans: Iterable[TracePlan] = (),
    *,
    buffers: bool = False,
    drew: generators.Names = generators.ALL,
    others: Iterable[Any] = (),
) -> Iterator[None]:
    """Put back after a block whatever the model's forward, or a run of these plans, moves in it.

    With `buffers` the data of all buffers too, whatever moves them, and what `others` hold, such as inputs. The random generators
    stay where they are unless it `drew` from them. It runs without the caller's hooks on saved tensors.
    """
    snapshot, known = Snapshot(model, others), calls_of(model)
    snapshot.save_outside()  # where a backward pass counts, for one
    if buffers:
        snapshot.save_buffers()
    for plan in plans:
        snapshot.save_written(plan)
    try:
        with without_saving_hooks():
            yield
    finally:
        snapshot.restore(drew)
        not_called(model, known)
