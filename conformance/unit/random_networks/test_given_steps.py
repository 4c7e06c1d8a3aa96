"""For each kind of silently wrong answer that was found once: a program whose steps meet it, which equals the whole, and is seen to
differ where the bug is planted again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ariadne.capture.lower
import ariadne.capture.refusals
import ariadne.capture.ways
import ariadne.guards.baseline
import ariadne.guards.given
import ariadne.prepare
import ariadne.runtime.plans
import ariadne.runtime.training
from conformance.mutants import MUTANTS
from conformance.random_networks.compare import Different
from conformance.random_networks.program import Program
from conformance.random_networks.trial import trial
from conformance.random_networks.twins import Twins

pytestmark = [
    pytest.mark.planted,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]

Plant = Callable[[pytest.MonkeyPatch], None]
ONE = [{"name": "x", "shape": ["B", 4]}]
SEQUENCE = [{"name": "x", "shape": ["B", 3, 4]}]
RUNS = [["trace", 0], ["run", 1], ["run", 2], ["run", 3], ["new_batch", 5], ["run", 1], ["new_batch", 2], ["run", 4]]
LONGER = [*RUNS, ["new_batch", 0], *(["run", n] for n in range(5, 13))]
LINEAR = {"kind": "linear", "args": [4, 4, True]}


def nothing(*_: Any, **__: Any) -> None:
    """In the place of something that checks."""


def between(*steps: tuple[Any, ...], script: Any = RUNS, of: Any = ONE, **more: Any) -> Program:
    """A program of these steps in turn, each a name and settings, between two layers; `part:lstm` calls a part of that kind."""
    parts: dict[str, Any] = {"m0": LINEAR, "m1": LINEAR}
    made: list[dict[str, Any]] = [{"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"]}]
    for k, (name, *settings) in enumerate(steps):
        said = settings[0] if settings else {}
        if name.startswith("part:"):
            parts[f"p{k}"], said, name = {"kind": name[5:], "args": said["args"]}, {"module": f"p{k}"}, "call"
        made.append({"do": name, "of": [f"v{k}"], "to": [f"v{k + 1}"], **({"with": said} if said else {})})
    last = f"v{len(steps)}"
    made.append({"do": "call", "of": [last], "with": {"module": "m1"}, "to": ["out"]})
    return Program.parse(
        json.dumps({"inputs": of, "parts": parts, "steps": made, "output": "out", "script": script, **more})
    )


def lookup(kind: str) -> Program:
    """A program that begins by looking rows up."""
    parts = {"m0": {"kind": kind, "args": [3, 4]}, "m1": LINEAR}
    steps = [
        {"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"]},
        {"do": "call", "of": ["v0"], "with": {"module": "m1"}, "to": ["v1"]},
    ]
    inputs = [{"name": "x", "shape": ["B", 4], "dtype": "int64"}]
    script = [["flip", 0], ["trace", 0], ["step", 2], ["step", 1]]
    return Program(inputs, parts, steps, "v1", script=script)


def mutant(name: str) -> Plant:
    """A bug of the suite's selftest."""
    return lambda m: m.setattr(Twins.trace, "__defaults__", (MUTANTS[name].kind.prepare,))


def replaced(owner: Any, name: str, thing: Any) -> Plant:
    return lambda m: m.setattr(owner, name, thing)


def by_the_tag(self: Any, op: Any, args: Any, outs: Any) -> Any:
    """Sizes follow data where torch's tag says so, and nowhere else."""
    follows = torch.Tag.dynamic_output_shape in op.tags
    return [(follows,) * (t.dim() if isinstance(t, torch.Tensor) else 0) for t in outs]


TRAIN_SUFFIX, LEAKS = ariadne.runtime.training.train_suffix, ariadne.capture.ways.refuse_leaks
CONSTANTS = ariadne.capture.ways.refuse_unlike_constants


