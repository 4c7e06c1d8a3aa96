"""`torch.export` with `strict=True`: forward's byte code is read by Dynamo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from conformance.targets import export

TARGET = replace(
    export.TARGET,
    name="export_strict",
    title="torch.export, strict",
    capture=partial(export.capture, strict=True),
)
