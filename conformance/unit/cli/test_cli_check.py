"""`ariadne.check.model` and `ariadne check`: what passes, what fails, what can't be shown; and that planted bugs are noticed."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, prepare_split
from ariadne.check import CHECKS, SPLIT_CHECKS, CheckResult, check, passed, seed_all
from ariadne.check.observation import first_difference, generators
from ariadne.cli import main
from ariadne.errors import FrontierError, SpecError, VerificationError
from conformance.mutants import MUTANTS


class Busy(nn.Module):
    """Two values across the cut, writes, draws, statistics, a tied and an unused parameter, all in a few ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.mark, self.drop = nn.Identity(), nn.Dropout(0.3)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.first(x))
        b = a * 2
        b = self.mark(b) + 1
        c = torch.relu_(b * 3)
        c = self.drop(c) - a
        return self.last(torch.tanh(c)) + c.square()


@pytest.fixture(scope="module")
def busy() -> tuple[nn.Module, SplitRuntime]:
    torch.manual_seed(0)
    model = Busy().train()
    return model, prepare_split(model, (torch.randn(4, 4),), split="cut:4")


def held_against(
    busy: tuple[nn.Module, SplitRuntime],
    kind: Callable[[SplitRuntime], SplitRuntime],
    cut: str,
    monkeypatch: pytest.MonkeyPatch,
) -> list[CheckResult]:
    """The checks of a model, with a bug planted where it is split."""
    model, plain = busy
    monkeypatch.setattr(
        "ariadne.check.model.prepare_split", lambda *args, split, **given: kind(plain.resplit(split.boundary))
    )
    torch.manual_seed(1)
    x = torch.randn(4, 4, requires_grad=True)
    return check(model, (x,), cuts=(cut,), batches=(3,), steps=3, only=("twice", *SPLIT_CHECKS))


# What the checks must notice, and which of them first.
NOTICED = {
    "swapped_frontier": "forward",
    "lost_op": "forward",
    "stale_parameters": "train",
    "stale_buffers": "forward",
    "other_strides": "forward",
    "other_dtype": "forward",
    "mixed_rows": "forward",
    "reused_memory": "replay",
    "reused_output": "replay",
    "repeated_statistics": "forward",
    "uncounted_batches": "forward",
    "momentum_of_the_others": "forward",
    "repeated_draw": "forward",
    "lost_dropout": "forward",
    "remembered_answer": "forward",
    "written_input": "forward",
    "kept_graph": "forward",
    "one_draw_more": "forward",
    "python_draws": "forward",
    "numpy_draws": "forward",
    "detached_cut": "train",
    "zero_for_none": "train",
    "stepped_twice": "train",
    "forgotten_momentum": "train",
    "scaled_loss": "train",
    "wrong_loss": "train",
    "rounded_gradients": "train",
    "swapped_gradients": "train",
    "shared_gradient_twice": "train",
    "shared_gradient_lost": "train",
    "unwalked_prefix": "train",
    "forgotten_gradients": "train",
    "lost_input_gradient": "train",
}


