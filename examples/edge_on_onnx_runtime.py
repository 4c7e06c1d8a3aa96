"""An edge on ONNX Runtime and a server on Ariadne: the prefix goes out as an ONNX model, its arrays come back as a boundary.

The edge needs numpy and onnxruntime, and neither torch nor Ariadne; the server needs the suffix's file, and no model code.

    pip install 'ariadne-runtime[export]' onnxruntime
    python examples/edge_on_onnx_runtime.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import ariadne


class Edge:
    """What runs on the edge: an ONNX model, and the words in its metadata that name the boundary."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        told = self.session.get_modelmeta().custom_metadata_map
        self.key = {name: told[f"ariadne.{name}"] for name in ("split_id", "plan_signature", "weights")}

    def run(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The values that cross, by label."""
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, {self.session.get_inputs()[0].name: x}), strict=True))


def main() -> None:
    """Save both halves, export the edge's, and hold the answers against the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runtime = ariadne.prepare_split(model, (torch.randn(2, 3, 32, 32),), split="after:3")
        for side in ("prefix", "suffix"):
            runtime.save(Path(folder) / side, side=side)
        ariadne.load(Path(folder) / "prefix").export(Path(folder) / "edge.onnx")

        edge, server = Edge(Path(folder) / "edge.onnx"), ariadne.load(Path(folder) / "suffix")
        for batch in (1, 2, 7):
            x = torch.randn(batch, 3, 32, 32)
            arrays = edge.run(x.numpy())  # only these cross
            boundary = ariadne.ReplayBoundary.from_tensors(arrays, batch=batch, **edge.key)
            off = (server.run_suffix(boundary) - model(x)).abs().max().item()
            sent = sum(array.nbytes for array in arrays.values())
            print(f"batch {batch}: {sent} bytes cross; at most {off:.1e} off the whole model")
            if off > 1e-4:
                sys.exit("the answers of ONNX Runtime's edge are not near the model's")
    print("an edge on ONNX Runtime and a server on Ariadne give what the model gives")


if __name__ == "__main__":
    main()
