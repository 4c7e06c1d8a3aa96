"""Who owns a parameter, and when: frozen, replaced, computed, owned by an optimizer of both sides, or reached behind the loss."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from ariadne import BoundaryPayload, PythonSplit, SplitRuntime, prepare_split
from ariadne.errors import TrainingError
from conformance.unit.trap_kit import numbers, same

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Layers one after the other; the first and the last may have one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        if tied:
            self.d.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(self.b(torch.tanh(self.a(self.a(x)))))))


def twins(tied: bool) -> tuple[Any, Any, SplitRuntime]:
    torch.manual_seed(0)
    whole = Net(tied)
    split = copy.deepcopy(whole)
    return whole, split, prepare_split(split, (numbers(4, 6),), split="after:b")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters), lr=0.01)


def sides(runtime: SplitRuntime) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    front = runtime.prefix_parameters()
    return adam(front), adam(p for p in runtime.suffix_parameters() if not any(p is q for q in front))


def state(model: nn.Module) -> Any:
    return [(p.detach(), p.grad) for p in model.parameters()]


def plain(model: Any, output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def same_step(
    whole: Any, split: Any, runtime: Any, one: Any, fronts: tuple[Any, Any], i: int, loss: Loss = plain
) -> None:
    """A step of both on the numbers of seed `i`: one loss, and all parameters and gradients alike after it."""
    x = numbers(4, 6, seed=i)
    one.zero_grad()
    expected = loss(whole, whole(x))
    expected.backward()
    one.step()
    boundary = runtime.run_training_prefix(x)
    found, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: loss(split, o), optimizer=fronts[1])
    runtime.backward_prefix(boundary, gradients, optimizer=fronts[0])
    same(expected.detach(), found)
    same(state(whole), state(split), f"step {i}")


def in_step(tied: bool, loss: Loss = plain, change: Callable[[Any, int], Any] = lambda m, i: None) -> None:
    whole, split, runtime = twins(tied)
    one, fronts = adam(whole.parameters()), sides(runtime)
    for i in range(3):
        change(whole, i), change(split, i)
        same_step(whole, split, runtime, one, fronts, i, loss)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["a.weight", "b.bias", "c.weight", "d.bias"])
def test_a_parameter_frozen_for_a_step_is_not_stepped_by_its_old_gradient(name: str, tied: bool) -> None:
    in_step(tied, change=lambda m, i: m.get_parameter(name).requires_grad_(i != 1))


def test_a_shared_parameter_that_loss_fn_freezes_gets_no_gradient() -> None:
    def loss(model: Any, output: torch.Tensor) -> torch.Tensor:
        model.d.weight.requires_grad_(False)
        return plain(model, output)

    in_step(True, loss, lambda m, i: m.d.weight.requires_grad_())


def test_a_parameter_replaced_after_the_sides_were_laid_out_is_owned_by_its_side() -> None:
    _, split, runtime = twins(False)
    old = split.c.weight
    assert any(p is old for p in runtime.suffix_parameters())
    split.c.weight = nn.Parameter(old.detach() * 2)
    assert any(p is split.c.weight for p in runtime.suffix_parameters())
    assert not any(p is old for p in runtime.suffix_parameters())
    split.c.weight = split.b.weight
    assert runtime.shared_parameters() == [split.b.weight]


@pytest.mark.parametrize("tied", [False, True])
def test_one_optimizer_of_both_sides_is_refused_where_it_would_step_too_early(tied: bool) -> None:
    _, split, runtime = twins(tied)
    boundary = runtime.run_training_prefix(numbers(4, 6))
    everything = adam(split.parameters())
    with pytest.raises(TrainingError, match=r"owns 4 parameter\(s\) that the prefix uses too"):
        runtime.train_suffix(boundary, loss_fn=lambda o, _: o.mean(), optimizer=everything)
    for p in (*split.a.parameters(), *split.b.parameters()):
        p.requires_grad_(False)
    runtime.train_suffix(
        runtime.run_training_prefix(numbers(4, 6)), loss_fn=lambda o, _: o.mean(), optimizer=everything
    )


def test_the_gradient_of_a_shared_parameter_inside_loss_fn_is_refused_and_that_of_others_is_not() -> None:
    def penalty(model: Any, output: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        loss = plain(model, output)
        (found,) = torch.autograd.grad(loss, parameter, create_graph=True)
        return loss + found.pow(2).sum()

    in_step(True, lambda m, o: penalty(m, o, m.c.weight))
    with pytest.raises(TrainingError, match="would get the suffix's share alone"):
        in_step(True, lambda m, o: penalty(m, o, m.d.weight))


def reentrant(model: Any, output: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(
        lambda o: o.pow(2).mean() + model.a.weight.pow(2).sum(), output, use_reentrant=True
    )
    return found


def test_a_reentrant_checkpoint_in_loss_fn_adds_at_once_to_what_waits() -> None:
    in_step(True, reentrant)


def test_a_reentrant_checkpoint_in_loss_fn_that_reaches_the_prefix_alone_is_refused_with_an_optimizer() -> None:
    with pytest.raises(TrainingError, match="as a reentrant checkpoint does too"):
        in_step(False, reentrant)
    whole, split, runtime = twins(False)
    reentrant(whole, whole(numbers(4, 6))).backward()
    boundary = runtime.run_training_prefix(numbers(4, 6))
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: reentrant(split, o))
    runtime.backward_prefix(boundary, gradients)
    same(state(whole), state(split))


def test_a_reentrant_checkpoint_in_loss_fn_is_refused_where_hooks_would_run_twice() -> None:
    def hooked(model: Any, i: int) -> None:
        model.a.weight.register_hook(lambda g: g * 2)

    with pytest.raises(TrainingError, match="waits for the prefix's part of its gradient and has hooks"):
        in_step(True, reentrant, hooked)


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_computed_from_one_leaf_in_the_place_of_parameters_of_both_sides_are_refused(shared: bool) -> None:
    _, split, runtime = twins(False)
    leaf = numbers(6).requires_grad_()
    one = leaf.repeat(6, 1)
    with _reparametrize_module(split, {"b.weight": one, "c.weight": one if shared else leaf.repeat(6, 1) * 2}):
        boundary = runtime.run_training_prefix(numbers(4, 6))
        with pytest.raises(TrainingError, match="is computed from a leaf whose gradient the other side"):
            runtime.train_suffix(boundary, loss_fn=lambda o, _: o.mean())


def test_tensors_computed_from_a_leaf_of_one_side_train_as_in_the_whole() -> None:
    whole, split, runtime = twins(False)
    leaves = [numbers(6).requires_grad_() for _ in range(2)]
    with _reparametrize_module(whole, {"b.weight": leaves[0].repeat(6, 1)}):
        whole(numbers(4, 6)).mean().backward()
    with _reparametrize_module(split, {"b.weight": leaves[1].repeat(6, 1)}):
        boundary = runtime.run_training_prefix(numbers(4, 6))
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o.mean())
        runtime.backward_prefix(boundary, gradients)
    same(leaves[0].grad, leaves[1].grad)
    same(state(whole), state(split))


@pytest.mark.parametrize("wanted", ["a.weight", "x"])
@pytest.mark.parametrize("options", [{}, {"allow_unused": True}, {"materialize_grads": True}])
@pytest.mark.parametrize("wire", [False, True])
def test_gradients_of_what_lies_behind_the_boundary_are_refused_in_loss_fn(
    wanted: str, options: dict[str, Any], wire: bool
) -> None:
    _, split, runtime = twins(False)
    x = numbers(4, 6).requires_grad_()
    leaf = x if wanted == "x" else split.get_parameter(wanted)

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        found = torch.autograd.grad(output.pow(2).sum(), [leaf], create_graph=True, **options)
        return output.sum() + sum(g.pow(2).sum() for g in found if g is not None)

    boundary = runtime.run_training_prefix(x)
    boundary = BoundaryPayload.from_bytes(boundary.to_bytes()) if wire and wanted != "x" else boundary
    with pytest.raises(TrainingError, match="with respect to something that the graph of the loss does not hold"):
        runtime.train_suffix(boundary, loss_fn=loss_fn)
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def test_backward_with_inputs_behind_the_boundary_is_refused_in_loss_fn() -> None:
    _, split, runtime = twins(False)

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        output.sum().backward(inputs=[split.a.weight], retain_graph=True)
        return output.sum()

    with pytest.raises(TrainingError, match="with respect to something that the graph of the loss does not hold"):
        runtime.train_suffix(runtime.run_training_prefix(numbers(4, 6)), loss_fn=loss_fn)


def test_gradients_of_a_prefix_parameter_that_do_not_pass_the_boundary_are_given() -> None:
    _, split, runtime = twins(False)

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        (found,) = torch.autograd.grad(split.a.weight.pow(2).sum(), split.a.weight, allow_unused=True)
        assert torch.equal(found, 2 * split.a.weight)
        return output.sum()

    runtime.train_suffix(runtime.run_training_prefix(numbers(4, 6)), loss_fn=loss_fn)


def test_other_threads_ask_for_gradients_as_ever_while_a_loss_runs() -> None:
    _, split, runtime = twins(False)
    found = []

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        def elsewhere() -> None:
            loss = split.a(numbers(4, 6)).sum()
            found.append(torch.autograd.grad(loss, [split.a.weight]))

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join(60)
        return output.sum()

    runtime.train_suffix(runtime.run_training_prefix(numbers(4, 6)), loss_fn=loss_fn)
    assert len(found) == 1


class Asking(Net):
    """The same, where a number that Python reads decides what runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if bool((x > -1e9).all()) else -x)


