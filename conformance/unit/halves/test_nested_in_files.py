"""Nested tensors in halves from files: within one, over the cut, and where they are the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne.errors import AriadneError, BoundaryError
from ariadne.halves.weights import gather

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
X = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]])


class Padded(nn.Module):
    """A layer of an encoder, which torch runs on a nested tensor where rows are padded and nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.embed, self.encode = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.encode(self.embed(tokens), src_key_padding_mask=tokens == 0).mean(1)
        return found


def halves(folder: Path) -> tuple[nn.Module, ariadne.Half, ariadne.Half]:
    model = Padded().eval()
    runtime = ariadne.prepare_split(model, (X[:2],), split="after:encode.layers.0")
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return model, ariadne.load(folder / "prefix"), ariadne.load(folder / "suffix")


def test_they_are_within_a_half_and_cross_the_cut(tmp_path: Path) -> None:
    model, prefix, suffix = halves(tmp_path)
    assert sum(v.is_nested for v in prefix.runtime.plans[0].values.values()) == 2
    for x in (X, X[:2], X[:1]):
        boundary = prefix.run_prefix(x)
        with torch.no_grad():
            assert torch.equal(suffix.run_suffix(ariadne.BoundaryPayload.from_bytes(boundary.to_bytes())), model(x))
    ((label, nested),) = boundary.tensors.items()
    assert nested.is_nested
    dense = ariadne.ReplayBoundary.from_tensors({label: nested.to_padded_tensor(0.0)}, **suffix.boundary_key)
    with pytest.raises(BoundaryError, match="must be a nested tensor"):
        suffix.run_suffix(dense)


def test_the_models_own_are_refused(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.Linear(4, 2)
            self.register_buffer("rates", torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)]))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.leave(x * self.rates.to_padded_tensor(0.0).sum())
            return found

    with pytest.raises(AriadneError, match="nested tensor"):
        ariadne.prepare_split(Own().eval(), (torch.ones(2, 4),), split="50%").save(tmp_path / "half", side="prefix")
    with pytest.raises(AriadneError, match="'rates' is a Tensor"):
        gather({"rates": Own().rates})
