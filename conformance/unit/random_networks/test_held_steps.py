"""What the steps of `held_steps`, and the changes between calls, are there for: a bug planted in each mechanism is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ariadne.capture.first
import ariadne.capture.observed
import ariadne.capture.state
import ariadne.capture.ways
import ariadne.guards.baseline
import ariadne.guards.calls
import ariadne.guards.opened
import ariadne.prepare
import ariadne.runtime.plans
from conformance.random_networks import corpus
from conformance.random_networks.compare import Different
from conformance.random_networks.trial import trial

pytestmark = pytest.mark.planted


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something that checks."""


def replaced(owner: Any, name: str, thing: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, thing)


def blind_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ariadne.guards.baseline.Baseline.__init__

    def blind(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.outside = []

    monkeypatch.setattr(ariadne.guards.baseline.Baseline, "__init__", blind)


def blind_to_outsiders(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ariadne.guards.calls.ModuleGuard.__init__

    def blind(self: Any, plan: Any, nodes: range, baseline: Any) -> None:
        begin(self, plan, nodes, baseline)
        self.modules = {path: m for path, m in self.modules.items() if path not in baseline.outsiders}
        self._own = [m.__dict__ for m in self.modules.values()]
        self._arm()

    monkeypatch.setattr(ariadne.guards.calls.ModuleGuard, "__init__", blind)


BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "keywords in any order": ("keywords_in_another_order", replaced(ariadne.capture.ways, "in_order", lambda *_: ())),
    "tensors out there unguarded": ("tensor_outside", blind_outside),
    "a teacher's mode unguarded": ("teacher_outside", blind_to_outsiders),
    "an object out there unguarded": ("object_outside", blind_outside),
    "functions by name unguarded": ("functions_by_name", blind_outside),
    "functions of the class unguarded": (
        "functions_by_name",
        replaced(ariadne.guards.baseline, "of_classes", lambda *_: ()),
    ),
    "what a function had kept unasked": (
        "results_that_a_function_keeps",
        replaced(ariadne.capture.state.Memories, "asked_again", lambda _: []),
    ),
    "second references unseen": (
        "weights_by_reference",
        replaced(ariadne.guards.baseline, "references", lambda *_: []),
    ),
    "what was made of a weight unguarded": (
        "kept_of_a_weight",
        replaced(ariadne.capture.observed, "made_of", lambda *_: {}),
    ),
}


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_is_noticed_by_the_program_for_it(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    for module in (ariadne.prepare, ariadne.runtime.plans):
        monkeypatch.setattr(module, "prove", nothing)
    plant(monkeypatch)
    with pytest.raises(Different, match=r"run|step|after|trace"):
        trial(corpus.load(corpus.FOLDER / f"{name}.json"))
