"""The fast path of torch's own encoder layers: followed outside of autocast, and told of inside, where recording it would fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.errors import UnsupportedError


def test_an_encoders_fast_path_is_followed_and_told_of_under_autocast() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model, x = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)).eval(), torch.randn(3, 5, 4)
    runtime = prepare_split(model, (x[:2],), split="after:1")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            UnsupportedError, match=r"takes the fast path of nn\.TransformerEncoderLayer in '1' under autocast"
        ):
            runtime.run_prefix(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = prepare_split(model, (x[:2],), split="after:1")
            with torch.no_grad():
                assert torch.equal(slow.run_suffix(slow.run_prefix(x)), model(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
