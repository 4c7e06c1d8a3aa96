"""The scoreboard: liars are noticed, nothing is counted that is not promised, a file is a target, a run resumes."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import model_zoo
from conformance import targets, wild
from conformance.scoreboard import again, chosen, page, runner, table
from conformance.scoreboard.asking import NOT_ASKED, REFUSED, RIGHT, ROUNDED, TIMEOUT, WARNED, WRONG, Pair, said
from conformance.scoreboard.programs import QUICK, program
from conformance.scoreboard.questions import QUESTIONS, script
from conformance.scoreboard.records import Record, Results, excuse
from conformance.targets.base import Captured, Target
from conformance.wild import making
from model_zoo import MissingPackageError

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED = ROOT / "reports/published-scoreboard"
Capture = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Captured]


def made(capture: Capture, tolerance: float = 0.0, **disclaims: str) -> Target:
    return Target("planted", "Planted", "capture", "torch", "this test", capture, disclaims, tolerance)


def answered(target: Target | str, name: str, key: str) -> str:
    question = QUESTIONS[key]
    return Pair(target, name, question.training).answer(question).outcome


def as_is(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    return Captured(model)


def stale(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    with torch.no_grad():
        kept = model(*args, **kwargs)
    return Captured(lambda *a, **k: kept)


def mutating(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    return Captured(model)


def drawing(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    torch.rand(1)
    return Captured(model)


def copied(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    return Captured(copy.deepcopy(model))


def half_trained(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    def step(loss: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        loss(model(*args, **kwargs)).backward()
        next(model.parameters()).grad = None

    return Captured(model, step=step)


def failing(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    raise RuntimeError("not this model")


def off_by_rounding(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    return Captured(lambda *a, **k: model(*a, **k) * (1 + 1e-6))


@pytest.mark.parametrize(
    "name", ["one/plain", "one/batchnorm", "one/averages", "one/counts", "one/draws", "one/keyword"]
)
@pytest.mark.parametrize("key", QUESTIONS)
def test_the_model_itself_as_a_target_answers_rightly(name: str, key: str) -> None:
    assert answered(made(as_is), name, key) == RIGHT


@pytest.mark.parametrize(
    ("liar", "key"),
    [
        (stale, "same"),
        (stale, "batches"),
        (mutating, "left"),
        (drawing, "left"),
        (copied, "loaded"),
        (copied, "hook"),
        (half_trained, "gradients"),
    ],
)
def test_a_target_that_lies_is_noticed(liar: Capture, key: str) -> None:
    assert answered(made(liar), "one/plain", key) == WRONG


def test_a_copy_that_keeps_its_statistics_to_itself_is_noticed() -> None:
    assert answered(made(copied), "one/batchnorm", "state") == WRONG


def test_an_error_is_a_refusal_with_its_words() -> None:
    found = Pair(made(failing), "one/plain").answer(QUESTIONS["same"])
    assert (found.outcome, found.words) == (REFUSED, "at capture: RuntimeError: not this model")


def test_rounding_is_told_from_right_and_counts_as_wrong_where_bits_are_promised() -> None:
    assert answered(made(off_by_rounding, 1e-4), "one/plain", "same") == ROUNDED
    assert answered(made(off_by_rounding), "one/plain", "same") == WRONG


def test_a_warning_is_a_word() -> None:
    assert answered("jit_trace", "one/branch_on_data", "same") == WARNED


def test_what_is_disclaimed_is_shown_and_not_counted() -> None:
    target = made(stale, **{"branch-on-data": "a trace", "hook": "a snapshot"})
    data = program("one/branch_on_data").difficulties
    assert excuse(target.disclaims, data, "same") == "branch-on-data: a trace"
    assert excuse(target.disclaims, (), "hook") == "hook: a snapshot"
    assert not excuse(target.disclaims, ("plain",), "same")
    cell = table.Cell((Record("t", "one/plain", "hook", WRONG, excused="hook: a snapshot"),))
    assert (cell.tone, cell.text) == ("quiet", "[1 differ]")
    assert table.Cell((Record("t", "one/plain", "same", WRONG),)).text == "1 WRONG"


def test_a_disclaimer_may_be_for_a_question_about_a_difficulty_only() -> None:
    disclaims = {"state/cache": "left empty"}
    assert excuse(disclaims, ("cache",), "state") == "state/cache: left empty"
    assert not excuse(disclaims, ("cache",), "same")
    assert not excuse(disclaims, ("plain",), "state")


@pytest.mark.parametrize("key", ["same", "state", "left"])
@pytest.mark.parametrize("name", ["toys/scale_on_a_parameter", "toys/weight_norm", "toys/forward_hook"])
def test_a_twin_holds_what_no_copy_would(name: str, key: str) -> None:
    assert answered(made(as_is), name, key) == RIGHT


def unhooking(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    for module in model.modules():
        module._forward_hooks.clear()
    return Captured(model)


def test_a_target_that_takes_hooks_away_is_noticed() -> None:
    assert answered(made(unhooking), "toys/forward_hook", "left") == WRONG


def test_a_plain_tuple_may_stand_for_a_named_one_and_its_values_count() -> None:
    def tupled(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        return Captured(lambda *a, **k: tuple(model(*a, **k)))

    def swapped(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        return Captured(lambda *a, **k: tuple(model(*a, **k))[::-1])

    assert answered(made(tupled), "toys/namedtuple_out", "same") == RIGHT
    assert answered(made(swapped), "toys/namedtuple_out", "same") == WRONG


def test_the_time_of_a_capture_has_its_first_call_in_it_and_memory_is_measured() -> None:
    def lazily(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        waits = iter([0.2])

        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(next(waits, 0.0))
            return torch.cat([model(*args, **kwargs), torch.zeros(100_000, 4)])[: len(args[0])]

        return Captured(call)

    pair = Pair(made(lazily), "one/plain")
    assert pair.answer(QUESTIONS["captures"]).outcome == RIGHT
    figures = pair.timed()
    assert figures["capture_s"] >= 0.2
    assert figures["peak_over_eager"] > 1000


TARGET = """
import os, time
from conformance.targets.base import Captured, Target

