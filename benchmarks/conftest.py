"""What a file of pytest-benchmark says of its machine: the facts that our own samples are filed under, and no machine's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.environment import here


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """The environment, without a date, so that files of one machine can be compared."""
    found = here("cpu", {"threads": torch.get_num_threads()})
    return {"environment": found.id, "facts": dict(sorted(found.facts.items()))}