def test_without_a_bug_all_pass(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = held_against(busy, lambda plain: plain, "cut:4", monkeypatch)
    assert [r.status for r in results] == ["pass"] * 4
    assert passed(results)


@pytest.mark.parametrize("name", NOTICED)
def test_a_planted_bug_is_noticed(name: str, busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = held_against(busy, MUTANTS[name].kind.planted_in, "cut:4", monkeypatch)
    failed = [r for r in results if r.status in ("fail", "refused")]
    assert not passed(results)
    assert failed[0].check == NOTICED[name], failed
    assert failed[0].detail


def test_a_suffix_that_writes_into_its_boundary_is_noticed(busy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = busy[1]
    written = next(c for c in runtime.candidates if c.written)
    results = held_against(busy, MUTANTS["written_payload"].kind.planted_in, written.split_id, monkeypatch)
    assert any(r.check == "replay" and r.status != "pass" for r in results)


class Shapes(nn.Module):
    """Sizes that follow the batch, pieces, keywords, a block without gradients, a buffer replaced, two inputs, a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        batch = x.shape[0]
        x = self.fc(x)
        with torch.no_grad():
            scale = self.fc(y).abs().sum(1, keepdim=True) + 1
            self.seen = self.seen * 0.5 + x.sum()
        left, right = (x / scale).reshape(batch * 2, 4).chunk(2, 1)
        z = torch.cat([left * 2, right], 1).reshape(batch, 8)
        return {"a": torch.sum(y - z, dim=1, dtype=torch.float64), "z": (z + y, z.sum(1))}


@pytest.fixture(scope="module")
def shapes() -> tuple[nn.Module, SplitRuntime, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, given = Shapes(), (torch.randn(4, 8), torch.randn(4, 8))
    return model, prepare_split(model, given, split="cut:1"), given


@pytest.mark.parametrize(
    ("name", "noticed"),
    [
        (None, None),
        ("baked_batch", "forward"),
        ("misfitted_batch", "forward"),
        ("reversed_pieces", "forward"),
        ("lost_keywords", "forward"),
        ("lost_store", "forward"),
        ("lost_region", "train"),
        ("lists_for_tuples", "forward"),
        ("sorted_keys", "forward"),
        ("shared_inputs", "forward"),
    ],
)
def test_a_bug_in_the_plan_is_noticed(
    name: str | None, noticed: str | None, shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain, given = shapes
    runtime = plain if name is None else MUTANTS[name].kind.planted_in(plain)
    monkeypatch.setattr("ariadne.check.model.prepare_split", lambda *args, **given: runtime)
    results = check(model, given, cuts=("q50",), batches=(3, 5), steps=1, only=SPLIT_CHECKS)
    assert passed(results) == (name is None)
    assert next((r.check for r in results if r.status != "pass"), None) == noticed


@pytest.mark.parametrize(
    "name", ["left_gradients", "left_statistics", "left_draws", "left_python_draws", "left_attribute", "left_flag", "left_frozen",
             "left_untied"],
)  # fmt: skip
def test_what_preparing_leaves_behind_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ariadne.check.model.prepare_split", MUTANTS[name].kind.prepare)
    (result,) = check(Busy().train(), (torch.randn(4, 4),), only=("left",))
    assert result.status == "fail"
    assert result.detail.startswith("after preparing, ")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_model_and_generators_are_left_as_found() -> None:
    model = Two()
    model.body.weight.grad = torch.ones(5, 3)
    state, gradient = {k: v.clone() for k, v in model.state_dict().items()}, model.body.weight.grad
    seed_all(3)
    stood, before = generators(), random.getstate()
    results = check(model, (torch.randn(2, 3),), cuts=("every",), batches=(1, 4), steps=1)
    seed_all(3)
    torch.randn(2, 3)
    expected = generators()
    assert passed(results)
    assert {r.check for r in results} == set(CHECKS)
    assert first_difference(state, dict(model.state_dict())) is None
    assert model.body.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(5, 3))
    assert stood["numpy"] == expected["numpy"]
    assert before == random.getstate()


class Drawing(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(numpy.random.default_rng().random())


def test_a_model_that_differs_from_itself_never_passes() -> None:
    (result,) = check(Drawing(), (torch.randn(2, 3),), only=("forward",))
    assert result.status == "nondeterministic"
    assert "two runs of the model itself on the same input and seed differ: output: values differ" in result.detail
    assert not passed([result])


def test_a_split_that_differs_while_it_is_prepared_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **given: Any) -> Any:
        raise VerificationError("at batch 2 the split at cut:1 differs from the model")

    monkeypatch.setattr("ariadne.check.model.prepare_split", wrong)
    results = check(Two(), (torch.randn(2, 3),), only=("forward",))
    assert [(r.check, r.status) for r in results] == [("left", "fail")]


def test_preparing_that_moves_the_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def moving(model: nn.Module, *args: Any, **given: Any) -> Any:
        runtime = prepare_split(model, *args, **given)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        return runtime

    monkeypatch.setattr("ariadne.check.model.prepare_split", moving)
    (result,) = check(Two(), (torch.randn(2, 3),), only=("left",))
    assert result.status == "fail"
    assert result.detail.startswith("after preparing, parameters of 'body.weight': values differ in 15 of 15 elements")


def test_what_the_model_itself_can_not_do_is_skipped_and_shows_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    results = check(model, (torch.randn(2, 3),), cuts=("after:0",), batches=(1,), only=SPLIT_CHECKS)
    assert [r.status for r in results] == ["skipped"] * 3
    assert "Expected more than 1 value per channel" in results[0].detail
    assert not passed(results)


def test_nothing_is_shown_by_answers_that_are_no_numbers_nor_by_a_model_without_parameters() -> None:
    nothing = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(False)
    nothing[2].bias.fill_(float("nan"))
    results = check(nothing, (torch.randn(2, 3),), cuts=("after:0",), batches=(2,), only=SPLIT_CHECKS)
    assert [r.status for r in results] == ["skipped"] * 3
    assert "nothing but nan at batch 2" in results[0].detail
    assert results[2].detail == "the model has no parameter to train"
    assert not passed(results)
    results = check(
        nothing, (torch.randn(2, 3),), cuts=("after:0",), batches=(2,)
    )  # the model is left as found, but that is all
    assert {r.check: r.status for r in results} == {"twice": "pass", "left": "pass"} | dict.fromkeys(
        SPLIT_CHECKS, "skipped"
    )
    assert not passed(results)
    assert passed(check(nothing, (torch.randn(2, 3),), cuts=("after:0",), only=("left",)))
    results = check(
        nothing.requires_grad_(True), (torch.randn(2, 3),), cuts=("after:0",), batches=(2,), only=("train",)
    )
    assert [r.status for r in results] == ["skipped"]
    assert "its loss is nan at step 1" in results[0].detail


def test_a_call_that_the_split_refuses_is_no_pass() -> None:
    results = check(Two(), (torch.randn(2, 3),), batches=(2, 5), only=("forward",), dynamic_batch=(1, 4), cuts=("q50",))
    assert {r.batch: r.status for r in results} == {2: "pass", 5: "refused"}
    assert "batch 5 lies outside dynamic_batch (1, 4)" in next(r.detail for r in results if r.batch == 5)
    assert not passed(results)


def test_arguments_that_can_not_be_meant_are_refused() -> None:
    given = (Two(), (torch.randn(2, 3),))
    with pytest.raises(SpecError, match="no equality of bits"):
        check(*given, mode="compiled")
    with pytest.raises(SpecError, match="there is no check 'all'; there are 'twice', 'left'"):
        check(*given, only=("all",))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="at least one cut, one batch of 0 or more"):
        check(*given, batches=(-1,))
    with pytest.raises(FrontierError, match="there is no 'cut:99'"):
        check(*given, cuts=("cut:99",))


# --- the command ------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

class Drawing(nn.Linear):
    def forward(self, x):
        import numpy
        return super().forward(x) * float(numpy.random.default_rng().random())

def drawing():
    return nn.Sequential(Drawing(3, 5), nn.Linear(5, 2)), (torch.randn(2, 3),)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return "small.py"


def test_the_command_checks_eval_and_training_and_prints_a_table(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:net", "--input", "3", "--cuts", "q50,2", "--batches", "1,3", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert out.startswith("inputs, at batch 2: f32[2, 3]\n\n")
    assert rows[2] == ["check", "mode", "cut", "after", "module", "batch", "1", "batch", "2", "batch", "3"]
    assert ["forward", "eval", "cut:1", "0", "pass", "pass"] in rows
    assert ["train", "train", "cut:2", "1", "pass", "pass"] in rows
    assert out.splitlines()[-1].startswith("small.py:net: 16 pass in ")
    assert out.endswith("the split equals the model, bit for bit\n")
    assert err == ""


def test_when_the_time_is_up_one_of_each_is_checked_and_the_others_are_left_out(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ariadne.cli.check.SECONDS", 1e-9)
    assert main(["check", f"{file}:net", "--input", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ran = {(r["check"], r["batch"]) for r in found["results"] if r["status"] == "pass"}
    assert ran == {
        ("twice", 2),
        ("left", 2),
        ("forward", 3),
        ("replay", 3),
        ("train", 3),
    }  # 3: preparing has not seen it
    assert found["counts"] == {"pass": 7, "left out": 21}
    assert main(["check", f"{file}:net", "--input", "3"]) == 0
    assert "the split equals the model, bit for bit; time was up for what is left out" in capsys.readouterr().out
    assert main(["check", f"{file}:net", "--input", "3", "--cuts", "q50", "--json"]) == 0  # what is named is checked
    assert "left out" not in json.loads(capsys.readouterr().out)["counts"]
    monkeypatch.setattr("ariadne.check.model.prepare_split", MUTANTS["scaled_loss"].kind.prepare)
    assert main(["check", f"{file}:net", "--input", "3"]) == 1


def test_a_failure_is_status_1_and_its_line_repeats_that_one_check(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ariadne.check.model.prepare_split", MUTANTS["scaled_loss"].kind.prepare)
    given = ["check", f"{file}:net", "--input", "3", "--cuts", "q50", "--batches", "3,5", "--steps", "2", "--seed", "4"]
    assert main(given) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "fail: train at cut:1, batch 3: step 1 of 2: gradients of '0.weight': values differ in 15 of 15" in out
    assert out.endswith("split and model differ\n")
    line, _ = (line for line in out.splitlines() if line.startswith("  again: "))
    expected = "ariadne check small.py:net --input 3 --seed 4 --cuts cut:1 --only train --batches 3 --steps 2"
    assert line == f"  again: {expected}"
    assert main([*shlex.split(expected)[1:], "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (result,) = found["results"]
    assert (result["check"], result["status"], result["batch"], result["split_id"]) == ("train", "fail", 3, "cut:1")
    assert result["again"] == expected
    assert not found["passed"]
    monkeypatch.setattr("ariadne.check.model.prepare_split", prepare_split)
    assert main([*shlex.split(expected)[1:], "--json"]) == 0


def test_a_model_that_differs_from_itself_is_said_so(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:drawing"]) == 1
    out = capsys.readouterr().out
    assert (
        "nondeterministic: twice, batch 2: two runs of the model itself on the same input and seed differ: output"
        in out
    )
    assert out.endswith("the model differs from itself, so that nothing can be shown of a split of it\n")


def test_a_model_that_no_plan_can_hold_is_status_3_with_the_librarys_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "toys/python_draw", "--train", "--only", "forward"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ariadne: forward draws from ")
    assert err.count("\n") == 1
