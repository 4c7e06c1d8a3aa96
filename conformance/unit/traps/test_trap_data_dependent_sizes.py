"""Trap 25: sizes and conditions that follow data or the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import BatchError, FrontierError, GuardError
from conformance.unit.trap_nets import Body
from conformance.unit.trap_twins import Twins, either, seeded


def observed_too(middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The same for a model that is not captured symbolically, since it makes an integer of what it read."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return middle(m, x) * int(m.n_buffer.item())

    return forward


class Conditioned(Body):
    def __init__(self, middle: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(middle)
        self.register_buffer("n_buffer", torch.tensor(2))
        self.table = {5: 3.0, 7: 0.5}
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


def batch_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([m.b(row) * (i + 1) for i, row in enumerate(x)])


def batch_accumulates(m: Any, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(6)
    for i in range(x.shape[0]):
        total = total + m.b(x[i])
    return x + total


def while_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    while n > 1:
        x, n = m.b(x), n // 2
    return x


CONDITIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "B == 5": lambda m, x: m.b(x) if x.shape[0] == 5 else torch.relu(x),
    "B == 5, same op": lambda m, x: m.b(x) * (7 if x.shape[0] == 5 else 2),
    "B != 4": lambda m, x: m.b(x) if x.shape[0] != 4 else x,
    "4 <= B <= 6": lambda m, x: m.b(x) if 4 <= x.shape[0] <= 6 else x * 2,
    "4 <= B <= 6, same op": lambda m, x: m.b(x) * (7 if 4 <= x.shape[0] <= 6 else 2),
    "6 <= B <= 7": lambda m, x: m.b(x) * (7 if 6 <= x.shape[0] <= 7 else 2),
    "B > 6": lambda m, x: m.b(x) if x.shape[0] > 6 else x * 2,
    "B > 7, one end": lambda m, x: m.b(x) if x.shape[0] > 7 else x * 2,
    "B % 4 == 0": lambda m, x: m.b(x) if x.shape[0] % 4 == 0 else x * 2,
    "B in a tuple": lambda m, x: m.b(x) * (7 if x.shape[0] in (4, 7) else 2),
    "B in a set": lambda m, x: m.b(x) * (7 if x.shape[0] in {4, 7} else 2),
    "a dict by B": lambda m, x: m.b(x) * m.table.get(x.shape[0], 2.0),
    "a module by B": lambda m, x: m.parts[x.shape[0] % 3](x),
    "int(B) == 5": lambda m, x: m.b(x) * (7 if int(x.shape[0]) == 5 else 2),
    "len == 5": lambda m, x: m.b(x) * (7 if len(x) == 5 else 2),
    "size == 5": lambda m, x: m.b(x) * (7 if x.size(0) == 5 else 2),
    "numel == 30": lambda m, x: m.b(x) * (7 if x.numel() == 30 else 2),
    "shape == (5, 6)": lambda m, x: m.b(x) * (7 if x.shape == (5, 6) else 2),
    "str(B)": lambda m, x: m.b(x) * (7 if str(int(x.shape[0])) == "5" else 2),
    "a flag from B": lambda m, x: m.b(x) * (bool(x.shape[0] == 5) + 1),
    "min(B, 4)": lambda m, x: m.b(x)[: min(x.shape[0], 4)].sum(0) + x,
    "max(B, 4)": lambda m, x: m.b(x) * max(x.shape[0], 4),
    "B * B": lambda m, x: m.b(x) * (x.shape[0] * x.shape[0]),
    "1 / B": lambda m, x: m.b(x) / x.shape[0] + x * (1.0 / x.shape[0]),
    "B ** 0.5": lambda m, x: m.b(x) * x.shape[0] ** 0.5,
    "B // 2": lambda m, x: m.b(x) + x[: x.shape[0] // 2].sum(0),
    "bit_length": lambda m, x: m.b(x) * int(x.shape[0]).bit_length(),
    "round": lambda m, x: m.b(x) * round(x.shape[0] / 3),
    "arange(B)": lambda m, x: m.b(x) + torch.arange(x.shape[0])[:, None],
    "rows": batch_loop,
    "a sum of rows": batch_accumulates,
    "while": while_loop,
}


@pytest.mark.parametrize("way", ["symbolic", "observed"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_batch_of_the_range_takes_the_branch_of_the_model(condition: str, way: str) -> None:
    middle = CONDITIONS[condition] if way == "symbolic" else observed_too(CONDITIONS[condition])
    twins = Twins(lambda: Conditioned(middle), seeded((2, 6)))
    if way == "observed":
        assert twins.runtime.plan.captured_by != "symbolic"
    cuts = [twins.runtime]
    for b in range(1, 9):
        twins.replay(seeded((b, 6), b), cuts=cuts)
    twins.train(seeded((5, 6)), steps=1, cuts=cuts)
    with pytest.raises(BatchError, match=r"batch 9 lies outside dynamic_batch \(1, 8\)"):
        twins.runtime.run_prefix(seeded((9, 6)))


@pytest.mark.parametrize("at", [4, 5, 6, 7])
def test_a_condition_is_met_wherever_the_range_and_the_example_lie(at: int) -> None:
    middle = observed_too(lambda m, x: m.b(x) * (7 if x.shape[0] == at else 2))
    for example, batches in ((4, (4, 9)), (1, (1, 8)), (6, (2, 40))):
        twins = Twins(lambda: Conditioned(middle), seeded((example, 6)), batches=batches)
        for b in range(batches[0], 9):
            twins.replay(seeded((b, 6), b), cuts=[twins.runtime])


def boolean_mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = x[x[:, 0] > 0]
    return m.b(x) + kept.sum(0)


def masked_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x)
    y = y.clone()
    y[x > 0] = 1.5
    return y + x


def chosen_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    chosen = m.b(x[torch.nonzero(x[:, 0] > 0).squeeze(1)])
    return x.index_add(0, torch.nonzero(x[:, 0] > 0).squeeze(1), chosen)


def ragged(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = (x.detach().abs().sum(1) * 3).long() % 6 + 1
    return m.b(x) + x[:, : int(lengths.max())].sum(1, keepdim=True)


def tolisted(m: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = ((x.detach()[:, 0] > 0).long() + 1).tolist()
    return m.b(x) + torch.stack([x[i, :n].sum() for i, n in enumerate(lengths)])[:, None]


def repeated(m: Any, x: torch.Tensor) -> torch.Tensor:
    times = (x.detach()[:, 0] > 0).long() + 1
    many = m.b(x).repeat_interleave(times, dim=0)
    return x + many.mean(0)


def by_experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As mixtures of experts do it: each expert takes the rows that chose it."""
    choice, out = x.detach().argmax(1) % 3, torch.zeros_like(x)
    for i, part in enumerate(m.parts):
        rows = torch.where(choice == i)[0]
        out.index_add_(0, rows, part(x[rows]))
    return out


