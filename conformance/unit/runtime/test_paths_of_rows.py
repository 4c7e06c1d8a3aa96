"""Paths of which one asks nothing, or writes where another does not: a call goes from one to the other all the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ariadne import SplitSpec, prepare_split
from conformance.unit.runtime.test_paths import Net, X, build
from conformance.unit.trap_twins import Twins, same, seeded


def rows_above_zero(m: Net, h: Tensor) -> Tensor:
    """No row and one row are paths of their own; all other numbers share one, which asks nothing."""
    found, above = h.clone(), h.mean(1) > 0
    found[above] = m.left(h[above]).relu()
    return m.right(found)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("boundary", ["25%", "75%"])
def test_a_path_that_asks_nothing_is_taken_from_one_that_asks(boundary: str, train: bool) -> None:
    def rows(n: int) -> Tensor:
        x = seeded((5, 6), 0)
        with torch.no_grad():
            signs = torch.tanh(twins.whole.enter(x)).mean(1) > 0
        some = x[signs].repeat(5, 1)[:n], x[~signs].repeat(5, 1)[: 5 - n]
        return torch.cat(some)

    twins = Twins(lambda: build(rows_above_zero), seeded((5, 6), 0), train=train)
    runtime = prepare_split(twins.split, (rows(1),), split=SplitSpec(boundary))
    for n in (1, 3, 0, 1):
        if train:
            twins.train(rows(n), steps=1, cuts=[runtime])
        with torch.no_grad():
            same(twins.whole(rows(n)), runtime.run_suffix(runtime.run_prefix(rows(n))))


def writes_into_a_view_on_one_path(m: Net, x: Tensor) -> Tensor:
    h = m.left(x)
    part = h[:, :3]
    if part.sum() > 0:
        part.add_(1)
    return m.leave(m.right(h))


def test_what_one_path_writes_into_before_its_cut_is_not_held_against_another() -> None:
    def make() -> Net:
        net = build(writes_into_a_view_on_one_path)
        net.forward = partial(writes_into_a_view_on_one_path, net)  # type: ignore[method-assign]
        return net

    twins, way = Twins(make, X), make()
    some = [seeded((3, 6), seed) * sign for seed in range(3) for sign in (-1, 1)]
    rows = {bool(way.left(x)[:, :3].sum() > 0): x for x in some}
    for first in (False, True):
        runtime = prepare_split(twins.split, (rows[first],), split="50%")
        for second in (not first, first, not first):
            twins.replay(rows[second], cuts=[runtime])
