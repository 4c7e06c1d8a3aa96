"""Losses that reach parameters by themselves: what they give to the prefix waits, and is added as in the whole model."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

import ariadne
from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import TrainingError
from conformance.unit.trap_kit import Fn, numbers, same

Parameters = Sequence[torch.Tensor]
Penalty = Callable[[Any], torch.Tensor]


class Twice(nn.Module):
    """Each layer is used twice in a row, so that gradients have several parts on each side of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(torch.tanh(self.a(x))))
        x = torch.tanh(self.b(torch.tanh(self.b(x))))
        return self.c(x)


class Tied(Twice):
    """The same, with one layer on both sides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(torch.tanh(self.a(x))))
        return self.c(torch.tanh(self.a(torch.tanh(self.b(x)))))


PENALTIES: dict[str, Penalty] = {
    "squares of all": lambda m: 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    "absolutes of weights": lambda m: 0.01 * torch.stack([p.abs().sum() for p in m.parameters() if p.dim() > 1]).sum(),
    "norm of one": lambda m: m.a.weight.norm(),
    "its own product": lambda m: (m.a.weight @ m.a.weight.T - torch.eye(6)).pow(2).sum() + m.a.weight.sum(),
    "all in one vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).norm(),
    "a spectral norm": lambda m: torch.linalg.matrix_norm(m.b.weight, 2) + torch.linalg.matrix_norm(m.a.weight, 2),
    "of one that forward does not read": lambda m: (m.unread - m.c.bias).pow(2).sum(),
    "of the suffix alone": lambda m: m.c.weight.pow(2).sum(),
}


class Pair:
    """A model and its split, trained alike with an optimizer for each side, as the docs have it."""

    def __init__(self, make: Callable[[], Any], penalty: Penalty, cut: str = "50%", first: bool = False) -> None:
        torch.manual_seed(0)
        self.whole = make()
        self.split = copy.deepcopy(self.whole)
        self.runtime = prepare_split(self.split, (numbers(2, 6),), split=SplitSpec(cut, dynamic_batch=(1, 8)))
        self.penalty, self.first = penalty, first

    def loss(self, model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if self.first:
                return self.penalty(model) + F.mse_loss(output, target)
            return F.mse_loss(output, target) + self.penalty(model)

        return loss_fn

    def sgd(self, parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, torch.optim.Optimizer]:
        """Of the whole, the prefix and the suffix; what no side reads goes to the prefix's."""
        front = self.runtime.prefix_parameters()
        back = [p for p in self.runtime.suffix_parameters() if not any(p is q for q in front)]
        mine = {id(p) for p in back}
        front = [p for p in self.split.parameters() if id(p) not in mine]
        return self.sgd(list(self.whole.parameters())), self.sgd(front), self.sgd(back)

    def steps(self, n: int = 3) -> None:
        all_of_it, front, back = self.optimizers()
        for step in range(n):
            x, y = numbers(3, 6, seed=step), numbers(3, 3, seed=9)
            all_of_it.zero_grad()
            expected = self.loss(self.whole)(self.whole(x), y)
            expected.backward()
            all_of_it.step()
            boundary = self.runtime.run_training_prefix(x)
            found, gradients = self.runtime.train_suffix(boundary, y, loss_fn=self.loss(self.split), optimizer=back)
            self.runtime.backward_prefix(boundary, gradients, optimizer=front)
            same(expected.detach(), found)
            self.equal(f"step {step}")

    def equal(self, where: str = "") -> None:
        same(state(self.whole), state(self.split), where)


def state(model: nn.Module) -> Any:
    return [(p.detach(), p.grad) for p in model.parameters()]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("make", [Twice, Tied])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_in_the_loss_trains_as_in_the_whole_with_an_optimizer_for_each_side(
    penalty: str, make: Callable[[], nn.Module], first: bool
) -> None:
    for cut in ("25%", "50%", "75%"):
        Pair(make, PENALTIES[penalty], cut, first).steps()


