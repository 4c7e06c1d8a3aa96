"""`prepare_split` as tests of guards call it: what changed in the model is refused by name, and no plan is captured for it."""

from functools import partial
from typing import Any

import ariadne

prepare_split: Any = partial(ariadne.prepare_split, on_change="refuse")
