"""Pipelines over several processes equal the whole model over the same micro-batches, in the schedule's order."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ariadne.errors import PipelineError, SpecError
from ariadne.pipeline.steps import NAMES, stages_of
from conformance.unit.pipeline import ranks
from conformance.unit.pipeline.nets import CASES
from conformance.unit.pipeline.ranks import _rank as rank_of_a_group
from conformance.unit.pipeline.ranks import made, matrix, run, step

ON_TWO = [("skip", "GPipe", 2, 4), ("norm", "1F1B", 2, 4), ("frozen_start", "1F1B", 2, 4), ("images", "GPipe", 2, 4)]
ON_TWO += [("tied", "Interleaved1F1B", 4, 4), ("tied", "1F1B", 2, 4, "Adam"), ("dropout", "LoopedBFS", 4, 4)]
ON_TWO += [("integers", "InterleavedZeroBubble", 4, 4), ("skip", "ZBVZeroBubble", 4, 4), ("tied", "DualPipeV", 4, 4)]
ON_TWO += [("noisy_loss", "ZBVZeroBubble", 4, 5, "SGD", "seeded"), ("frozen_middle", "DualPipeV", 4, 6)]
ON_TWO += [("all", "InterleavedZeroBubble", 4, 4), ("time_first", "1F1B", 2, 4)]


def refuse_differences(found: list[tuple[str | None, Any]]) -> None:
    for rank, (error, result) in enumerate(found):
        assert error is None, f"rank {rank}: {error}\n{result}"
        wrong = {case: words for case, words in result.items() if words}
        assert not wrong, f"rank {rank}: {wrong}"


def test_three_steps_with_ragged_batches_and_evaluation_between_equal_the_whole_models() -> None:
    refuse_differences(run(matrix, 2, ON_TWO))


def test_four_ranks_equal_the_whole_model() -> None:
    refuse_differences(run(matrix, 4, [("skip", "1F1B", 4, 4), ("dropout", "GPipe", 4, 4)]))


def test_ranks_that_have_only_files_equal_the_whole_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for case, schedule, parts in (("tied", "1F1B", 2), ("dropout", "InterleavedZeroBubble", 4)):
            _, pipeline = made(case, parts, draws="seeded")
            home = Path(folder) / case
            home.mkdir()
            for i in range(parts):
                pipeline.save_part(i, home / f"{i}.safetensors")
            cases.append((case, schedule, parts, 4, "Adam", "seeded", str(home)))
        refuse_differences(run(matrix, 2, cases))


def failing(rank: int, world: int, places: list[str]) -> list[tuple[str, float]]:
    """Steps in which one rank fails, one after the other; what is raised here, and after how many seconds."""
    _, pipeline = made("skip", world)
    told = []
    for where in places:
        calls = dict.fromkeys(("loss", "forward"), 0)

        def count(who: str, where: str = where, calls: dict[str, int] = calls) -> None:
            calls[who] += 1
            if where == f"{who} {rank}" and calls[who] == 3:
                raise ValueError(f"{who} went wrong")
            if where == f"killed {rank}" and calls[who] == 3:
                os._exit(3)

        def loss(output: torch.Tensor, target: torch.Tensor, count: Any = count) -> torch.Tensor:
            count("loss")
            return CASES["skip"].loss(output, target)

        schedule = pipeline.schedule("1F1B", microbatches=6, loss_fn=loss)
        part = schedule.stages[0].submod
        inner = type(part).fly

        def fly(*args: Any, count: Any = count, part: Any = part, inner: Any = inner) -> Any:
            count("forward")
            return inner(part, *args)

        part.__dict__["fly"] = fly
        start = time.monotonic()
        try:
            step(schedule, "skip", 4 if where == "too small" else 12, 0)
            told.append(("nothing", 0.0))
        except Exception as error:
            told.append((f"{type(error).__name__}: {error}", time.monotonic() - start))
            with pytest.raises(PipelineError, match="an earlier step of this pipeline failed"):
                step(schedule, "skip", 12, 0)
    return told


ERRORS = {
    "loss 2": "ValueError: loss went wrong",
    "forward 0": "ValueError: forward went wrong",
    "forward 1": "ValueError: forward went wrong",
    "too small": "a batch of 4 can't be parted in 6 micro-batches|smaller than num_chunks",
}


def closed_at_first(job: Any, rank: int, world: int, store: str, args: tuple[Any, ...], queue: Any) -> None:
    """A rank for which gloo fails the first time that a group is made."""
    tries = Path(args[0])
    if rank == 0 and not tries.exists():
        tries.write_text("")
        queue.put((rank, "RuntimeError: Connection closed by peer", ""))
    else:
        rank_of_a_group(job, rank, world, store, args, queue)


def counted(rank: int, world: int, tries: str) -> None:
    """A job that fails, and counts how often it was begun."""
    with Path(tries).open("a") as file:
        file.write(str(rank))
    raise ValueError("the job's own error")


def test_a_group_that_gloo_could_not_make_is_made_anew_and_a_job_that_fails_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_rank", closed_at_first)
    tries = tmp_path / "tries"
    assert [error for error, _ in run(counted, 2, str(tries))] == ["ValueError: the job's own error"] * 2
    assert sorted(tries.read_text()) == ["0", "1"]


def test_an_error_on_one_rank_ends_all_with_it_within_seconds_and_new_stages_go_on() -> None:
    found = run(failing, 3, [*ERRORS, "none"])
    for rank, (error, result) in enumerate(found):
        assert error is None, (rank, error, result)
        for (text, seconds), words in zip(result, ERRORS.values(), strict=False):
            assert re.search(words, text), (rank, text)
            assert seconds < 10
        assert result[-1][0] == "nothing"
    for i, where in enumerate(ERRORS):
        told = [result[i][0].startswith("PipelineError: rank") for _, result in found]
        assert told.count(True) >= (2 if where != "too small" else 1), where


def test_a_rank_that_is_killed_ends_all_within_seconds() -> None:
    found = run(failing, 3, ["killed 1"])
    for rank in (0, 2):
        error, result = found[rank]
        assert error is None, result
        assert re.search("closed by peer|reset by peer", result[0][0])
        assert result[0][1] < 10


def other_numbers(rank: int, world: int) -> str:
    """One rank has other numbers in a parameter that two parts share."""
    net, pipeline = made("tied", world)
    if rank:
        with torch.no_grad():
            net.get_parameter("embed.weight").add_(1)
    schedule = pipeline.schedule("GPipe", microbatches=2, loss_fn=CASES["tied"].loss)
    try:
        step(schedule, "tied", 4, 0)
    except Exception as error:
        return str(error)
    return "nothing"


def test_shared_parameters_with_other_numbers_on_another_rank_are_told() -> None:
    for error, result in run(other_numbers, 2):
        assert error is None
        assert "'embed.weight' is one parameter of parts 0, 1, and its numbers on rank 1 are others" in result


def drawing_loss(rank: int, world: int, case: str, name: str, parts: int) -> str:
    """A loss that draws, where the whole model's draws go on from one micro-batch to the next."""
    _, pipeline = made(case, parts)
    schedule = pipeline.schedule(name, microbatches=4, loss_fn=CASES["noisy_loss"].loss)
    try:
        step(schedule, case, 8, 0)
    except PipelineError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("case", "name", "parts"), [("dropout", "1F1B", 2), ("skip", "ZBVZeroBubble", 4)])
def test_a_loss_that_draws_is_told_but_under_seeds(case: str, name: str, parts: int) -> None:
    for error, result in run(drawing_loss, 2, case, name, parts):
        assert error is None
        assert "loss_fn draws random numbers" in result


def test_which_parts_a_rank_runs_follows_from_the_schedule() -> None:
    assert stages_of("1f1b", 4, 2, 4) == [2]
    assert stages_of("LoopedBFS", 4, 1, 2) == [1, 3]
    assert stages_of("DualPipeV", 4, 1, 2) == [1, 2]
    with pytest.raises(SpecError, match="4 parts need 4 ranks"):
        stages_of("GPipe", 4, 0, 2)
    with pytest.raises(SpecError, match="2 ranks need 4 parts"):
        stages_of("ZBVZeroBubble", 2, 0, 2)
    with pytest.raises(SpecError, match="don't go into 2 ranks"):
        stages_of("Interleaved1F1B", 3, 0, 2)
    with pytest.raises(SpecError, match=f"there are '{NAMES[0]}'"):
        stages_of("2F2B", 4, 0, 2)
