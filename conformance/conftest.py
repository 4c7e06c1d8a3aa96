"""What every test runs under: one thread, no network, a chosen hypothesis profile, packages that keep to themselves."""

from __future__ import annotations

import os

import conformance.offline  # noqa: F401 - before torch and the model libraries, which read their settings as they are imported

# isort: split
import torch
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

torch.set_num_threads(1)

# A change is judged by the same examples each time it is judged, so smoke draws no new ones; to search is what `nox -s fuzz`
# is for. Chosen here and not left to hypothesis, whose own profiles hang on whether it takes the machine for a CI.
for _name, _examples in {"smoke": 25, "full": 200, "nightly": 5000}.items():
    _new = {"derandomize": False, "database": DirectoryBasedExampleDatabase(".hypothesis/examples")}
    _same = {"derandomize": True, "database": None} if _name == "smoke" else _new
    settings.register_profile(_name, max_examples=_examples, deadline=None, print_blob=True, **_same)
settings.load_profile(os.environ.get("ARIADNE_HYPOTHESIS_PROFILE", "smoke"))