@pytest.mark.parametrize("make", [Twice, Tied])
def test_penalties_accumulate_on_top_of_what_is_there(make: Callable[[], nn.Module]) -> None:
    pair = Pair(make, PENALTIES["its own product"])
    x = [numbers(2, 6, seed=i) for i in range(3)]
    for part in x:
        pair.loss(pair.whole)(pair.whole(part), numbers(2, 3)).backward()
        boundary = pair.runtime.run_training_prefix(part)
        _, gradients = pair.runtime.train_suffix(boundary, numbers(2, 3), loss_fn=pair.loss(pair.split))
        pair.runtime.backward_prefix(boundary, gradients)
        pair.equal()


def test_penalties_of_several_boundaries_in_flight_each_wait_for_their_own() -> None:
    pair = Pair(Twice, PENALTIES["squares of all"])
    x, y = numbers(4, 6), numbers(4, 3)
    for i in (1, 0):
        pair.loss(pair.whole)(pair.whole(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]).backward()
    boundaries = [pair.runtime.run_training_prefix(x[2 * i : 2 * i + 2]) for i in (0, 1)]
    trained = [
        (
            boundaries[i],
            pair.runtime.train_suffix(boundaries[i], y[2 * i : 2 * i + 2], loss_fn=pair.loss(pair.split))[1],
        )
        for i in (1, 0)
    ]
    same([None, None], [pair.split.a.weight.grad, pair.split.a.bias.grad])
    for boundary, gradients in trained:
        pair.runtime.backward_prefix(boundary, gradients)
    pair.equal()


@pytest.mark.parametrize("frozen", [["a"], ["b"], ["c"], ["a", "b"]])
def test_frozen_parameters_get_none_of_a_penalty(frozen: list[str]) -> None:
    def make() -> nn.Module:
        model = Twice()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return model

    pair = Pair(make, lambda m: 0.1 * sum(p.pow(2).sum() for p in m.parameters() if p.requires_grad))
    pair.sgd = lambda parameters: torch.optim.SGD(  # type: ignore[method-assign]
        [{"params": [p], "lr": 0.01 * p.dim()} for p in parameters if p.requires_grad] or [torch.zeros(1)], lr=0.1
    )
    pair.steps()


@pytest.mark.parametrize("sides", [True, False])
def test_a_scaled_loss_scales_its_penalty(sides: bool) -> None:
    pair = Pair(Twice, PENALTIES["squares of all"])
    whole, front, back = pair.optimizers()
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    one = pair.sgd(list(pair.split.parameters()))
    for step in range(3):
        x, y = numbers(3, 6, seed=step), numbers(3, 3)
        whole.zero_grad()
        scalers[0].scale(pair.loss(pair.whole)(pair.whole(x), y)).backward()
        scalers[0].step(whole)
        scalers[0].update()
        boundary = pair.runtime.run_training_prefix(x)
        if sides:
            _, gradients = pair.runtime.train_suffix(
                boundary, y, loss_fn=pair.loss(pair.split), optimizer=back, scaler=scalers[1]
            )
            pair.runtime.backward_prefix(boundary, gradients, optimizer=front, scaler=scalers[1])
        else:
            one.zero_grad()
            _, gradients = pair.runtime.train_suffix(boundary, y, loss_fn=pair.loss(pair.split), scaler=scalers[1])
            pair.runtime.backward_prefix(boundary, gradients, scaler=scalers[1])
            scalers[1].step(one)
            scalers[1].update()
        pair.equal(f"step {step}")


