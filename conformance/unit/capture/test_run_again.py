"""Parts that run again in the backward pass, and what a function that is kept whole reads and writes inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ariadne import SplitSpec, prepare_split
from ariadne.capture import observed, repeated
from ariadne.capture.recorder import runs_again
from ariadne.errors import HalfError, UnsupportedError
from conformance.unit.trap_kit import Fn, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
X = numbers(4, 6)
GAIN = nn.Parameter(torch.full((6,), 2.0))


class Scaled(torch.autograd.Function):
    """Reads a parameter that is none of its arguments, and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * GAIN

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * GAIN


def by_module(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(checkpoint(s.a, s.c(x), use_reentrant=True))


def by_method(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(checkpoint(lambda h: torch.tanh(s.a(h)) * s.a.bias, s.c(x), use_reentrant=True))


def by_reference(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.b(s.apply_it(s.a, s.c(x)))


class Rerun(torch.autograd.Function):
    """A checkpoint of one's own: what it runs it runs again, and gives the module's parameters their gradients."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(gradient)
        return None, x.grad


APPLY = Rerun.apply


def linears() -> dict[str, nn.Module]:
    return {name: nn.Linear(6, 6) for name in "abc"}


@pytest.mark.parametrize("name", ["a module", "a function", "a reference"])
def test_optimizers_of_both_sides_train_what_a_checkpoint_reads_inside(name: str) -> None:
    forward = {"a module": by_module, "a function": by_method, "a reference": by_reference}[name]
    whole = Fn(forward, **linears())
    whole.apply_it = APPLY
    model = copy.deepcopy(whole)
    runtime = prepare_split(model, (X,), split=SplitSpec("after:c", trainable=True))
    named = {id(p): n for n, p in model.named_parameters()}
    assert {named[id(p)] for p in runtime.suffix_parameters()} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    one = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    front, back = (
        torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in (runtime.prefix_parameters(), runtime.suffix_parameters())
    )
    for batch in (4, 2, 5):
        x = numbers(batch, 6, seed=batch)
        one.zero_grad()
        loss = whole(x).pow(2).mean()
        loss.backward()
        one.step()
        boundary = runtime.run_training_prefix(x)
        found, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.pow(2).mean(), optimizer=back)
        runtime.backward_prefix(boundary, gradients, optimizer=front)
        same(loss.detach(), found, f"the loss at batch {batch}")
        same(whole.state_dict(), model.state_dict(), f"the weights after batch {batch}")


def test_a_function_that_reads_a_parameter_by_itself_goes_into_no_file(tmp_path: Any) -> None:
    model = Fn(lambda s, x: s.b(Scaled.apply(s.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval()
    model.gain = GAIN
    runtime = prepare_split(model, (X,), split="after:a")
    with pytest.raises(HalfError, match=r"Scaled\) reads parameters by itself \('gain'\)"):
        runtime.save(tmp_path / "half.safetensors", side="suffix")


def normed(reentrant: bool) -> nn.Module:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        return s.b(checkpoint(lambda h: torch.tanh(s.n(s.c(h))), s.a(x), use_reentrant=reentrant))

    return Fn(forward, n=nn.BatchNorm1d(6), **linears())


def test_what_a_checkpoint_writes_is_put_back_when_a_split_is_prepared() -> None:
    whole = normed(True)
    model = copy.deepcopy(whole)
    before = copy.deepcopy(model.state_dict())
    runtime = prepare_split(model, (X,), split=SplitSpec("after:a", dynamic_batch=(1, 8), trainable=True))
    same(before, model.state_dict(), "what preparing left")
    whole(X).pow(2).mean().backward()
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.pow(2).mean())
    runtime.backward_prefix(boundary, gradients)
    assert model.n.num_batches_tracked == 2  # forward, and again in the backward pass
    same(dict(whole.named_buffers()), dict(model.named_buffers()), "buffers")


def counted(s: Any, x: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor) -> torch.Tensor:
        s.steps.add_(1)
        return s.c(h).relu()

    return s.b(checkpoint(part, s.a(x), use_reentrant=False))


def counting() -> nn.Module:
    model = Fn(counted, **linears())
    model.register_buffer("steps", torch.zeros(()))
    return model


@pytest.mark.parametrize("build", [lambda: normed(False), counting])
def test_what_is_written_where_the_backward_pass_runs_again_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"within torch\.utils\.checkpoint in .* runs that part again"):
        prepare_split(build(), (X,), split=SplitSpec("50%", trainable=True))


def averages(s: Any, h: torch.Tensor) -> None:
    s.mean = s.mean * 0.5 + h.detach().mean(0)


def keeps_the_mean(s: Any, h: torch.Tensor) -> None:
    s.mean = h.detach().mean(0)


def appends(s: Any, h: torch.Tensor) -> None:
    s.kept["all"].append(h.detach())


def averages_in_a_dict(s: Any, h: torch.Tensor) -> None:
    s.kept["mean"] = s.kept["mean"] * 0.5 + h.detach().mean(0)


def keeps_in_a_dict(s: Any, h: torch.Tensor) -> None:
    s.kept["last"] = h.detach()


def keeping(keep: Callable[[Any, torch.Tensor], None], reentrant: bool = False) -> nn.Module:
    """A model that keeps something of what passes in a checkpointed part."""

    def part(s: Any, h: torch.Tensor) -> torch.Tensor:
        keep(s, h)
        found: torch.Tensor = s.c(h).tanh()
        return found

    model = Fn(lambda s, x: s.b(checkpoint(partial(part, s), s.a(x), use_reentrant=reentrant)), **linears())
    model.register_buffer("mean", torch.zeros(6))
    model.kept = {"all": [], "mean": torch.zeros(6)}
    return model


@pytest.mark.parametrize(
    ("keep", "reentrant", "what"),
    [
        (averages, False, "reads and replaces the buffer 'mean'"),
        (averages_in_a_dict, False, "reads and replaces what is in 'kept'"),
        (appends, False, r"appends to 'kept'\['all'\]"),
        (appends, True, r"appends to 'kept'\['all'\]"),
    ],
)
def test_what_is_added_to_where_the_backward_pass_runs_again_is_refused(keep: Any, reentrant: bool, what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward {what} of the model inside of a part that"):
        prepare_split(keeping(keep, reentrant), (X,), split=SplitSpec("50%", trainable=True))


def trained(whole: nn.Module, model: nn.Module) -> None:
    """One step of both, by halves of the second."""
    runtime = prepare_split(model, (X,), split=SplitSpec("after:a", trainable=True))
    whole(X).pow(2).mean().backward()
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.pow(2).mean())
    runtime.backward_prefix(boundary, gradients)


@pytest.mark.planted
def test_without_the_refusal_a_buffer_would_be_renewed_once_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "refuse_repeated", lambda *_: None)
    whole, model = keeping(averages), keeping(averages)
    model.load_state_dict(whole.state_dict())
    trained(whole, model)
    assert not torch.equal(whole.mean, model.mean)


@pytest.mark.parametrize("keep", [keeps_the_mean, keeps_in_a_dict], ids=lambda keep: keep.__name__)
def test_what_is_only_set_where_the_backward_pass_runs_again_is_followed(keep: Any) -> None:
    whole, model = keeping(keep), keeping(keep)
    model.load_state_dict(whole.state_dict())
    trained(whole, model)
    same([whole.mean, whole.kept], [model.mean, model.kept], "what is kept")
    same([p.grad for p in whole.parameters()], [p.grad for p in model.parameters()], "gradients")


def keeps_in_an_attribute(s: Any, h: torch.Tensor) -> None:
    s.last = h.detach()


@pytest.mark.parametrize("again", ["under a checkpoint", "outside"])
@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (keeps_in_a_dict, "'last' of a dict"),
        (keeps_in_an_attribute, "'last' of the model"),
        (keeps_the_mean, "'mean' of the model"),
    ],
)
def test_what_is_set_where_the_backward_pass_runs_again_and_later_to_something_else_is_refused(
    keep: Any, what: str, again: str
) -> None:
    def part(s: Any, h: torch.Tensor) -> torch.Tensor:
        keep(s, h)
        found: torch.Tensor = s.c(h).tanh()
        return found

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(partial(part, s), s.a(x), use_reentrant=False)
        if again == "outside":
            keep(s, h)
            return s.b(h)
        return s.b(checkpoint(partial(part, s), h, use_reentrant=False))

    model = keeping(keep)
    model.function, model.last = forward, None
    with pytest.raises(UnsupportedError, match=f"forward sets {what} inside of a part that .*, and later to something"):
        prepare_split(model, (X,), split=SplitSpec("50%", trainable=True))


@pytest.mark.planted
def test_without_the_refusal_what_is_set_twice_would_be_what_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "overtaken", lambda *_: "")

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(partial(keeps_and_runs, s), s.a(x), use_reentrant=False)
        keeps_the_mean(s, h)
        return s.b(h)

    whole = keeping(keeps_the_mean)
    whole.function = forward
    model = copy.deepcopy(whole)
    trained(whole, model)
    assert not torch.equal(whole.mean, model.mean)


def keeps_and_runs(s: Any, h: torch.Tensor) -> torch.Tensor:
    keeps_the_mean(s, h)
    found: torch.Tensor = s.c(h).tanh()
    return found


def test_each_part_that_runs_again_may_keep_something_under_a_name_of_its_own() -> None:
    def part(s: Any, name: str, h: torch.Tensor) -> torch.Tensor:
        s.kept[name] = h.detach()
        setattr(s, name, h.detach())
        found: torch.Tensor = s.c(h).tanh()
        return found

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(partial(part, s, "one"), s.a(x), use_reentrant=False)
        return s.b(checkpoint(partial(part, s, "two"), h, use_reentrant=False))

    whole = keeping(averages)
    whole.function = forward
    whole.one = whole.two = torch.zeros(4, 6)
    model = copy.deepcopy(whole)
    trained(whole, model)
    same([whole.kept, whole.one, whole.two], [model.kept, model.one, model.two], "what is kept")


def test_a_checkpoint_that_writes_nothing_is_no_alarm() -> None:
    model = Fn(lambda s, x: s.b(checkpoint(s.c, s.a(x), use_reentrant=False)), **linears())
    runtime = prepare_split(model, (X,), split=SplitSpec("50%", trainable=True))
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def test_functional_dropout_in_a_part_that_runs_again() -> None:
    forward = lambda s, x: s.b(checkpoint(lambda h: F.dropout(s.c(h), 0.5), s.a(x), use_reentrant=True))  # noqa: E731
    whole = Fn(forward, **linears())
    model = copy.deepcopy(whole)
    runtime = prepare_split(model, (X,), split=SplitSpec("after:a", trainable=True))
    torch.manual_seed(1)
    whole(X).pow(2).mean().backward()
    torch.manual_seed(1)
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.pow(2).mean())
    runtime.backward_prefix(boundary, gradients)
    same([p.grad for p in whole.parameters()], [p.grad for p in model.parameters()], "gradients")


def test_a_checkpoint_that_a_refusal_left_is_ended_while_the_error_is_held() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("calls", torch.zeros(()))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.second(x).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, self.first(x), use_reentrant=False)

    with pytest.raises(UnsupportedError, match="the backward pass runs that part again") as held:
        prepare_split(Counts(), (X,), split="after:first")
    assert not runs_again()  # torch 2.11 would leave its hooks on, for all that is saved from here on
    assert held.value is not None