def test_where_python_branches_the_sides_are_laid_out_once_and_replaced_parameters_are_followed() -> None:
    model = Asking(False)
    runtime = prepare_split(model, (numbers(4, 6),), split="after:b")
    front, back = sides(runtime)
    laid_out = []
    for i in range(3):
        if i == 2:
            model.c.weight = nn.Parameter(model.c.weight.detach() + 1)
        boundary = runtime.run_training_prefix(numbers(4, 6, seed=i))
        _, gradients = runtime.train_suffix(boundary, loss_fn=plain_of, optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        laid_out.append(runtime._slots[3])
    assert laid_out[0] is laid_out[1] is laid_out[2]
    assert any(p is model.c.weight for p in runtime.suffix_parameters())
    model.d = nn.Linear(6, 6)
    assert any(p is model.d.weight for p in runtime.suffix_parameters())


def plain_of(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.pow(2).mean()


class Counting(torch.optim.SGD):
    """An optimizer that clears gradients in a way of its own."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


class Around:
    """An optimizer that is none of torch's classes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.cleared = inner, 0

    def __getattr__(self, name: str) -> Any:
        if name == "zero_grad":
            self.cleared += 1
        return getattr(self.inner, name)


@pytest.mark.parametrize("how", [Counting, lambda p, lr: Around(torch.optim.SGD(p, lr))], ids=["subclass", "wrapper"])
def test_an_optimizer_clears_gradients_in_its_own_way(how: Callable[..., Any]) -> None:
    _, split, runtime = twins(False)
    optimizer = how(runtime.suffix_parameters(), lr=0.1)
    split.d.weight.grad = torch.full_like(split.d.weight, 7.0)
    boundary = runtime.run_training_prefix(numbers(4, 6))
    runtime.train_suffix(boundary, loss_fn=plain_of, optimizer=optimizer)
    assert optimizer.cleared == 1
    assert float(split.d.weight.grad.abs().max()) < 7


def scheduled(optimizer: torch.optim.Optimizer, heard: list[str]) -> None:
    """A learning rate that follows how often `step` was called."""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    inner = optimizer.step
    optimizer.step = lambda *given: (heard.append("step"), inner(*given))[1]  # type: ignore[method-assign]


def wrapped_again(optimizer: torch.optim.Optimizer, heard: list[str]) -> None:
    """A class whose `step` somebody wrapped as torch does, with the attributes of torch's own wrapper."""

    @functools.wraps(torch.optim.SGD.step)
    def told(*given: Any) -> Any:
        heard.append("step")
        return torch.optim.SGD.step(*given)

    optimizer.__class__ = type("Told", (torch.optim.SGD,), {"step": told})


def renamed(optimizer: torch.optim.Optimizer, heard: list[str]) -> None:
    """A class whose `step` has torch's own wrapper, and was renamed after that of another."""

    def told(*given: Any) -> Any:
        heard.append("step")
        return torch.optim.SGD.step(*given)

    step = functools.update_wrapper(torch.optim.Optimizer.profile_hook_step(told), torch.optim.SGD.step)
    optimizer.__class__ = type("Told", (torch.optim.SGD,), {"step": step})


HEARD: dict[str, Callable[[torch.optim.Optimizer, list[str]], Any]] = {
    "before": lambda o, heard: o.register_step_pre_hook(lambda *_: heard.append("step")),
    "after": lambda o, heard: o.register_step_post_hook(lambda *_: heard.append("step")),
    "before all": lambda _, heard: register_optimizer_step_pre_hook(lambda *_: heard.append("step")),
    "after all": lambda _, heard: register_optimizer_step_post_hook(lambda *_: heard.append("step")),
    "scheduled": scheduled,
    "wrapped again": wrapped_again,
    "renamed": renamed,
    "profiled": lambda *_: torch.autograd.profiler.profile().__enter__(),
}


@pytest.mark.parametrize("how", HEARD)
def test_whoever_watches_the_steps_of_an_optimizer_hears_of_each(how: str) -> None:
    _, split, runtime = twins(False)
    optimizer, heard, before = torch.optim.SGD(runtime.suffix_parameters(), lr=0.1), list[str](), split.d.weight.clone()
    watching = HEARD[how](optimizer, heard)
    try:
        boundary = runtime.run_training_prefix(numbers(4, 6))
        runtime.train_suffix(boundary, loss_fn=plain_of, optimizer=optimizer)
    finally:
        if how == "profiled":
            watching.__exit__(None, None, None)
            heard += ["step" for event in watching.function_events if event.name == "Optimizer.step#SGD.step"]
        elif hasattr(watching, "remove"):
            watching.remove()
    assert heard == ["step"]
    assert not torch.equal(before, split.d.weight)


class Slots:
    """An optimizer of one's own, with slots."""

    __slots__ = ("cleared", "param_groups")

    def __init__(self, p: Any) -> None:
        self.param_groups, self.cleared = [{"params": [*p]}], 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad)


def test_an_optimizer_with_slots_steps() -> None:
    _, split, runtime = twins(False)
    optimizer, before = Slots(runtime.suffix_parameters()), split.d.weight.clone()
    runtime.train_suffix(runtime.run_training_prefix(numbers(4, 6)), loss_fn=plain_of, optimizer=optimizer)
    assert optimizer.cleared == 1
    assert not torch.equal(before, split.d.weight)


@pytest.mark.parametrize(
    ("what", "told"), [(object(), "'object' without param_groups, step"), (torch.optim.SGD, "the class SGD")]
)
def test_what_is_no_optimizer_is_refused_before_anything_ran(what: Any, told: str) -> None:
    _, split, runtime = twins(False)
    boundary = runtime.run_training_prefix(numbers(4, 6))
    with pytest.raises(TrainingError, match=told):
        runtime.train_suffix(boundary, loss_fn=plain_of, optimizer=what)
    assert split.d.weight.grad is None
    _, gradients = runtime.train_suffix(boundary, loss_fn=plain_of)
    with pytest.raises(TrainingError, match=told):
        runtime.backward_prefix(boundary, gradients, optimizer=what)
    runtime.backward_prefix(boundary, gradients)


class Beside(Net):
    """A scale and a teacher in plain lists: `parameters()` has neither, so no optimizer of the whole model's steps them."""

    def __init__(self) -> None:
        super().__init__(False)
        self.scales, self.teachers = [nn.Parameter(torch.full((6,), 1.5))], [nn.Sequential(nn.Linear(6, 6))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(torch.tanh(self.a(x))) * self.scales[0]
        return self.d(torch.tanh(self.c(h))) * self.scales[0] + self.teachers[0](h)


@pytest.mark.parametrize("drawn", [False, True], ids=["graph", "python"])
def test_parameters_in_plain_lists_are_no_ones(drawn: bool) -> None:
    torch.manual_seed(0)
    split = Beside()
    if drawn:  # a draw of numpy's: no graph holds it
        split.c.register_forward_hook(lambda module, args, output: output + float(numpy.random.rand()) * 0)
    whole = copy.deepcopy(split)
    runtime: Any = prepare_split(split, (numbers(4, 6),), split="after:b", fallback="python")
    assert isinstance(runtime, PythonSplit) == drawn
    assert {*runtime.prefix_parameters(), *runtime.suffix_parameters()} == {*split.parameters()}
    assert not runtime.shared_parameters()
    one, fronts = adam(whole.parameters()), (adam(runtime.prefix_parameters()), adam(runtime.suffix_parameters()))
    for i in range(3):
        same_step(whole, split, runtime, one, fronts, i)
        same(state(whole.teachers[0]), state(split.teachers[0]), f"step {i}")
        same(whole.scales[0].grad, split.scales[0].grad)


@pytest.mark.parametrize("drawn", [False, True], ids=["graph", "python"])
def test_an_optimizer_of_both_sides_that_the_prefix_alone_gets_may_not_step_what_adds_up(drawn: bool) -> None:
    torch.manual_seed(0)
    model: Any = Beside() if drawn else Net(False)
    if drawn:
        model.c.register_forward_hook(lambda module, args, output: output + float(numpy.random.rand()) * 0)
    runtime: Any = prepare_split(model, (numbers(4, 6),), split="after:b", fallback="python")
    both = adam(model.parameters())

    def round_() -> None:
        boundary = runtime.run_training_prefix(numbers(4, 6))
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: plain(model, o))
        runtime.backward_prefix(boundary, gradients, optimizer=both)

    round_()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TrainingError, match=r"owns 4 parameter\(s\) of the suffix .* had gradients before this round"):
        round_()
    same(before, [p.detach() for p in model.parameters()])
    both.zero_grad()
    round_()


