"""What every test runs under: one thread, no network, a chosen hypothesis profile, packages that keep to themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import conformance.suite.offline  # noqa: F401 - before torch and the model libraries, which read their settings as they are imported

# isort: split
import pytest
import torch
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance.random_networks.extent import PROFILE
from conformance.unit.thinned_kit import off_the_diagonal

torch.set_num_threads(1)

# A change is judged by the same examples each time it is judged, so smoke draws no new ones; to search is what `nox -s fuzz`
# is for. Chosen here and not left to hypothesis, whose own profiles hang on whether it takes the machine for a CI.
for _name, _examples in {"smoke": 10, "full": 200, "wide": 1000, "nightly": 5000}.items():
    _new = {"derandomize": False, "database": DirectoryBasedExampleDatabase(".hypothesis/examples")}
    _same = {"derandomize": True, "database": None} if _name == "smoke" else _new
    settings.register_profile(_name, max_examples=_examples, deadline=None, print_blob=True, **_same)
settings.load_profile(PROFILE)

SPELLINGS = 1  # of what says one thing of many
CASES = 1  # of any other test of a room whose products are thinned
OF_MANY = (  # files whose tests say one thing of many models, changes or planted faults; all of `traps` do
    "test_buckets",
    "test_captured_for_a_call",
    "test_changed_models",
    "test_checks",
    "test_cli_check",
    "test_compiled",
    "test_data_taken_out",
    "test_drawings",
    "test_export",
    "test_facts",
    "test_followed_containers",
    "test_held_objects",
    "test_hidden_paths",
    "test_ids_of_sizes",
    "test_kept_between_calls",
    "test_learnt",
    "test_penalties",
    "test_raw_errors",
    "test_remote_training",
    "test_scoreboard",
    "test_scripted",
    "test_served_models",
    "test_shapes",
    "test_sizes_by_data",
    "test_sizes_of_state",
    "test_sizes_unseen",
    "test_stale_views",
    "test_surroundings",
    "test_torchrun",
    "test_training_flags",
    "test_views_and_writes",
    "test_visualization",
    "test_watched",
)


CROSSED = {
    "capture",
    "cli",
    "compiled",
    "cut",
    "guards",
    "halves",
    "pipeline",
    "remote",
    "runtime",
    "scoreboard",
    "stopped",
    "suite",
    "visualization",
}  # rooms whose products are thinned


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What CI has no time for are `variants`: spellings beyond the first ones, and most cases of a product of parameters.

    Tests of the zoo's libraries come last: with the thousands of classes that they import, each later prepare takes longer.
    """
    items.sort(key=lambda item: item.get_closest_marker("zoo") is not None)
    met: dict[tuple[Path, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            met.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for (path, _), cases in met.items():
        left_out: list[Any] = []
        if path.parent.name == "traps" or path.name.startswith(OF_MANY):
            left_out = cases[SPELLINGS:]
        elif path.parent.name in CROSSED:
            counted = [case for case in cases if case.get_closest_marker("variants") is None]
            left_out = off_the_diagonal(counted, [case.callspec.params for case in counted])
            left_out += [case for case in counted if case not in left_out][CASES:]
        for case in left_out:
            case.add_marker("variants")
