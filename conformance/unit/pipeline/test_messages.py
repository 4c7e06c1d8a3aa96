"""What a message between ranks carries beside the values: the autocast that the rank before ran under."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError
from ariadne.pipeline.message import Room, packed
from ariadne.pipeline.stage import Given, Stage, _told
from conformance.unit.pipeline.nets import CASES
from conformance.unit.pipeline.ranks import made

Setting = Callable[[], AbstractContextManager[Any]]
lowered: Setting = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def received(pipeline: Any, boundary: BoundaryPayload) -> BoundaryPayload:
    """A boundary as the rank after it reads it out of the bytes that it was sent."""
    header, memory = packed(_told(Given(boundary)))
    room = Room(header, torch.device("cpu"))
    for into, sent in zip(room.memory, memory, strict=True):
        into.copy_(sent)
    found: BoundaryPayload = Stage._read(SimpleNamespace(pipeline=pipeline), room.message())[0]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("there", [nullcontext, lowered])
@pytest.mark.parametrize("here", [nullcontext, lowered])
def test_ranks_run_under_one_autocast_or_say_so(there: Setting, here: Setting) -> None:
    _, pipeline = made("images", 2)
    inputs = CASES["images"].inputs(4, torch.Generator().manual_seed(3))
    for trains in (False, True):
        with there():
            sent = pipeline.parts[0].fly(inputs, {}, trains).gives
        with here():
            boundary = received(pipeline, sent)
            if there is here:
                assert pipeline.parts[1].fly((boundary,), {}, trains).output is not None
                continue
            with pytest.raises(
                BoundaryError, match=r"the prefix ran (outside of|under) autocast.* is called (under|outs)"
            ):
                pipeline.parts[1].fly((boundary,), {}, trains)