@pytest.mark.parametrize("upstream", ["the input itself", "a module before the split"])
def test_the_optimizer_of_the_suffix_may_not_own_what_an_input_is_computed_from(upstream: str) -> None:
    _, _, runtime = twins(False)
    before = nn.Linear(6, 6)
    x = numbers(4, 6).requires_grad_()
    given, own = (x, [x]) if upstream == "the input itself" else (before(x.detach()), [*before.parameters()])
    boundary = runtime.run_training_prefix(given)
    weights = nn.Parameter(torch.ones(()))  # of the loss alone
    early, late = adam([*runtime.suffix_parameters(), *own]), adam([*runtime.suffix_parameters(), weights])

    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        return output.pow(2).mean() * weights

    with pytest.raises(TrainingError, match="from which an input was computed"):
        runtime.train_suffix(boundary, None, loss_fn=loss_fn, optimizer=early)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=loss_fn, optimizer=late)  # as if nothing had been
    front = adam([*runtime.prefix_parameters(), *own])
    runtime.backward_prefix(boundary, gradients, optimizer=front)
    assert all(p.grad is not None for p in own)


def test_over_bytes_the_optimizer_of_the_prefix_may_not_own_what_the_loss_alone_uses() -> None:
    _, _, runtime = twins(False)
    scale = nn.Parameter(torch.ones(()))
    front = adam([*runtime.prefix_parameters(), scale])
    boundary = runtime.run_training_prefix(numbers(4, 6))
    arrived = BoundaryPayload.from_bytes(boundary.to_bytes())
    _, gradients = runtime.train_suffix(arrived, None, loss_fn=lambda output, _: (output * scale).pow(2).mean())
    with pytest.raises(TrainingError, match="that a loss uses"):
        runtime.backward_prefix(boundary, gradients, optimizer=front)
    scale.grad = None
    runtime.backward_prefix(boundary, gradients, optimizer=front)


