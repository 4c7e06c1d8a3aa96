"""What the steps of `python_steps`, and what sessions do with them, are there for: a bug planted in each mechanism is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ariadne.boundary
import ariadne.capture.applied
import ariadne.capture.call
import ariadne.capture.refusals
import ariadne.capture.state
import ariadne.capture.ways
import ariadne.guards.baseline
import ariadne.guards.calls
import ariadne.guards.roots
import ariadne.guards.switches
import ariadne.halves.reading
import ariadne.prepare
import ariadne.runtime.asked
import ariadne.runtime.plans
import ariadne.tree
from conformance.mutants.unseen import BlindToLeaks, BlindToZero
from conformance.random_networks import corpus
from conformance.random_networks.compare import Different
from conformance.random_networks.trial import trial

pytestmark = [
    pytest.mark.planted,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something that checks."""


def blind_to_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ariadne.guards.calls.ModuleGuard.__init__

    def blind(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._hookless = []

    monkeypatch.setattr(ariadne.guards.calls.ModuleGuard, "__init__", blind)


def called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ariadne.capture.call.Call.__call__
    monkeypatch.setattr(
        ariadne.capture.call.Call, "__call__", lambda self, *given: (call(self, *given), call(self, *given))[1]
    )


def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.runtime.asked.KeptWhole, "__enter__", nothing)
    monkeypatch.setattr(ariadne.runtime.asked.KeptWhole, "__exit__", nothing)


def as_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    root = ariadne.guards.roots.Root
    monkeypatch.setattr(
        ariadne.guards.roots, "_of_class", lambda cls, name, thing: root(f"{cls.__name__}.{name}", thing)
    )


def in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.prepare, "batch_dims", lambda *_: {})


def rewound(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = ariadne.capture.state.Snapshot.restore
    monkeypatch.setattr(ariadne.capture.state.Snapshot, "restore", lambda self, drew=(): restore(self))


def unseen_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, thing in BlindToLeaks.replaced:
        monkeypatch.setattr(owner, name, thing)


def kept_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ariadne.capture.refusals, "caches_parametrizations", lambda: False)
    monkeypatch.setitem(ariadne.guards.switches.SWITCHES, "torch.nn.utils.parametrize.cached()", lambda: False)


def undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, thing in BlindToZero.replaced:
        monkeypatch.setattr(owner, name, thing)


BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a list of a class as it was at capture": ("class_attributes", as_at_capture),
    "numbers of a class unguarded": (
        "class_attributes",
        lambda m: m.setattr(ariadne.guards.baseline, "of_classes", lambda *_: ()),
    ),
    "a checkpoint taken apart": (
        "checkpoints_that_write",
        lambda m: m.setattr(ariadne.capture.applied, "patch", nothing),
    ),
    "gradients behind the boundary unasked": ("gradients_that_a_loss_asks_for", unasked),
    "hooks in tables unseen": ("hooks_in_tables", blind_to_tables),
    "the batch always in front": ("time_first", in_front),
    "an opaque part called twice": ("opaque_parts", called_twice),
    "another autocast for the suffix": (
        "around_a_call",
        lambda m: m.setattr(ariadne.boundary.BoundaryPayload, "refuse_another_autocast", nothing),
    ),
    "another thread's draws twice": ("around_a_call", rewound),
    "classes of tensors unseen": ("classes_of_tensors", lambda m: m.setattr(ariadne.tree, "subclass_of", nothing)),
    "data that left torch frozen": ("data_that_leave_torch", unseen_leaks),
    "divisions by zero unasked": ("divided_by_zero", undivided),
    "weights that are kept unasked": ("around_a_call", kept_unasked),
    "what is handed over runs on its own tensors": (
        "handed_parts",
        lambda m: m.setattr(ariadne.halves.reading, "tie", nothing),
    ),
}


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_is_noticed_by_the_program_for_it(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    for module in (ariadne.prepare, ariadne.runtime.plans):
        monkeypatch.setattr(module, "prove", nothing)
    plant(monkeypatch)
    with pytest.raises(Different, match=r"batch|step|trace|run|after|train|eval|ran|again|call|files"):
        trial(corpus.load(corpus.FOLDER / f"{name}.json"))
