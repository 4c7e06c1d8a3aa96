"""A call of another structure than the example has a plan of its own: None where a pair was, a list for a tuple, one input more."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.errors import BatchError, InputError, SpecError
from conformance.unit.trap_kit import numbers, same

X, K, V = numbers(2, 4), numbers(2, 3, seed=1), numbers(2, 3, seed=2)


class Decoder(nn.Module):
    """A step of a decoder: without what it kept of earlier ones, or with it, in whatever container."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.past, self.b = nn.Linear(4, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
        h = self.a(x)
        for i, kept in enumerate(() if past is None else past.values() if isinstance(past, dict) else past):
            h = h + self.past(kept) * (i + 2 + isinstance(past, list))
        y: torch.Tensor = self.b(h)
        return y


class Variadic(Decoder):
    def forward(self, x: torch.Tensor, *past: torch.Tensor) -> torch.Tensor:
        return super().forward(x, past)


def split(runtime: SplitRuntime, *call: Any) -> Any:
    return runtime.run_suffix(runtime.run_prefix(*call))


def larger(value: Any, batch: int) -> Any:
    """The same call with another batch."""
    if isinstance(value, dict):
        return {key: larger(v, batch) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(larger(v, batch) for v in value)
    return value if value is None else value[torch.arange(batch) % 2]


PAIR: tuple[Any, ...] = (X, (K, V))


@pytest.mark.parametrize(
    ("example", "call"),
    [
        (PAIR, (X,)),
        (PAIR, (X, None)),
        ((X, None), PAIR),
        ((X,), PAIR),
        (PAIR, (X, [K, V])),
        (PAIR, (X, (K,))),
        ((X, [K]), (X, [K, V, V + 1])),
        ((X, {"k": K}), (X, {"k": K, "v": V})),
        (PAIR, (X, {"k": K})),
    ],
)
def test_each_structure_is_served_at_any_batch(example: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    model = Decoder().eval()
    runtime = prepare_split(model, example, split="after:a")
    for given in (call, larger(call, 5), example, larger(example, 3), call):
        same(model(*given), split(runtime, *given))
    assert len(runtime.plans) == 2


class Modalities(nn.Module):
    """Of a batch, whatever is there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.other, self.b = nn.Linear(4, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        h = self.a(batch["x"])
        for i, t in enumerate((batch.get("k"), *batch["more"])):
            h = h if t is None else h + self.other(t) * (i + 1)
        out: torch.Tensor = self.b(h)
        return out


def test_a_tensor_in_a_container_may_be_none() -> None:
    model = Modalities().eval()
    runtime = prepare_split(model, ({"x": X, "k": K, "more": [V]},), split="after:a")
    given = {"x": X, "k": None, "more": [None]}
    same(model(given), split(runtime, given))
    with pytest.raises(TypeError, match=r"linear\(\)"):  # which forward itself raises
        runtime.run_prefix({"x": None, "k": K, "more": [V]})


@pytest.mark.parametrize(("example", "call"), [((X,), (X, K, V)), ((X, K), (X,))])
def test_what_forward_takes_by_args_may_be_more_or_fewer(example: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    model = Variadic().eval()
    runtime = prepare_split(model, example, split="after:a")
    for given in (call, larger(call, 5), example):
        same(model(*given), split(runtime, *given))
    assert len(runtime.plans) == 2


class Cached(Decoder):
    def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
        h = self.a(x)
        if past is not None:  # of which the first has its batch as dim 1, and the second none
            h = h + past[0].sum(0).mean(-1, keepdim=True) + past[1].mean() * len(past)
        y: torch.Tensor = self.b(h)
        return y


def test_names_of_sizes_and_of_the_batch_hold_in_each_structure() -> None:
    model = Cached().eval()
    spec = SplitSpec(
        "after:a",
        dynamic_batch=(1, 8),
        batch_dim={"past_0": 1, "past_1": None},
        dynamic={"past_0": {0: "P"}},
        sizes={"P": (2, 9)},
    )
    runtime = prepare_split(model, (X, (numbers(6, 2, 3), numbers(2, 3))), split=spec)
    for batch, length in ((2, 6), (3, 7), (5, 4)):
        x, k = numbers(batch, 4), numbers(length, batch, 3)
        for past in (None, [k, V], (k, V), (k, V, None)):
            same(model(x, past), split(runtime, x, past))
    assert len(runtime.plans) == 4
    with pytest.raises(InputError, match="'past_0' is the size P, declared as 2 to 9; found 10"):
        runtime.run_prefix(X, (numbers(10, 2, 3), V, None, None))
    with pytest.raises(BatchError, match="batch 9 lies outside"):
        runtime.run_prefix(numbers(9, 4), (numbers(6, 9, 3), V, None, None))


def test_where_no_input_has_a_batch_none_of_another_structure_has() -> None:
    model = Decoder().eval()
    runtime = prepare_split(model, (X[:1],), split=SplitSpec("after:a", batch_dim="none"))
    same(model(X[:1], [K[:1]]), split(runtime, X[:1], [K[:1]]))
    assert [plan.batched for plan in runtime.plans] == [{}, {}]


def test_it_is_trained_as_the_whole_model() -> None:
    model = Decoder()
    twin = copy.deepcopy(model)
    runtime = prepare_split(model, PAIR, split="after:a")
    steps = [torch.optim.SGD(p, 0.1) for p in (runtime.prefix_parameters(), runtime.suffix_parameters())]
    whole, target = torch.optim.SGD(twin.parameters(), 0.1), torch.zeros(2, 2)
    for call in ((X,), PAIR, (X, [K])):
        boundary = runtime.run_training_prefix(*call)
        _, grads = runtime.train_suffix(boundary, target, loss_fn=nn.functional.mse_loss, optimizer=steps[1])
        runtime.backward_prefix(boundary, grads, optimizer=steps[0])
        whole.zero_grad()
        nn.functional.mse_loss(twin(*call), target).backward()
        whole.step()
        same([*twin.parameters()], [*model.parameters()])


def test_files_of_halves_hold_plans_of_several_structures(tmp_path: Path) -> None:
    model = Decoder().eval()
    runtime = prepare_split(model, PAIR, split="after:a", more_examples=[(X, None), (X, [K, V])])
    halves = []
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
        halves.append(ariadne.load(tmp_path / side))
    prefix, suffix = halves
    for call in ((X, [K, V]), (X, None), (X,), PAIR):
        same(model(*call), suffix.run_suffix(prefix.run_prefix(*call)))
    with pytest.raises(InputError, match=r"expected args .*; found args \(\*, \[\*\]\)"):
        prefix.run_prefix(X, [K])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((), r"found args \(\), kwargs \{\}. Pass them as .*or prepare again$"),
        ((X, K, V), r"found args \(\*, \*, \*\), kwargs \{\}. Pass them as .*or prepare again$"),
        ((X.tolist(), None), r"found args \(\[\[\*.*or prepare again$"),
        (([X],), r"found args \(\[\*\], \*\).* Given these, forward raises TypeError: linear\(\)"),
        ((X, ((K,),)), r"found args \(\*, \(\(\*,\),\)\).* Given these, forward raises TypeError: linear\(\)"),
    ],
)
def test_a_mistaken_call_is_told_both_structures(call: tuple[Any, ...], words: str) -> None:
    runtime = prepare_split(Decoder().eval(), (X, None), split="after:a")
    with pytest.raises(InputError, match=words):
        runtime.run_prefix(*call)


def test_what_is_no_mistake_of_structure_is_forwards_own_error() -> None:
    class Strict(Decoder):
        def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
            if isinstance(past, list):
                raise RuntimeError("the cache is full")
            return super().forward(x, past)

    runtime = prepare_split(Strict().eval(), PAIR, split="after:a")
    with pytest.raises(RuntimeError, match="the cache is full"):
        runtime.run_prefix(X, [K, V])


def test_options_may_name_what_the_example_leaves_out() -> None:
    """A cache whose first dim is no batch, though it has the batch's size in its first call."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
            h = self.a(x)
            out: torch.Tensor = self.b(h if past is None else h + past[0].sum(0, keepdim=True) * past[0].shape[0])
            return out

    torch.manual_seed(0)
    model = Cached().eval()
    spec = SplitSpec(
        "after:a",
        batch_dim={"past_0": None},
        dynamic={"past_0": {0: "P"}},
        sizes={"P": (2, 8)},
        dynamic_batch=(1, 8),
    )
    runtime = prepare_split(model, (torch.randn(3, 4),), split=spec)
    with torch.no_grad():
        for batch, length in ((3, 3), (5, 3), (2, 3), (4, 4), (4, 2)):
            x, past = torch.randn(batch, 4), [torch.randn(length, 4)]
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, past)), model(x, past))
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    assert len(runtime.plans) == 2
    with pytest.raises(SpecError, match="batch_dim names an input 'pats_0'"):
        prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("after:a", batch_dim={"pats_0": None}))


def test_which_structure_came_first_does_not_matter() -> None:
    """Beside what a plan at hand has, a call may hold what is new against another."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, past: Any = ()) -> torch.Tensor:
            h = self.a(x)
            for i, t in enumerate(past):
                h = h if t is None else h + t.mean() * (i + 1)
            out: torch.Tensor = self.b(h)
            return out

    torch.manual_seed(0)
    model, x, k, wide = Rows().eval(), torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 7)
    calls = ([k, None, k], [wide, k], [k])
    for ordered in (calls, calls[::-1]):
        runtime = prepare_split(model, (x,), split="after:a")
        with torch.no_grad():
            for past in (*ordered, *ordered):
                assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, past)), model(x, past))
