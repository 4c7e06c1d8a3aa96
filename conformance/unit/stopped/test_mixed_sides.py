"""What a split with a graph before the cut and Python after it does with parameters of both sides, and its copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ariadne import BoundaryPayload, MixedSplit, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, TrainingError

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Ties a weight over the cut, and counts after it, so that no graph holds the suffix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.middle, self.head, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.head.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.encoder(x).relu())
        self.calls += 1
        return self.head(h)  # type: ignore[no-any-return]


def mixed(net: nn.Module) -> MixedSplit:
    made = prepare_split(net, (X,), split=SplitSpec("after:middle", trainable=True), fallback="python-suffix")
    assert isinstance(made, MixedSplit)
    return made


def total(out: Tensor, _: Any = None) -> Tensor:
    return out.square().sum()


def test_a_hook_over_parameters_of_both_sides_is_refused() -> None:
    net = Net()
    runtime, seen = mixed(net), list[int]()
    handle = register_multi_grad_hook([net.middle.weight, net.head.bias], lambda found: seen.append(len(found)))
    boundary = runtime.run_training_prefix(X)
    with pytest.raises(TrainingError, match="register_multi_grad_hook"):
        runtime.train_suffix(boundary, loss_fn=total)
    handle.remove()
    register_multi_grad_hook([net.head.bias], lambda found: seen.append(len(found)))
    runtime.train_suffix(boundary, loss_fn=total)
    assert seen == [1]


def test_over_a_wire_no_optimizer_steps_by_a_share_of_a_gradient() -> None:
    net = Net()
    runtime = mixed(net)
    everything = torch.optim.SGD(net.parameters(), lr=0.1)
    boundary = runtime.run_training_prefix(X)
    sent = BoundaryPayload.from_bytes(boundary.to_bytes())
    with pytest.raises(TrainingError, match="both sides use"):
        runtime.train_suffix(sent, loss_fn=total, optimizer=everything)
    _, gradients = runtime.train_suffix(sent, loss_fn=total)
    with pytest.raises(TrainingError, match="both sides use"):
        runtime.backward_prefix(boundary, gradients, optimizer=everything)


def test_an_input_that_is_computed_from_a_parameter_of_the_suffix_is_refused() -> None:
    net = Net()
    runtime = mixed(net)
    with pytest.raises(TrainingError, match="an input was computed"):
        runtime.run_training_prefix(X * net.head.bias)


def test_autocast_in_two_blocks_is_refused_for_a_weight_of_both_sides() -> None:
    net = Net()
    runtime = mixed(net)
    with torch.autocast("cpu"):
        boundary = runtime.run_training_prefix(X)
    with torch.autocast("cpu"), pytest.raises(TrainingError, match=r"casts the parameter 'encoder\.weight' once"):
        runtime.train_suffix(boundary, loss_fn=total)


def test_it_is_copied_with_its_model() -> None:
    net = Net()
    runtime = mixed(net)
    other = copy.deepcopy(runtime)
    assert other.model is not net
    with torch.no_grad():
        net.middle.weight.zero_()
        other.model.head.bias.add_(1)  # type: ignore[union-attr, operator]
    twin = copy.deepcopy(other.model)
    total(twin(X)).backward()
    boundary = other.run_training_prefix(X)
    _, gradients = other.train_suffix(BoundaryPayload.from_bytes(boundary.to_bytes()), loss_fn=total)
    other.backward_prefix(boundary, gradients)
    for mine, theirs in zip(other.model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        assert torch.equal(other.run_suffix(other.run_prefix(X)), twin(X))


class Skips(nn.Module):
    """Keeps what its first layer gives, which is used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        first = self.encoder(x)
        h = self.middle(first)
        self.calls += 1
        self.first = first
        return self.head(h + first)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "ask",
    [
        lambda t, loss: t.register_hook(print),
        lambda t, loss: t.retain_grad(),
        lambda t, loss: t.grad_fn.register_prehook(print),
        lambda t, loss: t.grad_fn.register_hook(print),
        lambda t, loss: torch.autograd.grad(loss, t, retain_graph=True),
    ],
)
def test_a_loss_that_asks_for_the_gradient_of_what_is_used_before_the_cut_too_is_refused(ask: Any) -> None:
    net = Skips()
    runtime = mixed(net)

    def loss_fn(out: Tensor, _: Any) -> Tensor:
        loss = total(out)
        ask(net.first, loss)
        return loss

    with pytest.raises(TrainingError, match="which is made before the cut"):
        runtime.train_suffix(runtime.run_training_prefix(X), loss_fn=loss_fn)


class Asks(Skips):
    """Computes more before the cut for a larger batch."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.encoder(x * 1 if len(x) > 3 else x)
        h = self.middle(first)
        self.calls += 1
        return self.head(h + first)  # type: ignore[no-any-return]


def test_a_suffix_that_needs_other_tensors_says_what_is_other_than_in_the_example() -> None:
    spec = SplitSpec("after:middle", dynamic_batch=(2, 8))
    runtime = prepare_split(Asks().eval(), (X,), split=spec, fallback="python-suffix")
    with pytest.raises(BoundaryError, match="the batch is 6, where the example has 3"):
        runtime.run_suffix(runtime.run_prefix(X.repeat(2, 1)))
