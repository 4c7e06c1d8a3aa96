"""What users do to a model over time: a state machine beside an eager twin, all state compared after each rule."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import ariadne.guards.calls
import ariadne.runtime.split
import ariadne.runtime.variant
from conformance.random_networks import corpus, outside
from conformance.random_networks.compare import Different
from conformance.random_networks.draw import programs
from conformance.random_networks.extent import EXTENT, PROFILE
from conformance.random_networks.program import Program
from conformance.random_networks.search import FIRST_FAILURE, QUIET, SMALLEST_FAILURE
from conformance.random_networks.session import ACTIONS, Session
from conformance.random_networks.tally import VARIABLE, Tally
from conformance.random_networks.trial import trial, whole_runs
from conformance.random_networks.twins import Invalid

logging.getLogger("torch.__trace").addFilter(lambda record: False)
NUMBERS = st.integers(0, 30)


def runs(program: Program) -> bool:
    """Whether the whole model can run at all, in both modes."""
    try:
        for training in (False, True):
            whole_runs(program, training)
    except Invalid:
        return False
    return True


class Machine(RuleBasedStateMachine):
    """A session whose program and actions hypothesis chooses."""

    failing: list[Program]
    tally: Tally

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None

    @initialize(
        program=programs(most=EXTENT.session_steps, refusable=False, named=EXTENT.named), training=st.booleans()
    )
    def begin(self, program: Program, training: bool) -> None:
        if not runs(program):  # it was drawn on meta tensors, which autocast leaves as they are
            self.tally.counts["invalid"] += 1
            reject()
        self.session = Session(program)
        if training:
            self.do("flip")
        self.do("trace")

    def do(self, action: str, number: int = 0) -> None:
        try:
            self.session.do(action, number)
        except Exception as error:
            failing = self.session.program.with_script(self.session.script)
            self.failing.append(failing)
            raise Different(f"{error}\n{failing}") from error

    def teardown(self) -> None:
        outside.put_back()
        if self.session and not self.failing:  # what is tried to make a failing session smaller is no search
            self.tally.add(self.session.counts, self.session.program.with_script(self.session.script))

    @rule()
    def trace(self) -> None:
        self.do("trace")

    @rule(number=NUMBERS)
    def split(self, number: int) -> None:
        self.do("split", number)

    @rule(number=NUMBERS)
    def run(self, number: int) -> None:
        self.do("run", number)

    @rule(number=NUMBERS)
    def two_in_flight(self, number: int) -> None:
        self.do("two_in_flight", number)

    @rule(number=NUMBERS)  # the rules that compare most come thrice as often
    def run_again(self, number: int) -> None:
        self.do("run", number)

    @rule(number=NUMBERS)
    def step_again(self, number: int) -> None:
        self.do("step", number)

    @rule(number=NUMBERS)
    def run_once_more(self, number: int) -> None:
        self.do("run", number)

    @rule(number=NUMBERS)
    def step_once_more(self, number: int) -> None:
        self.do("step", number)

    @rule(number=NUMBERS)
    def step(self, number: int) -> None:
        self.do("step", number)

    @rule()
    def flip(self) -> None:
        self.do("flip")

    @rule(number=NUMBERS)
    def load_weights(self, number: int) -> None:
        self.do("load_weights", number)

    @rule(number=NUMBERS)
    def new_batch(self, number: int) -> None:
        self.do("new_batch", number)

    @rule()
    def deep_copy(self) -> None:
        self.do("deep_copy")

    @rule(number=NUMBERS)
    def resplit(self, number: int) -> None:
        self.do("resplit", number)

    @rule(number=NUMBERS)
    def replace_parameter(self, number: int) -> None:
        self.do("replace_parameter", number)

    @rule(number=NUMBERS)
    def freeze(self, number: int) -> None:
        self.do("freeze", number)

    @rule(number=NUMBERS)
    def hook(self, number: int) -> None:
        self.do("hook", number)

    @rule(number=NUMBERS)
    def replace_function(self, number: int) -> None:
        self.do("replace_function", number)

    @rule(number=NUMBERS)
    def flip_switch(self, number: int) -> None:
        self.do("flip_switch", number)

    @rule(number=NUMBERS)
    def set_variable(self, number: int) -> None:
        self.do("set_variable", number)

    @rule(number=NUMBERS)
    def write_hook(self, number: int) -> None:
        self.do("write_hook", number)

    @rule()
    def renew_list(self) -> None:
        self.do("renew_list")

    @rule(number=NUMBERS)
    def set_class_number(self, number: int) -> None:
        self.do("set_class_number", number)

    @rule(number=NUMBERS)
    def under_casts(self, number: int) -> None:
        self.do("under_casts", number)

    @rule(number=NUMBERS)
    def kept_weights(self, number: int) -> None:
        self.do("kept_weights", number)

    @rule(number=NUMBERS)
    def draws_beside(self, number: int) -> None:
        self.do("draws_beside", number)

    @rule(number=NUMBERS)
    def from_files(self, number: int) -> None:
        self.do("from_files", number)

    @rule()
    def turn_keywords(self) -> None:
        self.do("turn_keywords")

    @rule(number=NUMBERS)
    def change_tensor(self, number: int) -> None:
        self.do("change_tensor", number)

    @rule(number=NUMBERS)
    def change_teacher(self, number: int) -> None:
        self.do("change_teacher", number)

    @rule(number=NUMBERS)
    def change_value(self, number: int) -> None:
        self.do("change_value", number)

    @rule(number=NUMBERS)
    def change_beside(self, number: int) -> None:
        self.do("change_beside", number)

    @rule(number=NUMBERS)
    def change_object(self, number: int) -> None:
        self.do("change_object", number)

    @rule(number=NUMBERS)
    def change_kept(self, number: int) -> None:
        self.do("change_kept", number)

    @rule(number=NUMBERS)
    def replace_held_function(self, number: int) -> None:
        self.do("replace_held_function", number)

    @rule(number=NUMBERS)
    def assign_weights(self, number: int) -> None:
        self.do("assign_weights", number)

    @rule(number=NUMBERS)
    def shake_referred(self, number: int) -> None:
        self.do("shake_referred", number)


def explore(chosen: settings, tally: Tally, keep: Path | None) -> Tally:
    """Run the state machine; the smallest failing session is saved in the folder `keep`, if there is one."""
    machine = type("Machine", (Machine,), {"failing": [], "tally": tally})
    chosen = settings(
        chosen, stateful_step_count=EXTENT.actions, suppress_health_check=QUIET, report_multiple_bugs=False
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Exception as error:
        tally.counts["failures"] += 1
        if not machine.failing:
            raise
        path = corpus.save(machine.failing[-1], keep) if keep else None
        raise Different(f"{error}\nreplay: python -m conformance.random_networks {path}") from error
    finally:
        tally.write()
    return tally


def test_a_program_whose_whole_can_not_run_makes_no_session() -> None:
    linear = {"kind": "linear", "args": [4, 4, True]}
    steps = (
        {"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"], "under": "autocast"},
        {"do": "call", "of": ["v0"], "with": {"module": "m1"}, "to": ["v1"]},
    )
    program = Program(
        ({"name": "x", "shape": ["B", 4], "dtype": "float32"},), {"m0": linear, "m1": linear}, steps, "v1"
    )
    assert not runs(program)
    assert runs(replace(program, steps=steps[:1], output="v0"))


def test_every_action_is_a_rule() -> None:
    assert set(ACTIONS) <= set(dir(Machine))


def test_sessions_split_equal_whole() -> None:
    most = 4 if PROFILE == "smoke" else settings().max_examples  # a session takes as long as six programs
    chosen = settings(phases=SMALLEST_FAILURE, max_examples=most)
    counts = explore(chosen, Tally("sessions", PROFILE), corpus.FOLDER).counts
    assert counts["programs"] >= most * 0.8
    assert counts["replays"] + counts["steps"] > counts["programs"], "too little was compared"


SCRIPT = [
    ["trace", 0], ["run", 1], ["step", 1], ["split", 2], ["step", 2], ["load_weights", 3], ["run", 3], ["new_batch", 4],
    ["run", 4], ["step", 4], ["deep_copy", 0], ["resplit", 4], ["step", 5], ["replace_parameter", 1], ["step", 6],
    ["freeze", 0], ["step", 7], ["freeze", 0], ["step", 8], ["flip", 0], ["run", 9], ["trace", 0], ["step", 9], ["run", 6],
    ["hook", 0], ["hook", 1], ["step", 1], ["step", 3],
]  # fmt: skip


LONGER = ("draws", "buffers_of_the_model")


@pytest.mark.parametrize(
    "name", ["batch_norm_state", "reused_modules", *(pytest.param(n, marks=pytest.mark.variants) for n in LONGER)]
)
def test_a_session_that_does_everything(name: str) -> None:
    counts = trial(corpus.load(corpus.FOLDER / f"{name}.json").with_script(SCRIPT))
    assert counts.steps >= 6
    assert counts.replays >= 4
    assert len(counts.refused) <= 1, "only the run between the flip and the next trace may be refused"


def planted(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Put a bug into what follows the model over time; what is found is no result."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if bug == "a guard that never fires":
        monkeypatch.setattr(ariadne.guards.calls.ModuleGuard, "__call__", lambda self: True)
    elif bug == "parameters as they were":
        state = ariadne.segment.codegen._Writer._state

        def baked(self: object, value: object) -> str:
            if value.kind != "parameter":
                return state(self, value)
            held = self.model.get_submodule(value.origin[0])._parameters[value.origin[1]]
            return self.use(held.detach().clone().requires_grad_(held.requires_grad), value.name)

        monkeypatch.setattr(ariadne.segment.codegen._Writer, "_state", baked)
    elif bug == "a deep copy that keeps the old model":
        monkeypatch.setattr(
            ariadne.runtime.split.SplitRuntime,
            "__deepcopy__",
            lambda self, memo: ariadne.runtime.split.SplitRuntime(
                self.model, self.settings, self._plans, self._recapture, self._main.candidate
            ),
        )
    elif bug == "gradients that are kept":
        clear = ariadne.runtime.training.backward_prefix

        def twice(boundary: object, gradients: object, **kwargs: object) -> None:
            doubled = {k: None if g is None else g * 2 for k, g in gradients.items()}
            clear(boundary, doubled, **kwargs)

        monkeypatch.setattr(ariadne.runtime.training, "backward_prefix", twice)


@pytest.mark.planted
@pytest.mark.parametrize(
    "bug",
    [
        "a guard that never fires",
        "parameters as they were",
        "a deep copy that keeps the old model",
        "gradients that are kept",
    ],
)
def test_a_planted_bug_is_found_by_the_state_machine(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, bug)
    few = settings(settings(), max_examples=100, derandomize=True, database=None, phases=FIRST_FAILURE)
    with pytest.raises(Different):
        explore(few, Tally("planted", "few"), None)


def counting() -> Program:
    """A program that counts its calls in place, and reads the count after that."""
    linear = {"kind": "linear", "args": [4, 4, True]}
    steps = tuple(
        {"do": "call", "of": [of], "with": {"module": m}, "to": [to]}
        for of, m, to in (("x", "m0", "v0"), ("v0", "m1", "v1"), ("v1", "m2", "v2"))
    )
    parts = {"m0": linear, "m1": {"kind": "tick", "args": []}, "m2": linear}
    return Program(({"name": "x", "shape": ["B", 4], "dtype": "float32"},), parts, steps, "v2")


def test_two_in_flight_find_the_state_that_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    script = [["trace", 0], *(action for n in range(4) for action in (["split", n], ["two_in_flight", n]))]
    assert trial(counting().with_script(script)).replays == 4
    made = ariadne.runtime.variant.Variant.__init__

    def forgetting(self: object, *args: object) -> None:
        made(self, *args)
        self.kept, self.held = frozenset(), ()

    monkeypatch.setattr(ariadne.runtime.variant.Variant, "__init__", forgetting)
    with pytest.raises(Different, match="two in flight"):
        trial(counting().with_script(script))
