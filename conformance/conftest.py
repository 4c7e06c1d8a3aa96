"""What every test runs under: one thread, no network, a chosen hypothesis profile, packages that keep to themselves."""

from __future__ import annotations

import os

import conformance.offline  # noqa: F401 - before torch and the model libraries, which read their settings as they are imported

# isort: split
import torch
from hypothesis import settings

torch.set_num_threads(1)

# Under CI, hypothesis would choose a profile that draws the same examples every time and keeps none: choose explicitly.
for _name, _examples in {"smoke": 25, "full": 200, "nightly": 5000}.items():
    settings.register_profile(_name, max_examples=_examples, deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("ARIADNE_HYPOTHESIS_PROFILE", "smoke"))