def watched(model: Any, seen: list[Any]) -> list[Any]:
    """Hooks as users have them: one that clips a gradient, one that looks on, one that steps after accumulation, and those of
    nodes, which live as long as what this gives."""
    model.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for p in model.parameters():
        p.register_hook(lambda g: seen.append(("gradient", g.clone())))

    def stepped(p: torch.Tensor) -> None:
        seen.append(("step", p.grad.clone()))
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in (model.a.weight, model.b.bias):
        p.register_post_accumulate_grad_hook(stepped)

    def accumulated(p: torch.Tensor) -> Callable[..., None]:
        return lambda *_: seen.append(("node", torch.zeros(()) if p.grad is None else p.grad.clone()))

    nodes = [get_gradient_edge(p).node for p in model.parameters()]
    for node, p in zip(nodes, model.parameters(), strict=True):  # as FSDP and apex put them there
        node.register_hook(accumulated(p))
        node.register_prehook(lambda grads: seen.append(("before", grads[0].clone())))
    return nodes


@pytest.mark.parametrize("penalty", ["squares of all", "norm of one", "none"])
@pytest.mark.parametrize("make", [Twice, Tied])
def test_hooks_of_a_parameter_see_its_gradient_once_and_whole(make: Callable[[], nn.Module], penalty: str) -> None:
    pair = Pair(make, {**PENALTIES, "none": lambda m: torch.zeros(())}[penalty])
    seen: tuple[list[Any], list[Any]] = ([], [])
    nodes = [watched(model, into) for model, into in zip((pair.whole, pair.split), seen, strict=True)]
    for step in range(2):
        x, y = numbers(3, 6, seed=step), numbers(3, 3)
        pair.loss(pair.whole)(pair.whole(x), y).backward()
        boundary = pair.runtime.run_training_prefix(x)
        _, gradients = pair.runtime.train_suffix(boundary, y, loss_fn=pair.loss(pair.split))
        pair.runtime.backward_prefix(boundary, gradients)
        pair.equal()
        assert len(seen[0]) == len(seen[1])
        for kind, a in seen[0]:
            assert any(kind == k and a.shape == b.shape and torch.equal(a, b) for k, b in seen[1])
        seen[0].clear()
        seen[1].clear()
    assert len(nodes[0]) == len(nodes[1])


def test_a_penalty_of_the_inputs_is_added_once() -> None:
    pair = Pair(Twice, PENALTIES["norm of one"])
    mine, theirs = (numbers(3, 6).requires_grad_() for _ in range(2))
    seen: list[Any] = []
    theirs.register_hook(seen.append)
    y = numbers(3, 3)
    (F.mse_loss(pair.whole(mine), y) + mine.pow(3).sum()).backward()
    boundary = pair.runtime.run_training_prefix(theirs)
    _, gradients = pair.runtime.train_suffix(boundary, y, loss_fn=lambda o, t: F.mse_loss(o, t) + theirs.pow(3).sum())
    pair.runtime.backward_prefix(boundary, gradients)
    same(mine.grad, theirs.grad)
    assert len(seen) == 1


def test_parameters_of_the_loss_itself_get_their_gradient_at_once() -> None:
    pair = Pair(Twice, PENALTIES["norm of one"])
    heat = nn.Parameter(torch.ones(()))
    boundary = pair.runtime.run_training_prefix(numbers(3, 6))
    _, gradients = pair.runtime.train_suffix(
        boundary, numbers(3, 3), loss_fn=lambda o, t: F.mse_loss(o * heat, t) + pair.split.a.weight.norm()
    )
    assert heat.grad is not None
    assert pair.split.a.weight.grad is None
    pair.runtime.backward_prefix(boundary, gradients)
    assert pair.split.a.weight.grad is not None