def capture(model, args, kwargs):
    {does}
    return Captured(model)

TARGET = Target("always", "The model itself", "capture", "torch", "a test", capture, tolerance=0.0)
"""


def test_a_file_is_a_target_and_a_run_resumes_where_it_was_cut_short(tmp_path: Path) -> None:
    file, answers = tmp_path / "always.py", tmp_path / "answers.jsonl"
    file.write_text(TARGET.format(does="pass"))
    made = runner.introduced(str(file), Results(answers))
    assert made is not None
    runner.ask(made, "one/plain", Results(answers), 60)
    assert {r.outcome for r in Results(answers).records().values()} == {RIGHT, runner.MEASURED}
    assert [key for _, _, key in Results(answers).records()] == runner.expected("one/plain")
    whole = answers.read_text()
    last = whole.splitlines(keepends=True)[-1]
    answers.write_text(whole[: -len(last) // 2])  # the process ended as it wrote the last line
    runner.ask(made, "one/plain", Results(answers), 60, set(Results(answers).records()))
    assert [key for _, _, key in Results(answers).records()] == runner.expected("one/plain")
    assert answers.read_text().count('"question": "same", "outcome"') == 1


@pytest.mark.variants
def test_targets_take_turns_and_a_process_that_dies_costs_only_its_own_case(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    for name, does in (("always", "pass"), ("dying", "type(model).__name__ != 'Skip' or os._exit(7)")):
        (tmp_path / f"{name}.py").write_text(TARGET.format(does=does).replace("always", name))
    files = [str(tmp_path / f"{name}.py") for name in ("always", "dying")]
    runner.run(files, ["one/skip", "one/keyword"], answers, limit=60)
    found = Results(answers).records()
    asked = [(program, target) for target, program, _ in found]
    programs = ("one/skip", "one/keyword")
    assert list(dict.fromkeys(asked)) == [(program, name) for program in programs for name in ("always", "dying")]
    died = found["dying", "one/skip", "captures"]
    assert (died.outcome, died.words) == (TIMEOUT, "the process ended with 7")
    assert {r.outcome for key, r in found.items() if key[0] == "dying" and key[2] == "same"} == {NOT_ASKED, RIGHT}
    for name in ("always", "dying"):
        assert {key[2] for key in found if key[:2] == (name, "one/skip")} == set(runner.expected("one/skip"))


def test_a_target_that_hangs_costs_only_its_own_question(tmp_path: Path) -> None:
    file, answers = tmp_path / "always.py", tmp_path / "answers.jsonl"
    file.write_text(TARGET.format(does="time.sleep(30)"))
    begin = time.monotonic()
    runner.ask(targets.target(str(file)), "one/keyword", Results(answers), 0.2)
    found = Results(answers).records().values()
    assert [r.outcome for r in found] == [TIMEOUT] + [NOT_ASKED] * (len(found) - 1)
    assert time.monotonic() - begin < 20


def test_a_package_that_is_not_installed_is_said_and_counts_for_nothing(tmp_path: Path) -> None:
    file, answers = tmp_path / "absent.py", tmp_path / "answers.jsonl"
    file.write_text("import what_is_not_there\n")
    assert runner.introduced(str(file), Results(answers)) is None
    assert not Results(answers).records()
    assert [line["target"] for line in Results(answers).of("missing")] == ["absent"]


def test_a_model_whose_package_is_not_installed_is_left_out_and_the_next_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> nn.Module:
        raise MissingPackageError("monai")

    monkeypatch.setattr(making, "package", absent)
    results = Results(tmp_path / "answers.jsonl")
    for name in ("wild/monai/unet", "one/keyword"):
        runner.attended(targets.target("jit_script"), name, results, 60, ())
    assert {program for _, program, _ in results.records()} == {"one/keyword"}


def test_each_model_of_the_tier_is_of_a_package_that_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].replace("-", "_").removesuffix("_torch")
        for file in ("wild", "tested")
        for line in (ROOT / f"constraints/{file}.txt").read_text().splitlines()
        if "==" in line
    }
    assert {name.split("/")[1] for name in wild.names()} <= pinned | {"torchaudio"}
    assert len(set(wild.names())) == len(wild.names())
    assert all(program(name).difficulties for name in wild.names())


WRONGS = [("jit_trace", "one/plain", "hook"), ("fx_trace", "one/writes_through_view", "captures")]


@pytest.mark.parametrize(("target", "name", "key"), WRONGS)
def test_the_script_of_a_wrong_case_prints_what_was_found(target: str, name: str, key: str) -> None:
    code = script(target, name, QUESTIONS[key])
    assert len(code.splitlines()) <= 5
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    found = Pair(target, name, QUESTIONS[key].training).answer(QUESTIONS[key])
    assert found.outcome == WRONG
    assert printed.getvalue().splitlines()[-1] == str(found)


class Refuses:
    """A capture that is refused each time, and counts how often it was tried."""

    def __init__(self) -> None:
        self.tried = 0

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        self.tried += 1
        raise RuntimeError("not this model")


def test_a_capture_that_was_refused_is_not_tried_again_in_the_same_mode() -> None:
    capture = Refuses()
    known = runner.Known(made(capture), program("one/keyword"))
    assert {known.answer(QUESTIONS[key]).outcome for key in ("captures", "same", "train", "left")} == {REFUSED}
    assert known.timed().outcome == NOT_ASKED
    assert capture.tried == 2


def test_a_refusal_that_follows_another_is_asked_of_a_new_capture() -> None:
    def poisoned(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        broken: list[bool] = []

        def call(x: torch.Tensor, **kwargs: Any) -> Any:
            if broken or len(x) == 7:
                broken.append(True)
                raise RuntimeError("broken by a batch of seven")
            return model(x, **kwargs)

        return Captured(call)

    known = runner.Known(made(poisoned), program("one/keyword"))
    found = [known.answer(QUESTIONS[key]).outcome for key in ("captures", "same", "batches", "one")]
    assert found == [RIGHT, RIGHT, REFUSED, RIGHT]


def test_the_board_is_every_toy_and_as_many_models_of_each_library_as_its_share_of_the_zoo() -> None:
    chosen_ = chosen.of_the_zoo()
    zoo = [name for name in model_zoo.names() if name.partition("/")[0] not in chosen.SMALL]
    assert set(chosen.PARAMETERS) == set(zoo), "python -m conformance.scoreboard count"
    assert len(chosen_) == chosen.OF_THE_ZOO
    for library in {name.partition("/")[0] for name in zoo}:
        of = [name for name in zoo if name.startswith(f"{library}/")]
        mine = [name for name in chosen_ if name in of]
        assert abs(len(mine) - len(of) * len(chosen_) / len(zoo)) < 1
        largest = max(chosen.PARAMETERS[name] for name in mine)
        assert all(chosen.PARAMETERS[name] >= largest for name in of if name not in mine)
    board = chosen.board()
    toys = {name for name in model_zoo.names() if name not in zoo and not name.startswith("toys/opaque_")}
    assert set(board) == {*QUICK, *chosen_, *toys}
    small = [name for name in board if name not in chosen_]
    assert board == small + board[len(small) :]


@pytest.mark.parametrize("name", ["torchvision/mobilenet_v3_small", "timm/test_vit"])
def test_the_kept_numbers_of_parameters_are_those_of_the_models(name: str) -> None:
    model = model_zoo.entry(name).build()
    assert chosen.PARAMETERS[name] == sum(p.numel() for p in model.parameters())


@pytest.mark.variants
def test_the_scripts_of_wrong_cases_are_run_again_and_one_that_prints_something_else_is_told(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    runner.ask(targets.target("fx_trace"), "one/writes_through_view", Results(answers), 60)
    Results(answers).write("target", {"target": "fx_trace", "title": "fx", "disclaims": {}, "package": "torch"})
    assert again.run(answers) == []
    found = table.board([answers])
    count = len(found.systems[0].wrong)
    assert count > 3
    assert again.repeated(found, [answers]) == (count, count)
    Results(answers).add(Record("fx_trace", "one/plain", "same", WRONG, words="so it was said"))
    [other] = again.run(answers)
    assert other == "fx_trace one/plain same: ['right'] instead of wrong: 'so it was said'"
    assert again.repeated(table.board([answers]), [answers]) == (count + 1, count)


def test_the_page_sorts_by_the_one_script_that_it_may_run(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    made = runner.introduced("jit_script", Results(answers))
    assert made is not None
    runner.ask(made, "one/plain", Results(answers), 60)
    page.write([answers], tmp_path)
    text = (tmp_path / "index.html").read_text()
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert 'data-sort="1"' in text
    cells = [table.Cell((Record("t", "p", "same", outcome),)).score for outcome in (WRONG, REFUSED, RIGHT)]
    assert cells == sorted(cells)


def test_what_is_published_is_the_models_that_every_system_was_asked_about(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    for name, programs in (("fx_trace", ["one/plain", "one/writes_through_view"]), ("jit_script", ["one/plain"])):
        made = runner.introduced(name, Results(answers))
        assert made is not None
        for each in programs:
            runner.ask(made, each, Results(answers), 60)
    assert not table.board([answers]).even
    assert page.publish(answers, tmp_path / "public") == 0
    public = table.board([tmp_path / "public/answers.jsonl"])
    assert public.even
    assert public.programs == ["one/plain"]
    known = table.board([answers])
    for system, whole in zip(public.systems, known.systems, strict=True):
        assert system.about == whole.about
        assert system.records == tuple(r for r in whole.records if r.program == "one/plain")


@pytest.mark.parametrize("key", QUESTIONS)
def test_every_script_has_five_lines_at_most_and_is_python(key: str) -> None:
    code = script("jit_trace", "one/plain", QUESTIONS[key])
    compile(code, key, "exec")
    assert len(code.splitlines()) <= 5


@pytest.mark.parametrize("name", targets.NAMES)
def test_a_target_is_one_file_below_a_hundred_lines(name: str) -> None:
    assert len((ROOT / f"conformance/targets/{name}.py").read_text().splitlines()) < 100


@pytest.mark.parametrize("name", QUICK)
def test_ariadne_is_never_wrong_about_a_toy(name: str) -> None:
    # In one process with others that import `ariadne`: this one is the checkout's.
    found = {
        key: answered("ariadne_here", name, key) for key in ("same", "batches", "train", "gradients", "state", "left")
    }
    assert WRONG not in found.values()
    assert WARNED not in found.values()


def published() -> list[Path]:
    return sorted(p for p in PUBLISHED.iterdir() if p.is_dir())


@pytest.mark.parametrize("folder", published(), ids=lambda p: p.name)
def test_a_published_board_is_drawn_from_the_answers_beside_it(folder: Path, tmp_path: Path) -> None:
    wrong = page.write(sorted(folder.glob("*.jsonl")), tmp_path)
    assert wrong == 0  # of Ariadne's own row
    for name in ("index.html", "summary.md"):
        assert (folder / name).read_text() == (tmp_path / name).read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no loop in /opt/lib/net.py, line 3", "no loop in net.py, line 3"),
        ("a/b is 1/2, see https://example.org/page/x.html", "a/b is 1/2, see https://example.org/page/x.html"),
    ],
)
def test_what_a_system_says_names_files_and_no_folders_of_the_machine(text: str, shown: str) -> None:
    assert said(ValueError(text)) == f"ValueError: {shown}"