def test_over_bytes_an_optimizer_of_several_prompts_steps_that_of_the_round() -> None:
    whole, _, runtime = twins(False)
    mine = [nn.Parameter(numbers(6) * k) for k in (1, 2)]
    others = copy.deepcopy(mine)
    one = adam([*whole.parameters(), *others])
    front, back = adam([*runtime.prefix_parameters(), *mine]), adam(runtime.suffix_parameters())
    for i in range(4):
        one.zero_grad()
        plain(whole, whole(numbers(4, 6) + others[i % 2])).backward()
        one.step()
        boundary = runtime.run_training_prefix(numbers(4, 6) + mine[i % 2])
        arrived = BoundaryPayload.from_bytes(boundary.to_bytes())
        _, gradients = runtime.train_suffix(arrived, loss_fn=lambda o, _: plain(whole, o), optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        same([p.detach() for p in others], [p.detach() for p in mine], f"step {i}")


class Asked(Net):
    """Takes a second input after the cut."""

    def forward(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.d(torch.tanh(self.c(self.b(self.a(x)) + query)))


@pytest.mark.parametrize("drawn", [False, True], ids=["graph", "python"])
def test_a_query_that_is_used_after_the_cut_alone_is_stepped_with_the_prefix(drawn: bool) -> None:
    torch.manual_seed(0)
    split, given = Asked(False), nn.Parameter(numbers(4, 6))
    if drawn:
        split.c.register_forward_hook(lambda module, args, output: output + float(numpy.random.rand()) * 0)
    whole, query = copy.deepcopy(split), copy.deepcopy(given)
    runtime: Any = prepare_split(split, (numbers(4, 6), numbers(4, 6)), split="after:b", fallback="python")
    assert isinstance(runtime, PythonSplit) == drawn
    one = adam([*whole.parameters(), query])
    front, back = adam([*runtime.prefix_parameters(), given]), adam(runtime.suffix_parameters())
    for i in range(3):
        one.zero_grad()
        plain(whole, whole(numbers(4, 6), query)).backward()
        one.step()
        boundary = runtime.run_training_prefix(numbers(4, 6), given)
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: plain(split, o), optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        same((query, state(whole)), (given, state(split)), f"step {i}")
