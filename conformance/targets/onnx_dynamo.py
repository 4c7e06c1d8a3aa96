"""`torch.onnx.export`, run by onnxruntime."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import onnxscript  # noqa: F401  the exporter needs it, and would say so only when it is called
import torch
from torch import nn

from conformance.targets.base import Captured, Target, batched, rows
from conformance.targets.export import EXPORT_DISCLAIMS

TENSORS = torch.utils._pytree.tree_leaves


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """The exporter of today (`dynamo=True`) with a dynamic batch; a session on the CPU with one thread."""
    batch, auto = rows(args, kwargs), torch.export.Dim.AUTO
    names = list(model.forward.__code__.co_varnames[1:])
    shapes = batched({**dict(zip(names, args, strict=False)), **kwargs}, batch, auto)
    program = torch.onnx.export(
        model, tuple(args), kwargs=dict(kwargs), dynamic_shapes=shapes, dynamo=True, verbose=False
    )
    file = io.BytesIO()
    program.save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = [v for v in TENSORS((args, kwargs)) if isinstance(v, torch.Tensor)]
        wanted = [i.name for i in session.get_inputs()]
        if len(given) != len(wanted):
            raise TypeError(f"the ONNX graph has the inputs {wanted}, the call gives {len(given)} tensors")
        feeds = {name: v.detach().numpy() for name, v in zip(wanted, given, strict=True)}
        return [torch.from_numpy(found) for found in session.run(None, feeds)]

    return Captured(call, flat=True)


TARGET = Target(
    name="onnx_dynamo",
    title="torch.onnx.export + onnxruntime",
    kind="capture",
    package="onnxruntime",
    source="https://docs.pytorch.org/docs/stable/onnx_export.html",
    capture=capture,
    disclaims={
        **EXPORT_DISCLAIMS,
        "gradients": "inference only",
        "train": "exported for inference",
        "state": "a graph of outputs; buffers are constants",
        "python-state": "a graph of outputs",
        "buffers": "a graph of outputs; buffers are constants",
        "random": "other generators than torch's",
    },
)
