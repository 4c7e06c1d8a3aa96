"""Padding to buckets: only where each sample is computed by itself, and then with the model's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitRuntime, SplitSpec, TracePlan, prepare_split
from ariadne.compiled.rows import Mixed, rows
from ariadne.cut import CompileOptions
from ariadne.errors import SpecError
from conformance.suite.oracle import beyond, in_double
from conformance.unit.trap_kit import numbers, same


class Does(nn.Module):
    """A layer, a function, and a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x)) * 2


def plan_of(function: Callable[[torch.Tensor], torch.Tensor]) -> TracePlan:
    torch.manual_seed(0)
    return prepare_split(Does(function).eval(), (numbers(4, 3, 6),), split="cut:1").plan


def recurrent(batch_first: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    layer = nn.LSTM(6, 5, batch_first=batch_first).eval()
    return lambda x: layer(x if batch_first else x.transpose(0, 1))[0]


def table(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.zeros(x.shape[0], 2), torch.arange(2.0).expand(x.shape[0], 2)], 1)


ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "blocks": lambda x: torch.softmax(x.reshape(-1, 6), 1).view(x.shape[0], 3, 6).transpose(0, 2)[:, 1],
    "broadcast": lambda x: x.transpose(0, 1) + x[:, 0],
    "chunks": lambda x: torch.cat(x.chunk(3, 1)[::-1], 2).squeeze(1),
    "gather": lambda x: x.gather(2, x.argsort(2)) + x.cumsum(1).flip(2),
    "group_norm": lambda x: F.group_norm(x, 3),
    "lstm": recurrent(True),
    "lstm, time first": recurrent(False),
    "made": lambda x: F.pad(table(x), (0, 4, 0, 1)) + x,
    "picks": lambda x: x[:, [2, 0]] @ x.transpose(1, 2),
    "pools": lambda x: F.max_pool2d(x.view(-1, 1, 3, 6), 2).amax((1, 3)).unsqueeze(0),
    "repeat": lambda x: x.mean(1).repeat(1, 2) + torch.ones(2).repeat(x.shape[0], 6),
    "tied": lambda x: torch.matmul(x, torch.eye(6)).norm(dim=2, keepdim=True).expand(-1, 3, 2),
}
MEETING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "arange": (
        lambda x: x * (5 - torch.arange(x.shape[0]))[:, None, None],
        "there is no rule|takes the batch as a number",
    ),
    "attends": (lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3), "attend to one another"),
    "batch as a number": (lambda x: x / x.shape[0], "takes the batch as a number"),
    "batch in a constant": (lambda x: x + torch.full((6,), x.shape[0]), "takes the batch as a number"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "by itself"),
    "cat": (lambda x: torch.cat([x, x]), "along the batch"),
    "cumsum": (lambda x: x.cumsum(0), "along the batch"),
    "counted": (
        lambda x: F.embedding((x[:, 0] > 0).long(), torch.eye(6), scale_grad_by_freq=True).mean(1),
        "counts them",
    ),
    "dropout": (lambda x: F.dropout(x, 0.5, True), "random numbers"),
    "flip": (lambda x: x + x.flip(0), "along the batch"),
    "last": (lambda x: x - x[-1], "along the batch"),
    "mean": (lambda x: x - x.mean(0), "along the batch"),
    "no rule": (lambda x: torch.cdist(x, x), "there is no rule"),
    "permuted pieces": (lambda x: x.transpose(0, 1).reshape(-1, 6), "one piece"),
    "pairs": (lambda x: x[:, 0] @ x[:, 0].t(), "samples with one another|along the batch|one dim"),
    "sides": (lambda x: x[:, 0, :1] + x[:, 0, 0][None], "different dims"),
    "softmax": (lambda x: x.softmax(0), "along the batch"),
    "tiled": (lambda x: x.repeat(2, 1, 1), "along the batch"),
    "weights": (lambda x: F.linear(torch.ones(2, 6), x[:, 0]), "second argument|one dim"),
    "written": (lambda x: torch.zeros(2, 6).copy_(x.sum(0)[:2]), "along the batch"),
}


@pytest.mark.parametrize("name", sorted(ALONE))
def test_what_counts_as_alone_does_not_change_with_the_other_samples(name: str) -> None:
    plan = plan_of(ALONE[name])
    if (
        plan.captured_by == "observed-per-batch"
    ):  # torch 2.11 gives an LSTM's state a dim too many where sizes are symbols
        assert name.startswith("lstm")
        assert torch.__version__ < "2.15"
        with pytest.raises(Mixed, match="the shape says None"):
            rows(plan, plan.nodes, ["x"])
        return
    found = rows(plan, plan.nodes, ["x"])
    along = found[plan.nodes[-1].outputs[0]]
    assert along is not None
    torch.manual_seed(0)
    model, x = Does(ALONE[name]).eval(), numbers(4, 3, 6)
    other = torch.cat([x[:2], numbers(2, 3, 6, seed=9) * 100])
    with torch.no_grad():
        one, two = (model(t).narrow(along.dim, 0, 2 * along.each) for t in (x, other))
        rest = [model(t).narrow(along.dim, 2 * along.each, 2 * along.each) for t in (x, other)]
    assert torch.equal(one, two)
    assert name == "made" or not torch.equal(*rest)


