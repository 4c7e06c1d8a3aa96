"""Halves of models that branch on data: each path that was known when they were saved is answered, and no other."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ariadne
from ariadne import BoundaryPayload, prepare_split
from ariadne.errors import HalfError, WitnessError
from ariadne.remote import Server
from ariadne.remote.facts import facts_of
from conformance.suite.halves_fuzz import closed, opened
from conformance.suite.state import seed_torch
from conformance.unit.remote_kit import beside
from conformance.unit.runtime.test_paths import (
    Net,
    build,
    called_twice,
    early_exit,
    layer_drop,
    loop_by_data,
    one_question,
    prepared,
    reads_what_it_wrote,
    stored_on_one_path,
    two_in_a_row,
    used_on_one_path,
)
from conformance.unit.trap_twins import Twins, same, seeded, square_loss

SEEDS = range(6)
X = seeded((3, 6), 3)


def shown(middle: Callable[..., Tensor], cut: float) -> Twins:
    """Twins whose split one was shown all that the test asks of it, and is cut there."""
    examples = [(seeded((3, 6), seed),) for seed in SEEDS]
    twins = Twins(lambda: build(middle), X, train=True, prepare=partial(prepare_split, more_examples=examples))
    for seed in SEEDS:
        seed_torch(seed)
        twins.runtime.learn((seeded((3, 6), seed),))
    cuts = twins.cuts()
    twins.runtime = cuts[int(cut * (len(cuts) - 1))]
    return twins


def saved(runtime: Any, folder: Path) -> list[Any]:
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return [ariadne.load(folder / side) for side in ("prefix", "suffix")]


def sent(boundary: BoundaryPayload) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


def as_whole(whole: Net, halves: list[Any], grads: bool = False) -> None:
    """Each half has the model's numbers, and its gradients."""
    state = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for half in halves:
        for name, mine in half.state_dict(keep_vars=True).items():
            same(state[name].grad if grads else state[name].detach(), mine.grad if grads else mine.detach())


BRANCHING = (
    one_question, two_in_a_row, loop_by_data, early_exit, layer_drop, called_twice, stored_on_one_path, used_on_one_path,
)  # fmt: skip


def some(middles: Any) -> dict[str, Any]:
    """Each of these, those that take longer with the other variants."""
    quick = (early_exit, used_on_one_path)
    marks = [() if m in quick else pytest.mark.variants for m in middles]
    return {"argvalues": [pytest.param(m, id=m.__name__, marks=mark) for m, mark in zip(middles, marks, strict=True)]}


@pytest.mark.parametrize(
    "cut", [0.4, pytest.param(0, marks=pytest.mark.variants), pytest.param(0.8, marks=pytest.mark.variants)]
)
@pytest.mark.parametrize("middle", **some(BRANCHING))
def test_halves_answer_every_path_that_was_known(tmp_path: Path, middle: Callable[..., Tensor], cut: float) -> None:
    twins = shown(middle, cut)
    prefix, suffix = saved(twins.runtime, tmp_path)
    for seed in SEEDS:
        seed_torch(seed)
        with torch.no_grad():
            want = twins.whole(seeded((3, 6), seed))
        after = torch.get_rng_state()
        seed_torch(seed)
        same(want, suffix.run_suffix(sent(prefix.run_prefix(seeded((3, 6), seed)))))
        assert torch.equal(after, torch.get_rng_state())
        as_whole(twins.whole, [prefix, suffix])


@pytest.mark.parametrize("wire", [True, False], ids=["bytes", "memory"])
@pytest.mark.parametrize("middle", **some((two_in_a_row, early_exit, layer_drop, used_on_one_path)))
def test_halves_train_on_every_path_that_was_known(tmp_path: Path, middle: Callable[..., Tensor], wire: bool) -> None:
    twins = shown(middle, 0.3)
    halves = prefix, suffix = saved(twins.runtime, tmp_path)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.002, momentum=0.9) for half in halves]
    for seed in SEEDS:
        x = seeded((3, 6), seed)
        seed_torch(seed)
        twins.step_whole.zero_grad()
        loss = square_loss(twins.whole(x))
        loss.backward()
        twins.step_whole.step()
        after = torch.get_rng_state()
        seed_torch(seed)
        boundary = prefix.run_training_prefix(x)
        came = sent(boundary) if wire else boundary
        found, gradients = suffix.train_suffix(came, loss_fn=square_loss, optimizer=optimizers[1])
        prefix.backward_prefix(boundary, gradients, optimizer=optimizers[0])
        same(loss.detach(), found)
        assert torch.equal(after, torch.get_rng_state())
        as_whole(twins.whole, halves, grads=True)
        as_whole(twins.whole, halves)
        with pytest.raises(ariadne.errors.ConsumedError):
            suffix.train_suffix(came, loss_fn=square_loss)


def both_ways(cut: str = "after:enter", middle: Callable[..., Tensor] = one_question) -> tuple[Net, Any, list[Tensor]]:
    """A model whose split knows two paths, and an input for each."""
    model, runtime = prepared(middle, cut)
    above: dict[bool, Tensor] = {}
    for seed in range(20):
        x = seeded((3, 6), seed)
        above.setdefault(bool(torch.tanh(model.enter(x))[0].sum() > 0), x)
    for x in above.values():
        runtime.learn((x,))
    return model, runtime, [above[True], above[False]]


