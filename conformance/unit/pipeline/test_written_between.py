"""A backward pass that needs what a later micro-batch's forward has written."""

from __future__ import annotations

import pytest
import torch

from ariadne.errors import PipelineError
from ariadne.pipeline.stage import unwritten


def test_a_buffer_written_before_the_backward_pass_names_the_schedule() -> None:
    n, x = torch.ones(()), torch.ones(2, requires_grad=True)
    out = (x / n).sum()
    n += 1
    with pytest.raises(PipelineError, match=r"such as GPipe .* use 1F1B"), unwritten():
        out.backward()
    with pytest.raises(RuntimeError, match=r"^other$"), unwritten():
        raise RuntimeError("other")