@pytest.mark.parametrize("name", sorted(MEETING))
def test_samples_that_may_meet_are_not_taken_for_alone(name: str) -> None:
    function, words = MEETING[name]
    plan = plan_of(function)
    with pytest.raises(Mixed, match=words):
        rows(plan, plan.nodes, ["x"])


class Seen(list):
    """A backend that keeps the batches that its graphs run at."""

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.append(next(a.shape[0] for a in args if isinstance(a, torch.Tensor) and a.dim() == 4))
            return graph.forward(*args)

        return run


class Pictures(nn.Module):
    """A stem, BatchNorm, a head; what is said of the whole batch comes last, where it is asked for."""

    def __init__(self, together: bool = False) -> None:
        super().__init__()
        self.stem, self.norm, self.body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.together = together

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.body(self.norm(self.stem(x)).relu())
        return {"out": y - y.mean(0) if self.together else y, "batch": x.shape[0]}


def made(model: nn.Module, **options: Any) -> SplitRuntime:
    spec = SplitSpec("after:norm", trainable=True, dynamic_batch=(1, 16))
    return prepare_split(model, (numbers(4, 3, 8, 8),), split=spec, mode="compiled", compile_options=options)


def near(model: nn.Module, x: torch.Tensor, found: Any) -> None:
    def whole(m: nn.Module, t: torch.Tensor) -> Any:
        with torch.no_grad():
            return m(t)

    wrong, _ = beyond(in_double(model, whole, x, 0), whole(model, x), found)
    assert wrong is None, str(wrong)


def test_batches_are_padded_to_buckets_and_cut_back() -> None:
    seen = Seen()
    torch.manual_seed(0)
    runtime = made(Pictures().eval(), backend=seen, batch_buckets=(2, 8))
    for batch in (8, 1, 2, 3, 7, 11):
        x = numbers(batch, 3, 8, 8, seed=batch)
        boundary = runtime.run_prefix(x)
        assert [t.shape[0] for t in boundary.tensors.values()] == [batch]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in boundary.tensors.values())
        output = runtime.run_suffix(boundary)
        near(runtime.model, x, output)
        assert output["batch"] == batch
    assert seen == [8, 8, 2, 2, 2, 2, 8, 8, 8, 8, 11, 11]
    assert not any(s.notes for s in runtime.report().segments)


def test_padding_changes_no_gradient_beyond_rounding() -> None:
    seen = Seen()
    torch.manual_seed(0)
    model = Pictures().eval()
    twin = copy.deepcopy(model).double()
    runtime = made(model, backend=seen, batch_buckets=(4, 8))
    x = numbers(5, 3, 8, 8).requires_grad_()
    boundary = runtime.run_training_prefix(x)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out["out"].pow(2).mean())
    runtime.backward_prefix(boundary, gradients)
    again = x.detach().double().requires_grad_()
    twin(again)["out"].pow(2).mean().backward()
    assert set(seen) == {8}
    for a, b in zip((x, *model.parameters()), (again, *twin.parameters()), strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-6)


def test_a_side_whose_samples_meet_runs_at_its_own_batch_and_says_so() -> None:
    seen = Seen()
    torch.manual_seed(0)
    runtime = made(Pictures(together=True).eval(), backend=seen, batch_buckets=(2, 8))
    near(runtime.model, x := numbers(3, 3, 8, 8), runtime.run_suffix(runtime.run_prefix(x)))
    assert seen == [8, 3]
    prefix, suffix = runtime.report().segments
    assert not prefix.notes
    assert "aten.mean.dim: it goes along the batch" in suffix.notes[0]


def test_training_of_batch_norm_is_not_padded() -> None:
    seen = Seen()
    runtime = made(Pictures().train(), backend=seen, batch_buckets=(2, 8))
    runtime.run_training_prefix(numbers(3, 3, 8, 8))
    assert seen == [3]
    assert "batch_norm" in runtime.report().segments[0].notes[0]


def test_an_input_that_is_written_is_not_padded() -> None:
    class Writes(Pictures):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            x[:, :1].add_(1)
            return super().forward(x)

    torch.manual_seed(0)
    runtime = made(Writes().eval(), backend=Seen(), batch_buckets=(2, 8))
    whole, split = numbers(3, 3, 8, 8), numbers(3, 3, 8, 8)
    with torch.no_grad():
        expected = runtime.model(whole)
    near(runtime.model, numbers(3, 3, 8, 8), runtime.run_suffix(runtime.run_prefix(split)))
    same(whole, split)
    assert expected["batch"] == 3
    assert "memory of an input" in runtime.report().segments[0].notes[0]


@pytest.mark.parametrize("buckets", [(0, 4), (4, 2), (4, 4), ("4",), 4], ids=repr)
def test_buckets_are_ascending_batches(buckets: Any) -> None:
    with pytest.raises(SpecError, match="batch_buckets are batches, ascending"):
        CompileOptions.parse({"batch_buckets": buckets})


def test_buckets_are_not_for_packages() -> None:
    with pytest.raises(SpecError, match="'batch_buckets' is for torch"):
        CompileOptions.parse({"backend": "aot_inductor", "batch_buckets": (1, 2)})
