"""The bench and the matrix: what is asked of the whole model first, cuts by meaning, one state for every case."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import model_zoo
from conformance import checks
from conformance.checks import CHECKS
from conformance.suite import matrix
from conformance.suite.bench import Bench, load
from conformance.suite.cases import BACKENDS, CUTS, MODES, Case
from conformance.suite.cuts import resolve, usable
from conformance.suite.statuses import Status
from conformance.unit.faults import PARAMETERS, Small, after_suffix, entry, run, target
from conformance.unit.trap_kit import Fn

# --- the whole model ----------------------------------------------------------------------------------------------------


def model_of(function: Callable[..., Any]) -> model_zoo.Entry:
    return entry(lambda: Fn(function, linear=nn.Linear(6, 6), table=None, table_for=None))


def test_a_model_that_differs_from_itself_never_passes() -> None:
    counter = itertools.count()
    found = run("forward", made=model_of(lambda self, x: self.linear(x) + next(counter)))
    assert found.status is Status.NONDETERMINISTIC


def test_a_model_that_differs_from_itself_at_one_batch_only_is_not_blamed_on_the_split() -> None:
    counter = itertools.count()

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (next(counter) if x.shape[0] == 5 else 0)

    def prepare(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
        return load("conformance.identity:prepare_split")(model, example_inputs, **options)

    assert run("forward", prepare, model_of(forward), bs=5).status is Status.NONDETERMINISTIC
    assert run("forward", prepare, model_of(forward), bs=3).status is Status.PASS


def test_outputs_and_gradients_that_would_hide_a_fault_are_degenerate() -> None:
    assert run("forward", made=model_of(lambda self, x: self.linear(x) * 0)).status is Status.DEGENERATE
    dead = model_of(lambda self, x: self.linear(x).detach() + x * self.linear.weight.sum() * 0)
    assert run("train", made=dead).status is Status.DEGENERATE


def broken(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this model is broken")


def missing() -> nn.Module:
    raise model_zoo.MissingPackageError("nosuchpackage")


def unbuildable() -> nn.Module:
    raise ValueError("no such configuration")


def too_large(*_: Any) -> nn.Module:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2**60 bytes")


def picky(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        raise RuntimeError("not on such inputs")
    return self.linear(x).relu() + 1


@pytest.mark.parametrize(
    ("made", "status", "words"),
    [
        (model_of(broken), Status.ERROR_EAGER, "RuntimeError: this model is broken"),
        (entry(missing), Status.NOT_INSTALLED, "nosuchpackage"),
        (entry(unbuildable), Status.ERROR_BUILD, "ValueError: no such configuration"),
        (entry(too_large), Status.OOM, "can't allocate memory"),
        (model_of(too_large), Status.OOM, "can't allocate memory"),
    ],
)
def test_what_is_wrong_with_the_model_is_said_of_the_model(made: model_zoo.Entry, status: Status, words: str) -> None:
    found = run("forward", made=made)
    assert found.status is status
    assert words in found.reason


@pytest.mark.parametrize("tag", ["no-input-gradients", "writes-input"])
def test_gradients_of_inputs_are_left_out_only_where_the_entry_says_why(tag: str) -> None:
    found = run("inputs", made=model_of(picky))
    assert found.status is Status.ERROR_EAGER
    assert "on inputs that require gradients: not on such inputs" in found.reason
    made = model_of(picky)
    assert run("inputs", made=dataclasses.replace(made, tags=made.tags | {tag})).status is Status.PASS


def caching(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if self.table_for != x.shape[1]:
        self.table_for, self.table = x.shape[1], torch.arange(float(x.shape[1]))
    return self.linear(x) + self.table


def test_a_cache_may_be_left_as_it_was_but_hold_nothing_else() -> None:
    made = model_of(caching)
    bench = Bench(made)
    assert {name for _, name in bench.caches(False)} == {"table", "table_for"}
    assert run("forward", made=made, mode="eval").status is Status.PASS
    spoiled = after_suffix(lambda m: setattr(m, "table", torch.zeros(6)))
    assert run("forward", target(**spoiled), made, mode="eval").status is Status.FAIL_STATE


@pytest.mark.parametrize(
    "note",
    [
        lambda self, x: setattr(self, "table", x.shape[0]),
        lambda self, x: setattr(self, "table", {"rows": x.shape[0], "shape": (x.shape[0], 6)}),
        lambda self, x: setattr(self, "table", (x.shape[0], "rows")),
    ],
)
def test_what_notes_the_batch_in_plain_numbers_is_no_cache(note: Callable[..., None]) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        note(self, x)
        return self.linear(x).relu() + 1

    made = model_of(forward)
    assert Bench(made).caches(False) == {}
    assert run("forward", made=made, mode="eval").status is Status.PASS
    lost = after_suffix(lambda m: setattr(m, "table", None))
    assert run("forward", target(**lost), made, mode="eval").status is Status.FAIL_STATE


def hooked(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not self.table_for:
        self.table_for = True
        self.linear.register_forward_hook(lambda *_: None)
    return self.linear(x)


def test_hooks_that_a_first_call_installs_are_a_cache_too() -> None:
    assert {name for _, name in Bench(model_of(hooked)).caches(False)} == {
        "table_for",
        "_forward_hooks",
    }


@pytest.mark.parametrize(
    "keep",
    [
        lambda self, x: setattr(self, "last", x.detach() * 2),
        lambda self, x: setattr(self, "calls", getattr(self, "calls", 0) + 1),
    ],
)
def test_what_a_call_leaves_for_others_to_read_is_no_cache(keep: Callable[..., None]) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keep(self, x)
        return self.linear(x)

    assert Bench(model_of(forward)).caches(False) == {}


# --- the bench and the matrix -------------------------------------------------------------------------------------------


def test_cuts_by_meaning() -> None:
    runtime = Bench(entry()).runtime(False)
    safe = [c for c in runtime.candidates if c.safe]
    weights = {meaning: resolve(runtime, meaning).boundary_bytes for meaning in ("narrowest", "widest")}
    assert resolve(runtime, "first") == safe[0]
    assert resolve(runtime, "last") == safe[-1]
    assert weights == {"narrowest": min(c.boundary_bytes for c in safe), "widest": max(c.boundary_bytes for c in safe)}
    assert resolve(runtime, "q75") == "percent:75"
    assert resolve(runtime, "mod:first") == "after:first"
    assert resolve(runtime, "rand:4") == random.Random(4).choice(safe)


def test_a_cut_that_is_to_be_trained_is_the_nearest_that_trains_exactly() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        view = self.linear(x)[:, :2]
        view.relu_()
        return view * 2

    bench = Bench(model_of(forward))
    runtime = bench.runtime(False)
    inexact = [c for c in runtime.candidates if c.inexact]
    assert [c.cut for c in inexact] == [2]
    assert len(runtime.plan.nodes) == 4
    assert bench.split("q50", False).facts["op"] == 2
    assert "trained_elsewhere" not in bench.facts
    assert bench.split("q50", False, trained=True).facts["op"] == 1
    assert bench.facts["trained_elsewhere"] == "q50 is op 2, trained was op 1"
    assert [c.cut for c in usable(runtime, True)] == [1, 3]


def test_an_unsafe_cut_is_unsupported_with_the_reason() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = y[:, :3]
        y.mul_(2)
        return y + z.sum()

    bench = Bench(model_of(forward))
    unsafe = next(c for c in bench.runtime(False).candidates if not c.safe)
    found = checks.finding(_raised(lambda: bench.runtime(False).resplit(unsafe)))
    assert found.status is Status.UNSUPPORTED
    assert found.reason.startswith("FrontierError: cannot split")
    missing = run("forward", cut="mod:nowhere")
    assert missing.status is Status.UNSUPPORTED


def _raised(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as found:
        action()
    return found.value


def test_every_case_starts_from_one_state_whatever_ran_before() -> None:
    bench = Bench(entry())
    train = Case.parse(f"train/tests/small/{PARAMETERS['train']}")
    first = checks.run(train, bench)
    for check in ("forward", "inputs", "guards", "twice"):
        assert checks.run(Case.parse(f"{check}/tests/small/{PARAMETERS[check]}"), bench).status is Status.PASS
    again = checks.run(train, bench)
    assert first.facts["losses"] == again.facts["losses"]
    assert len(set(first.facts["losses"])) == 3


def test_the_whole_model_runs_once_for_all_cuts_in_a_row_and_each_of_them_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, calls = [], itertools.count(1)
    spoiled = after_suffix(lambda m: m.last.bias.data.add_(next(calls) == 3))
    bench = Bench(entry(), target(**spoiled))
    bench.judge(True)
    bench.caches(True)  # both make copies of the model, too
    whole = bench.whole
    monkeypatch.setattr(bench, "whole", lambda training: made.append(training) or whole(training))
    cases = [
        Case.parse(f"forward/tests/small/cut={cut},bs={bs},mode=train,backend=generated")
        for bs in (3, 5)
        for cut in ("q25", "q50", "q75")
    ]
    found = [checks.run(case, bench) for case in cases[:4]]
    assert [f.status for f in found] == [Status.PASS, Status.PASS, Status.FAIL_STATE, Status.PASS]
    assert len({f.facts["op"] for f in found}) == 3
    assert len(made) == 3  # one for each of the two batches, and the model that is split


def test_a_run_leaves_the_generators_of_the_process_alone_and_says_which_case_is_not_the_benchs() -> None:
    bench = Bench(entry())
    state = torch.get_rng_state()
    assert checks.run(Case.parse(f"forward/tests/small/{PARAMETERS['forward']}"), bench).status is Status.PASS
    assert torch.equal(state, torch.get_rng_state())
    other = checks.run(Case.parse(f"forward/tests/other/{PARAMETERS['forward']}"), bench)
    assert other.status is Status.CRASH
    assert "is no case of tests/small" in other.reason


def test_the_matrix_has_the_keys_that_each_check_has_and_all_checks() -> None:
    found = matrix.cases("nn/mlp10x64")
    assert list(found) == sorted(set(found))
    assert {case.check for case in found} == set(CHECKS)
    for case in found:
        assert tuple(key for key, _ in case.parameters) == CHECKS[case.check].keys
    assert {case.get("backend") for case in found} == {*BACKENDS, None}
    assert set(CUTS) <= {case.get("cut") for case in found}
    assert {case.get("mode") for case in found} == {*MODES, None}


@pytest.mark.parametrize("name", ["torchvision/resnet18", "rfdetr/nano"])
def test_every_model_is_cut_at_the_quarters_replayed_and_trained_in_both_modes(name: str) -> None:
    found = {str(case) for case in matrix.cases(name)}
    for cut, mode in itertools.product(("q25", "q50", "q75"), MODES):
        for bs in (1, 2, 3, 8):
            assert f"forward/{name}/cut={cut},bs={bs},mode={mode},backend=generated" in found
        for bs in (2, 3):
            assert f"train/{name}/cut={cut},bs={bs},mode={mode},backend=generated,steps=3" in found


def test_small_is_a_model_that_the_oracle_accepts() -> None:
    assert isinstance(entry().build(), Small)
    Bench(entry()).judge(True, gradients=True)