def at_once(give: Callable[[Any, Any], None]) -> Plant:
    """What the suffix's backward pass has for the prefix's parameters goes to them before the prefix's own."""

    def train_suffix(suffix: Any, boundary: Any, *args: Any, **kwargs: Any) -> Any:
        found = TRAIN_SUFFIX(suffix, boundary, *args, **kwargs)
        for p, g in boundary._shared:
            if isinstance(p, torch.Tensor):
                give(p, g)
        boundary._shared = []
        return found

    return lambda m: m.setattr(ariadne.runtime.training, "train_suffix", train_suffix)


def put(p: Any, g: Any) -> None:
    p.grad = g if p.grad is None else p.grad + g


def accumulated(p: Any, g: Any) -> None:
    p.backward(g)  # which its hooks see


def unless_witnessed(m: pytest.MonkeyPatch) -> None:
    """Plans with a witness are not asked whether data left torch."""

    def asks(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda plan, seen: None if any(n.is_witness for n in plan.nodes) else check(plan, seen)

    m.setattr(ariadne.capture.ways, "refuse_leaks", asks(LEAKS))
    m.setattr(ariadne.capture.ways, "refuse_unlike_constants", asks(CONSTANTS))


def blind_outside(m: pytest.MonkeyPatch) -> None:
    begin = ariadne.guards.baseline.Baseline.__init__

    def blind(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.outside = []

    m.setattr(ariadne.guards.baseline.Baseline, "__init__", blind)


def blind_to_given(m: pytest.MonkeyPatch) -> None:
    m.setattr(ariadne.guards.given.Given, "same", lambda *_: True)


def blind_to_literals(m: pytest.MonkeyPatch) -> None:
    """Any number among the inputs is the one of the example; those in a namespace are such, too."""

    class Alike:
        identical = staticmethod(lambda *_: True)

        def __getattr__(self, name: str) -> Any:
            return getattr(ariadne.tree, name)

    m.setattr(ariadne.guards.calls, "tree", Alike())


def unfound_parts(m: pytest.MonkeyPatch) -> None:
    """Parts in no registry are looked for by name, where torch has none."""
    begin = ariadne.guards.baseline.Baseline.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.strays = {}

    m.setattr(ariadne.guards.baseline.Baseline, "__init__", without)


def ask_nested(m: pytest.MonkeyPatch) -> None:
    """Nested tensors are asked for their sizes, as any other, which torch has no answer to."""
    look = ariadne.capture.lower.Lowering._data_dependent_sizes
    m.setattr(
        ariadne.capture.lower.Lowering,
        "_data_dependent_sizes",
        lambda self, node, name, out, follows: (out.shape, look(self, node, name, out, follows))[1],
    )


TIED = Program(
    ONE,
    {"m0": LINEAR, "m1": LINEAR, "m2": LINEAR | {"tied": "m0"}},
    [
        {"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"]},
        {"do": "tanh", "of": ["v0"], "to": ["v1"]},
        {"do": "call", "of": ["v1"], "with": {"module": "m1"}, "to": ["v2"]},
        {"do": "call", "of": ["v2"], "with": {"module": "m2"}, "to": ["v3"]},
    ],
    "v3",
    script=[
        ["flip", 0],
        ["trace", 0],
        ["step", 3],
        ["step", 9],
        *(["hook", n] for n in range(6)),
        ["step", 1],
        ["step", 2],
    ],
)
KEPT = {
    name: between(
        ("by_kept_value", {"asked": name}),
        script=[["trace", 0], ["run", 1], ["change_value", at], ["run", 1]],
    )
    for name, at in (("default", 3), ("cell", 4), ("iterated", 5))
}
BESIDE = {
    asked: between(
        ("by_beside", {"asked": asked}),
        script=[["trace", 0], ["run", 1], ["change_beside", at], ["run", 1]],
    )
    for asked, at in (("array", 0), ("object", 1), ("inner", 2))
}
AS_TAGGED = replaced(ariadne.capture.lower.Foresight, "follows_data", by_the_tag)

# By what is drawn: a program with the step, and the bug.
BUGS: dict[str, tuple[Program, Plant]] = {
    "1: count_nms, as torch's tag has it": (between(("by_table",), ("count_nms",)), AS_TAGGED),
    **{
        f"1: {step}, known": (between(("by_table",), (step,), script=LONGER), mutant("known_size"))
        for step in ("count_kept", "count_nonzero", "count_unique", "count_nms", "count_repeats")
    },
    "1: packed, known": (
        between(("packed", {"total": False, "sort": False}), of=SEQUENCE, batch=1),
        mutant("known_size"),
    ),
    "1: packed, as torch's tag has it": (
        between(("packed", {"total": False, "sort": False}), of=SEQUENCE, batch=1),
        AS_TAGGED,
    ),
    "2: a penalty that is there at once": (TIED.with_script(TIED.script[:4]), at_once(put)),
    "2: hooks that see shares": (TIED.with_script([*TIED.script[:2], *TIED.script[4:]]), at_once(accumulated)),
    "3: scripted": (
        between(("scripted_swish",), script=[["flip", 0], ["trace", 0], ["step", 0], ["step", 2]]),
        mutant("detached_script"),
    ),
    **{
        f"4: {how} at a later batch, unheld": (between(("unseen_later", {"how": how})), nothing)
        for how in ("apply", "map", "seeded")
    },
    **{
        f"5: {how} into a {call} that is handed in": (
            between(("hand_on", {"how": how}), call=call, script=RUNS[:2]),
            mutant("lost_put"),
        )
        for call, how in (("list", "put"), ("list", "more"), ("dict", "put"), ("dict", "more"))
    },
    "5: out of a dict that is handed in": (
        between(("hand_on", {"how": "out"}), call="dict", script=RUNS[:2]),
        mutant("lost_put"),
    ),
    "5: a hook that records": (between(("part:recorded", {"args": [4]}), script=RUNS[:2]), mutant("lost_put")),
    "5: a list of the model": (between(("append",), script=RUNS[:2]), mutant("lost_put")),
    **{f"6: {step}": (between((step,)), mutant("unseen_read")) for step in ("by_table", "by_float", "by_bytes")},
    "6: by_text": (between(("by_text",)), mutant("unseen_text")),
    **{
        f"7: by {how}": (
            between(("by_shape_table", {"how": how}), script=[]),
            replaced(ariadne.capture.ways, "filled_again", lambda *_: []),
        )
        for how in ("dict", "attribute")
    },
    "8: a thread beside a witness": (between(("if_positive",), ("left_torch", {"by": "thread"})), unless_witnessed),
    "9: text": (between(("left_torch", {"by": "text"}), script=LONGER), mutant("lost_witness")),
    **{
        f"10: {asked} among the inputs": (program, blind_to_given if asked == "array" else blind_to_literals)
        for asked, program in BESIDE.items()
    },
    "11: functions by name": (
        between(("by_function",), script=[["trace", 0], ["run", 1], ["replace_function", 1], ["run", 1]]),
        blind_outside,  # in plans of later batches, too
    ),
    **{f"12: a {name}": (program, blind_outside) for name, program in KEPT.items()},
    "12: a switch": (
        between(("by_setting",), script=[["trace", 0], ["run", 1], ["flip_switch", 1], ["run", 1]]),
        mutant("blind_to_switches"),
    ),
    "13: classes of tensors": (between(("marked",), script=RUNS[:2]), mutant("plain_outputs")),
    "a functional if, by Dynamo": (
        between(("functional_if",), script=[]),
        replaced(ariadne.capture.refusals, "_follow_cond", nothing),
    ),
    "nested tensors, asked for sizes": (between(("part:encoder", {"args": [4]}), of=SEQUENCE, script=[]), ask_nested),
    "parts in no registry, by name": (between(("part:listed", {"args": [4]}), script=[]), unfound_parts),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BUGS))
def test_without_a_bug_the_program_equals_the_whole(name: str) -> None:
    counts = trial(BUGS[name][0])
    assert counts.replays or counts.steps or counts.refused or counts.limited, counts


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_noticed_by_the_program_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plant = BUGS[name]
    for module in (ariadne.prepare, ariadne.runtime.plans):
        monkeypatch.setattr(module, "prove", nothing)
    plant(monkeypatch)
    with pytest.raises(Different, match=r"batch|step|trace|run|after|train|eval|ran|again|call"):
        trial(program)


def test_sparse_gradients_are_trained() -> None:
    assert trial(lookup("sparse")).steps == 2