def test_what_one_path_alone_takes_crosses_on_all(tmp_path: Path) -> None:
    model, runtime, inputs = both_ways("after:left", used_on_one_path)
    if "left" not in [n.module for n in runtime.plan.nodes]:
        pytest.fail("the path that uses it is to come first")
    prefix, suffix = saved(runtime, tmp_path)
    labels = {prefix.run_prefix(x).labels for x in inputs}
    lives = [set(v.candidate.live) for v in runtime._variants]
    assert len(lives) == 2
    assert lives[0] != lives[1]
    assert all({*crossing} >= lives[0] | lives[1] for crossing in labels)
    with torch.no_grad():
        for x in inputs:
            same(model(x), suffix.run_suffix(sent(prefix.run_prefix(x))))
            same(model(x), suffix.run_suffix(prefix.run_prefix(x)))
            same(model(x), runtime.run_suffix(prefix.run_prefix(x)))  # the side with the model takes it, too
            same(model(x), runtime.run_suffix(sent(prefix.run_prefix(x))))


def test_the_split_in_one_process_may_be_the_prefix_of_a_suffix_from_a_file(tmp_path: Path) -> None:
    model, runtime, inputs = both_ways()
    _, suffix = saved(runtime, tmp_path)
    with torch.no_grad():
        for x in inputs * 2:
            same(model(x), suffix.run_suffix(runtime.run_prefix(x)))
            same(model(x), suffix.run_suffix(sent(runtime.run_prefix(x))))
            same(model(x), runtime.run_suffix(sent(runtime.run_prefix(x))))  # and of itself, over a wire


@pytest.mark.parametrize("cut", ["after:enter", "90%"])
def test_an_unknown_path_is_told_by_question_and_answer_and_leaves_nothing(tmp_path: Path, cut: str) -> None:
    def counts(m: Net, h: Tensor) -> Tensor:
        m.calls += 1
        return one_question(m, h)

    model, runtime = prepared(counts, cut)
    halves = prefix, suffix = saved(runtime, tmp_path)
    before = copy.deepcopy([dict(half.state_dict()) for half in halves])
    inputs = [seeded((3, 6), seed) for seed in range(9)]
    above = [bool(torch.tanh(model.enter(x)).sum() > 0) for x in (X, *inputs)]
    other = inputs[above.index(not above[0]) - 1]
    kind = "over a wire" if cut == "after:enter" else r"1 path\(s\) of such inputs are in this half's file"
    with pytest.raises(WitnessError, match=rf"at capture it was {above[0]}, now it is {not above[0]}.*{kind}"):
        suffix.run_suffix(prefix.run_prefix(other))
    side = int(cut == "after:enter")
    same(before[side], dict(halves[side].state_dict()))


def test_a_path_that_a_prefix_sends_too_little_for_is_told(tmp_path: Path) -> None:
    _, runtime, inputs = both_ways("after:left", used_on_one_path)
    prefix, suffix = saved(runtime, tmp_path)
    lives = {v.key: v.candidate.live for v in runtime._variants}
    assert len({*lives.values()}) == 2
    said = set()
    for x in inputs:
        for key, live in lives.items():
            try:
                suffix.run_suffix(prefix.run_prefix(x).narrowed(*key, live))
            except WitnessError as error:
                said.add(re.search(r"needs '\w+', which this prefix does not send", str(error)) is not None)
    assert said == {True}


def test_a_half_that_is_copied_or_saved_again_has_its_paths(tmp_path: Path) -> None:
    model, runtime, inputs = both_ways()
    halves = saved(runtime, tmp_path)
    for half in halves:
        half.save(tmp_path / f"{half.part} again")
    again = [ariadne.load(tmp_path / f"{half.part} again") for half in halves]
    for prefix, suffix in (again, [copy.deepcopy(half) for half in halves]):
        with torch.no_grad():
            for x in inputs:
                same(model(x), suffix.run_suffix(sent(prefix.run_prefix(x))))


def test_a_server_answers_every_path_of_its_half(tmp_path: Path) -> None:
    model, runtime, inputs = both_ways()
    prefix, suffix = saved(runtime, tmp_path)
    server = Server(suffix, listen="127.0.0.1:0", log=None)
    with beside(server), ariadne.connect(server.address, timeout=60) as remote, torch.no_grad():
        for x in inputs * 2:
            same(model(x), remote.run_suffix(prefix.run_prefix(x)))


def test_a_server_is_told_the_draws_of_every_path_that_a_boundary_may_take(tmp_path: Path) -> None:
    def draws(m: Net, h: Tensor) -> Tensor:
        return m.left(h) * torch.rand(()) if h[0].sum() > 0 else m.right(h)

    _, runtime, _ = both_ways(middle=draws)
    _, suffix = saved(runtime, tmp_path)
    own = [any(node.seeded for node in plan.nodes) for plan in suffix.runtime._plans]
    assert sorted(own) == [False, True]
    assert [split["draws"] for split in facts_of(suffix)["splits"].values()] == [True, True]


def test_only_a_file_with_paths_that_part_after_the_cut_has_the_newer_format(tmp_path: Path) -> None:
    _, runtime, _ = both_ways()
    for name, split in (("paths", runtime), ("one", prepared(reads_what_it_wrote, "after:enter")[1])):
        split.save(tmp_path / name, side="prefix")
    told = [opened((tmp_path / name).read_bytes())[1] for name in ("paths", "one")]
    assert [half["format"] for half in told] == [2, 1]
    assert ["follows" in half["plans"][0] for half in told] == [True, False]


def test_a_path_that_is_no_number_is_refused(tmp_path: Path) -> None:
    _, runtime, _ = both_ways()
    runtime.save(tmp_path / "half", side="suffix")
    header, half, body = opened((tmp_path / "half").read_bytes())
    half["plans"][0]["number"] = "os"
    (tmp_path / "half").write_bytes(closed(header, half, body))
    with pytest.raises(HalfError, match="a path"):
        ariadne.load(tmp_path / "half")
