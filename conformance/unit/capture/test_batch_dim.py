"""A batch that is another dim than the first, and inputs without one: captured, guarded, sent and saved as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.capture import Example, batch_dims
from ariadne.check import check, passed
from ariadne.errors import BatchError, InputError, SpecError

ALONG = {"x": 1, "hx_0": 1, "hx_1": 1, "table": None}


class Recurrent(nn.Module):
    """Time first: seven steps, which is also the batch of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = nn.LSTM(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor], table: Tensor, mask: Tensor) -> Any:
        h, (state, _) = self.encoder(x, hx)
        h = (h + table[:, None]).masked_fill(mask.t()[..., None], 0.0)
        return self.head(self.middle(h).relu()) / x.shape[1], state


def inputs(batch: int) -> tuple[Any, ...]:
    state = torch.randn(1, batch, 6), torch.randn(1, batch, 6)
    return torch.randn(7, batch, 5), state, torch.randn(7, 6), torch.rand(batch, 7) > 0.5


def prepared(**more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Recurrent()
    spec = SplitSpec("after:middle", batch_dim=ALONG, **more)
    return model, prepare_split(model, inputs(7), split=spec)


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_one_plan_serves_all_batches_along_another_dim() -> None:
    model, runtime = prepared()
    assert runtime.plan.batched == {0: 1, 1: 1, 2: 1, 4: 0}
    for batch in (1, 2, 3, 7, 8, 64):
        given = inputs(batch)
        with torch.no_grad():
            wanted = model(*given)
        sent = BoundaryPayload.from_bytes(runtime.run_prefix(*given).to_bytes())
        assert sent.batch == batch
        assert same(runtime.run_suffix(sent), wanted)
    assert len(runtime.plans) == 1


def test_training_along_another_dim() -> None:
    model, runtime = prepared(trainable=True)
    for batch in (1, 4, 7):
        given = inputs(batch)
        model.zero_grad()
        model(*given)[0].square().sum().backward()
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        boundary = runtime.run_training_prefix(*given)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out[0].square().sum())
        runtime.backward_prefix(boundary, gradients)
        assert same([p.grad for p in model.parameters()], wanted)


def test_halves_in_files_along_another_dim(tmp_path: Path) -> None:
    model, runtime = prepared()
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / f"{side}.safetensors", side=side)
    prefix, suffix = (ariadne.load(tmp_path / f"{side}.safetensors") for side in ("prefix", "suffix"))
    for batch in (1, 7, 9):
        given = inputs(batch)
        with torch.no_grad():
            wanted = model(*given)
        assert same(suffix.run_suffix(prefix.run_prefix(*given)), wanted)
    with pytest.raises(BatchError, match=r"batch 65 lies outside dynamic_batch \(1, 64\)"):
        prefix.run_prefix(*inputs(65))


def test_what_calls_are_told() -> None:
    _, runtime = prepared()
    x, hx, table, mask = inputs(4)
    with pytest.raises(InputError, match=r"input \[2\] must be f32\[7, 6\]: dim 0 is 7 in the plan"):
        runtime.run_prefix(x, hx, torch.randn(4, 6), mask)
    with pytest.raises(BatchError, match=r"the first has 4, input \[1\]\[0\] has 5. At capture its dim 1 was"):
        runtime.run_prefix(x, inputs(5)[1], table, mask)
    with pytest.raises(BatchError, match=r"say SplitSpec\(batch_dim=\{'mask': None\}\)"):
        runtime.run_prefix(x, hx, table, inputs(5)[3])
    with pytest.raises(InputError, match=r"dim 0 is 7 in the plan.*with batch_dim=.* where the batch is another dim"):
        runtime.run_prefix(torch.randn(4, 4, 5), hx, table, mask)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"y": 1}, "batch_dim names an input 'y'; the tensors that forward is given are x, hx_0, hx_1, table, mask"),
        ({"x": 3}, "batch_dim names dim 3 of 'x', which has 3 dims"),
        ({"x": 1, "table": 1}, "says that dim 1 of 'table' is the batch, and its size is 6; that of 'x' is 7"),
        ({"x": -1}, "counted from 0"),
        ({"x": True}, "counted from 0"),
        ([("x", 1)], "counted from 0"),
    ],
)
def test_a_batch_dim_that_can_not_be(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        prepare_split(Recurrent(), inputs(7), split=SplitSpec("50%", batch_dim=given))


def test_the_batch_is_no_size_beside_it() -> None:
    spec = SplitSpec("50%", batch_dim=ALONG, dynamic={"x": {1: "T"}})
    with pytest.raises(SpecError, match="dim 1 of 'x', the first input, is the batch"):
        prepare_split(Recurrent(), inputs(7), split=spec)


def test_lengths_change_beside_a_batch_along_another_dim() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).cumsum(0)) * x.shape[0] / x.shape[1]  # type: ignore[no-any-return]

    model = Steps()
    spec = SplitSpec("after:a", batch_dim={"x": 1}, dynamic={"x": {0: "T"}})
    runtime = prepare_split(model, (torch.randn(6, 3, 4),), split=spec)
    for time, batch in ((6, 3), (9, 2), (4, 4), (2, 5)):
        x = torch.randn(time, batch, 4)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    assert len(runtime.plans) == 1


def test_an_input_that_is_as_large_as_the_batch_by_accident() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, table: Tensor, i: Tensor) -> Tensor:
            return self.b(self.a(table[i]))  # type: ignore[no-any-return]

    model = Looks()
    table, i = torch.randn(3, 4), torch.tensor([0, 2, 1])
    runtime = prepare_split(model, (table, i), split=SplitSpec("after:a", batch_dim={"table": None}))
    other = torch.tensor([2, 2, 0, 1, 1])
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(table, other)), model(table, other))
    plain = prepare_split(model, (table, i), split="after:a")
    with pytest.raises(BatchError, match=r"the first has 3, input \[1\] has 5"):
        plain.run_prefix(table, other)


def test_examples_are_resized_and_turned_along_their_dims() -> None:
    model, given = Recurrent(), inputs(7)
    example = Example.of(given, {}, along=batch_dims(model, given, {}, ALONG))
    for batch in (3, 9):
        found = example.resized(batch)
        assert [tuple(t.shape) for t in found] == [(7, batch, 5), (1, batch, 6), (1, batch, 6), (7, 6), (batch, 7)]
        rows = torch.tensor([0, 1, 2] if batch == 3 else [0, 0, 1, 1, 2, 3, 4, 5, 6])
        assert torch.equal(found[0], given[0][:, rows])
        assert found[0].is_contiguous()
    assert torch.equal(example.turned().leaves[4], given[3].flip(0))
    assert torch.equal(example.turned().leaves[3], given[2] * 0.875 + 0.0078125)


def test_the_check_goes_along_the_batch() -> None:
    assert passed(check(Recurrent(), inputs(3), batch_dim=ALONG, batches=(1, 2, 8), steps=1))
