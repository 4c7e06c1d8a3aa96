"""What a child process does: it opens one model for one target, and runs cases of it."""

from __future__ import annotations

from collections.abc import Callable

# What every first capture imports, which takes seconds: a server that forks for each model does it once for all of them.
import sympy.tensor.tensor  # noqa: F401
import torch
import torch._dynamo
import torch._subclasses.schema_check_mode
import torch.export._trace
import torch.fx.experimental.validator

import ariadne.prepare  # noqa: F401
import model_zoo.catalogue  # noqa: F401
from conformance import checks
from conformance.suite import device
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.environment import full
from conformance.suite.statuses import Finding
from model_zoo.definition import COSTS

torch.set_num_threads(1)


def open_model(model: str, target: str) -> tuple[str, Callable[[Case], Finding]]:
    """The cost tag of a model of the zoo, and what runs a case of it against the target, `package.module:factory`."""
    device.settle()
    bench = Bench(model, full(target))
    (cost,) = bench.entry.tags & COSTS
    bench.whole(training=False)  # build it now, under the limits for that
    return cost, lambda case: checks.run(case, bench)