def by_experts_if_any(m: Any, x: torch.Tensor) -> torch.Tensor:
    choice, out = x.detach().argmax(1) % 3, torch.zeros_like(x)
    for i, part in enumerate(m.parts):
        rows = torch.where(choice == i)[0]
        if rows.numel():
            out = out.index_add(0, rows, part(x[rows]))
    return out


REFUSED = GuardError, FrontierError  # another path, which may have no such cut
DATA: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "boolean mask": boolean_mask,
    "masked_select": lambda m, x: m.b(x) + torch.masked_select(x, x > 0).sum(),
    "masked_fill": lambda m, x: m.b(x.masked_fill(x > 0, -1.0)),
    "where": lambda m, x: torch.where(x > 0, m.b(x), x),
    "masked write": masked_write,
    "nonzero": chosen_rows,
    "unique": lambda m, x: m.b(x) + torch.unique((x.detach() * 2).long()).numel(),
    "a length": ragged,
    "lengths": tolisted,
    "repeat_interleave": repeated,
    "experts": by_experts,
    "experts, if any": by_experts_if_any,
    "a branch on the sum": lambda m, x: m.b(x) if x.sum() > 0 else x * 2,
    "a branch on any": lambda m, x: m.b(x) if (x > 1).any() else x * 2,
    "a loop until": lambda m, x: m.b(x) * sum(1 for v in x[:, 0] if v > 0),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("data", DATA)
def test_what_depends_on_data_is_followed_or_refused_on_either_side_of_the_cut(data: str, train: bool) -> None:
    twins = Twins(lambda: Conditioned(DATA[data]), seeded((2, 6)))
    twins.replay(seeded((2, 6)))  # the example itself must be served
    cuts = twins.cuts()
    for cut in (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
        for b in (1, 2, 3):
            for seed in (1, 2, 3):
                x = seeded((b, 6), 10 * b + seed)
                if train:
                    either(lambda x=x, cut=cut: twins.train(x, steps=1, cuts=[cut]), REFUSED, "capture", "prepare")
                    twins.sync()
                else:
                    either(lambda x=x, cut=cut: twins.replay(x, cuts=[cut]), REFUSED, "capture", "prepare")


@pytest.mark.parametrize("data", ["boolean mask", "masked_select", "masked_fill", "where", "masked write", "nonzero",
                                  "repeat_interleave", "experts"])  # fmt: skip
def test_sizes_that_depend_on_data_alone_are_followed(data: str) -> None:
    """No Python reads them: the ops themselves find the sizes anew."""
    twins = Twins(lambda: Conditioned(DATA[data]), seeded((2, 6)))
    cuts = twins.cuts()
    for b in (1, 3):
        twins.replay(seeded((b, 6), b), cuts=[cuts[0], cuts[len(cuts) // 2], cuts[-1]])
        twins.train(seeded((b, 6), b), cuts=[cuts[0], cuts[len(cuts) // 2], cuts[-1]])