def second_order(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(output, target)
    found = torch.autograd.grad(loss, [model.c.weight, model.c.bias], create_graph=True)
    return loss + sum(g.pow(2).sum() for g in found) + 0.1 * model.a.weight.pow(2).sum()


@pytest.mark.parametrize("cut", ["25%", "50%", "75%"])
def test_second_order_penalties_of_the_suffix_train_as_in_the_whole(cut: str) -> None:
    pair = Pair(Twice, PENALTIES["norm of one"], cut)
    pair.loss = lambda model: lambda o, t: second_order(model, o, t)  # type: ignore[method-assign]
    pair.steps()


def test_a_second_order_penalty_of_the_prefix_is_refused_by_name() -> None:
    pair = Pair(Twice, PENALTIES["norm of one"])
    boundary = pair.runtime.run_training_prefix(numbers(3, 6))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        found = torch.autograd.grad(loss, list(pair.split.parameters())[1:], create_graph=True)
        return loss + sum(g.pow(2).sum() for g in found)

    with pytest.raises(TrainingError, match=r"graph ends at the boundary: .*suffix_parameters\(\)"):
        pair.runtime.train_suffix(boundary, numbers(3, 3), loss_fn=loss_fn)


BACKWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a method": lambda loss: loss.backward(retain_graph=True),
    "the function": lambda loss: torch.autograd.backward([loss], retain_graph=True),
    "with a graph": lambda loss: loss.sum().backward(create_graph=True),
}


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_a_loss_that_walks_back_through_the_boundary_itself_is_refused(name: str) -> None:
    pair = Pair(Twice, PENALTIES["norm of one"])
    boundary = pair.runtime.run_training_prefix(numbers(3, 6))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        BACKWARDS[name](loss)
        return loss

    with pytest.raises(TrainingError, match="a backward pass of its own, which reaches the boundary"):
        pair.runtime.train_suffix(boundary, numbers(3, 3), loss_fn=loss_fn)
    pair.split.zero_grad()
    gc.collect()


@pytest.mark.parametrize("held", [False, True])
def test_a_penalty_that_the_loss_walks_back_itself_is_added_or_refused(held: bool) -> None:
    pair = Pair(Twice, PENALTIES["squares of all"])

    def loss_of(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            pair.penalty(model).backward()
            return F.mse_loss(output, target)

        return loss_fn

    if held:
        for model in (pair.whole, pair.split):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
    x, y = numbers(3, 6), numbers(3, 3)
    loss_of(pair.whole)(pair.whole(x), y).backward()
    boundary = pair.runtime.run_training_prefix(x)
    _, gradients = pair.runtime.train_suffix(boundary, y, loss_fn=loss_of(pair.split))
    front = pair.sgd(pair.runtime.prefix_parameters())
    with pytest.raises(TrainingError, match=r"put gradients on parameters of the prefix.*pass optimizer=None"):
        pair.runtime.backward_prefix(boundary, gradients, optimizer=front)
    pair.runtime.backward_prefix(boundary, gradients)
    pair.equal()


def test_an_optimizer_of_the_suffix_that_owns_what_waits_is_refused_before_it_steps() -> None:
    pair = Pair(Twice, PENALTIES["squares of all"])
    boundary = pair.runtime.run_training_prefix(numbers(3, 6))
    before = [p.detach().clone() for p in pair.split.parameters()]
    with pytest.raises(TrainingError, match=r"owns \d parameter\(s\) that the prefix uses too"):
        pair.runtime.train_suffix(
            boundary, numbers(3, 3), loss_fn=pair.loss(pair.split), optimizer=pair.sgd(list(pair.split.parameters()))
        )
    same(before, [p.detach() for p in pair.split.parameters()])


def test_over_a_wire_a_penalty_of_the_prefix_is_refused_and_one_of_the_suffix_trains() -> None:
    pair = Pair(Twice, PENALTIES["squares of all"])

    def arrived() -> BoundaryPayload:
        return BoundaryPayload.from_bytes(pair.runtime.run_training_prefix(numbers(3, 6)).to_bytes())

    with pytest.raises(TrainingError, match=r"only the prefix uses .* came over a wire: .*optimizer=None, then step"):
        pair.runtime.train_suffix(arrived(), numbers(3, 3), loss_fn=pair.loss(pair.split))
    pair.penalty = PENALTIES["of the suffix alone"]
    pair.runtime.train_suffix(arrived(), numbers(3, 3), loss_fn=pair.loss(pair.split))
    assert pair.split.c.weight.grad is not None


def test_a_tied_weight_that_the_loss_takes_from_the_prefix_alone_is_cleared_by_the_prefix_s_optimizer() -> None:
    def two(self: Any, x: torch.Tensor) -> Any:
        h = self.a(x)
        return h, self.a(torch.tanh(self.b(h)))

    torch.manual_seed(0)
    whole = Fn(two, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    split = copy.deepcopy(whole)
    runtime = prepare_split(split, (numbers(2, 6),), split="after:b")
    optimizers = [torch.optim.SGD(m.a.parameters(), lr=0.1) for m in (whole, split)]
    for step in range(3):
        x = numbers(3, 6, seed=step)
        optimizers[0].zero_grad()
        whole(x)[0].pow(2).sum().backward()
        optimizers[0].step()
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o[0].pow(2).sum())
        runtime.backward_prefix(boundary, gradients, optimizer=optimizers[1])
        same(state(whole), state(split), f"step {step}")


def test_two_threads_that_train_with_penalties_add_up_all_there_is() -> None:
    pair = Pair(Tied, PENALTIES["squares of all"])
    for p in pair.whole.parameters():
        p.data.mul_(4).round_()  # numbers whose sums are the same in any order
    pair.split.load_state_dict(pair.whole.state_dict())
    x, y = numbers(2, 6).mul(4).round(), numbers(2, 3).mul(4).round()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return sum(p.sum() * 2 for p in pair.split.parameters()) + 0 * output.sum()  # type: ignore[return-value]

    def rounds() -> None:
        for _ in range(20):
            boundary = pair.runtime.run_training_prefix(x)
            _, gradients = pair.runtime.train_suffix(boundary, y, loss_fn=loss_fn)
            pair.runtime.backward_prefix(boundary, gradients)

    threads = [threading.Thread(target=rounds) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for p in pair.split.parameters():
        same(torch.full_like(p, 160.0), p.grad)


class KeepsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.loss = nn.Linear(6, 6), 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h: torch.Tensor = self.layer(x)
        self.loss = h.square().mean()
        return h


def test_a_loss_that_an_opaque_part_keeps_on_itself_before_the_cut_is_refused_by_name() -> None:
    model = nn.Sequential(ariadne.opaque(KeepsALoss()), nn.Linear(6, 6), nn.Linear(6, 3))
    runtime = prepare_split(model, (torch.randn(3, 6),), split=SplitSpec("after:1", trainable=True))
    boundary = runtime.run_training_prefix(torch.randn(3, 6))
    part: Any = model[0]
    with pytest.raises(TrainingError, match="otherwise than through the boundary"):
        runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum() + part.loss)


class Residual(nn.Module):
    """The input crosses a cut after `a`; after it, it is used so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.a, self.b, self.times = nn.Linear(6, 6), nn.Linear(6, 6), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(x + self.a(x).relu())
        return h + x.sin() if self.times > 1 else h


@pytest.mark.parametrize("times", [1, 2])
def test_an_input_in_the_loss_that_crosses_gets_the_same_gradient_or_an_error(times: int) -> None:
    torch.manual_seed(0)
    whole = Residual(times)
    split = copy.deepcopy(whole)
    runtime = prepare_split(split, (numbers(2, 6),), split="after:a")
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(5, 6).requires_grad_()
        mine = x.detach().clone().requires_grad_()

        def loss_of(output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return output.pow(2).mean() + 0.1 * given.pow(2).sum()

        loss_of(whole(x), x).backward()
        boundary = runtime.run_training_prefix(mine)
        if times > 1:
            with pytest.raises(TrainingError, match="crosses the cut and is used several times"):
                runtime.train_suffix(boundary, mine, loss_fn=loss_of)
            return
        _, gradients = runtime.train_suffix(boundary, mine, loss_fn=loss_of)
        runtime.backward_prefix(boundary, gradients)
        same((x.grad, [p.grad for p in whole.parameters()]), (mine.grad, [p.grad for p in split.parameters()]))
