"""A forward that no graph holds is stopped at a module's call and goes on: as the model, bit for bit, and its effects once."""

from __future__ import annotations

import contextvars
import copy
import random
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ariadne import PythonSplit, SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import (
    BoundaryError,
    ConsumedError,
    FrontierError,
    SpecError,
    TrainingError,
    UnsupportedError,
    VerificationError,
)
from ariadne.prepare import _settings, example_of
from ariadne.stopped import prepared
from ariadne.stopped.crossing import Crossing
from ariadne.stopped.forward import Forward

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Three layers, to be cut after the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class BranchOnSum(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return self.c(y * 2 if y.sum() > 0 else y.sin())


class BranchBefore(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if bool((h > 0).any(1).all()):
            h = h.tanh()
        return self.c(self.b(h))


class LoopByData(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        for _ in range(int(h.abs().sum()) % 5):
            h = h.tanh()
        return self.c(h)


class DrawsPython(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * random.random()
        return self.c(self.b(h) * random.random())


class DrawsNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * float(np.random.rand())
        return self.c(self.b(h) * float(np.random.rand()))


class DrawsTorch(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.a(x), 0.5, True) * random.random()
        return self.c(torch.dropout(self.b(h), 0.5, True))


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.before += 1
        y = self.b(self.a(x) * self.before)
        self.after += 1
        return self.c(y * self.after)


class CountsInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        y = self.b(self.a(x))
        self.seen.append(len(self.seen))
        return self.c(y * len(self.seen))


class EarlyExit(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if h.sum() > 40:
            return h.mean(1, keepdim=True).expand(-1, 3).contiguous()
        return self.c(self.b(h))


class Skip(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.c(self.b(h) * random.random() + h)


class SkipInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return self.c(y * x.sum().item() + x.mean(1, keepdim=True))


class SkipOnSelf(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.a(x).tanh()]
        y = self.b(self.kept[0] * random.random())
        return self.c(torch.cat([y, self.kept[0]], 1)[:, ::2])


class SkipTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x).chunk(2, 1)
        y = self.b(torch.cat([h, g], 1)) * random.random()
        return self.c(y + torch.cat([g.exp(), h], 1) + torch.cat([h * h, g], 1))


class Shared(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).tanh()) * random.random()
        return self.c(self.b(y.sin()) + self.b(y.cos()))


class WrittenAfter(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        y += random.random()
        return self.c(y.relu_())


class Hooked(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        y = self.b(h)
        if h.requires_grad:
            h.register_hook(lambda g: g + 1)
            y.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return self.c(y + h)


class Nested(Net):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        y = self.b(h)
        return {"out": self.c(y * random.random()), "kept": (h, [y]), "n": len(x)}


NETS = [
    BranchOnSum, BranchBefore, LoopByData, DrawsPython, DrawsNumpy, DrawsTorch, Counts, CountsInAList, EarlyExit, Skip,
    SkipInput, SkipOnSelf, SkipTwice, Shared, WrittenAfter, Hooked, Nested,
]  # fmt: skip
AT = {Shared: "after:b#1"}


def split(net: nn.Module, at: str = "after:b", x: Any = X, trainable: bool = True) -> PythonSplit:
    """A Python split without an attempt at a graph."""
    settings = _settings(SplitSpec(at, trainable=trainable), "generated_eager", None, None)
    return prepared(net, settings, example_of(net, (x,), None, settings.spec), "asked for", training=True)


def total(output: Any, targets: Any = None) -> Tensor:
    if isinstance(output, dict):
        return output["out"].square().sum() + output["kept"][0].sin().sum() + output["kept"][1][0].cos().sum()
    return output.square().sum()


def inputs() -> list[Tensor]:
    """Other batches and other values, so that other paths are taken."""
    generator = torch.Generator().manual_seed(7)
    return [s * torch.randn(n, 4, generator=generator) for n, s in ((5, 1.0), (2, 3.0), (7, -0.2), (1, 20.0), (9, 5.0))]


def left(net: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in net.state_dict().items()},
        "gradients": {k: None if p.grad is None else p.grad.clone() for k, p in net.named_parameters()},
        "plain": repr({k: v for k, v in vars(net).items() if type(v) in (int, list) and k != "kept"}),
        "random": random.getstate(),
        "torch": torch.get_rng_state(),
    }


def seeded(run: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    return run()


@pytest.mark.parametrize("kind", NETS)
def test_what_no_graph_holds_gives_what_the_model_gives(kind: type[nn.Module]) -> None:
    net, twin = kind(), kind()
    runtime = split(net, AT.get(kind, "after:b"))
    for x in inputs():
        with torch.no_grad():
            theirs = seeded(lambda x=x: twin(x))
        mine = seeded(lambda x=x: runtime.run_suffix(runtime.run_prefix(x)))
        assert difference(theirs, mine) is None
        assert difference(left(twin), left(net)) is None


def trained(runtime: PythonSplit, x: Tensor) -> Tensor:
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=total)
    runtime.backward_prefix(boundary, gradients)
    return loss


@pytest.mark.parametrize("kind", NETS)
def test_a_training_step_is_that_of_the_model_skips_and_shared_weights_included(kind: type[nn.Module]) -> None:
    net, twin = kind(), kind()
    runtime = split(net, AT.get(kind, "after:b"))
    for x in inputs():

        def whole(x: Tensor = x) -> Tensor:
            loss = total(twin(x))
            loss.backward()
            return loss.detach()

        theirs = seeded(whole)
        mine = seeded(lambda x=x: trained(runtime, x))
        assert difference(theirs, mine) is None
        assert difference(left(twin), left(net)) is None


def test_what_crosses_besides_the_modules_output_is_named_after_the_suffix_has_met_it() -> None:
    runtime = split(Skip())
    boundary = runtime.run_training_prefix(X)
    assert [*boundary.tensors] == ["b"]
    _, gradients = runtime.train_suffix(boundary, loss_fn=total)
    assert len(gradients) == 2
    assert [*boundary.tensors] == [*gradients]
    assert all(g is not None for g in gradients.values())


def test_gradients_of_inputs_are_those_of_the_model() -> None:
    net = Skip()
    runtime = split(net)
    theirs, mine = (X.clone().requires_grad_() for _ in range(2))
    seeded(lambda: total(net(theirs)).backward())
    seeded(lambda: trained(runtime, mine))
    assert difference(theirs.grad, mine.grad) is None


def test_a_stale_gradient_of_a_skip_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what arrives at a tensor that Python kept is forgotten."""
    plain, taps = Crossing._tapped, []

    def forgets(self: Crossing, t: Tensor) -> Any:
        one = plain(self, t)
        if one.label.startswith("kept"):
            taps.append(one.tap)  # a crossing knows taps by their ids
            one.tap = one.tap.detach()
        return one

    monkeypatch.setattr(Crossing, "_tapped", forgets)
    with pytest.raises(VerificationError, match="differs from the model"):
        split(Skip())


def test_an_effect_done_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the suffix runs forward from its beginning."""
    net = Counts()

    def again(self: Forward, mode: Any = None, then: Any = None) -> Any:
        with torch.no_grad():
            return net(X)

    monkeypatch.setattr(Forward, "go_on", again)
    with pytest.raises(VerificationError, match="differs from the model"):
        split(net, trainable=False)


def test_the_boundary_of_another_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the suffix goes on with the forward that was stopped last, whichever boundary it is given."""
    net = BranchOnSum()
    runtime = split(net, trainable=False)
    first, second = inputs()[:2]
    waiting = [runtime.run_prefix(first), runtime.run_prefix(second)]
    waiting[0].forward, waiting[1].forward = waiting[1].forward, waiting[0].forward
    with torch.no_grad():
        assert difference(net(first), runtime.run_suffix(waiting[0])) is not None


def test_boundaries_are_in_flight_in_any_number_and_order() -> None:
    net = BranchOnSum()
    runtime = split(net)
    xs = inputs()
    waiting = [runtime.run_prefix(x) for x in xs]
    for x, boundary in reversed([*zip(xs, waiting, strict=True)]):
        with torch.no_grad():
            assert difference(net(x), runtime.run_suffix(boundary)) is None


def test_a_boundary_is_trained_once() -> None:
    runtime = split(BranchOnSum())
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=total)
    with pytest.raises(ConsumedError):
        runtime.train_suffix(boundary, loss_fn=total)
    runtime.backward_prefix(boundary, gradients)
    with pytest.raises(ConsumedError):
        runtime.backward_prefix(boundary, gradients)


def test_a_boundary_of_one_kind_or_runtime_is_not_taken_for_another() -> None:
    one, other = split(BranchOnSum()), split(BranchOnSum())
    with pytest.raises(BoundaryError, match="made by another split"):
        other.run_suffix(one.run_prefix(X))
    with pytest.raises(BoundaryError, match="train_suffix takes it"):
        one.run_suffix(one.run_training_prefix(X))
    with pytest.raises(BoundaryError, match="run_training_prefix"):
        one.train_suffix(one.run_prefix(X), loss_fn=total)
    with pytest.raises(BoundaryError, match="found Tensor"):
        one.run_suffix(X)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_no_copies_are_made_of_a_forward_that_waits(copied: Callable[[Any], Any]) -> None:
    boundary = split(BranchOnSum()).run_prefix(X)
    with pytest.raises(BoundaryError, match="waits in this process"):
        copied(boundary)


def test_what_is_written_or_switched_between_the_halves_is_refused() -> None:
    net = SkipInput()
    runtime = split(net)
    x = X.clone()
    boundary = runtime.run_prefix(x)
    x.add_(1)
    with pytest.raises(BoundaryError, match="written into after the prefix ran"):
        runtime.run_suffix(boundary)
    boundary = runtime.run_prefix(X)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BoundaryError, match="autocast"):
        runtime.run_suffix(boundary)
    net.eval()
    with pytest.raises(BoundaryError, match="between train and eval"):
        runtime.run_suffix(boundary)
    net.train()
    assert runtime.run_suffix(boundary).shape == (5, 3)


def threads() -> int:
    return sum(t.name == "ariadne forward" for t in threading.enumerate())


def settled() -> int:
    """How many forwards there are, once those that have ended are gone."""
    for thread in [t for t in threading.enumerate() if t.name == "ariadne forward"]:
        thread.join(5)
    return threads()


ENDED: SimpleQueue[str] = SimpleQueue()  # told of what ends, by no state that a split looks at


class Cleans(Net):
    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.b(self.a(x)) * random.random()
            self.went_on = True
            return self.c(y)
        finally:
            ENDED.put(threading.current_thread().name)


def test_a_dropped_boundary_ends_its_thread_at_once_and_nothing_after_the_cut_runs() -> None:
    net = Cleans()
    runtime = split(net)
    before, net.went_on = ENDED.qsize(), False
    waiting = [runtime.run_prefix(X) for _ in range(5)]
    assert threads() == 5
    waiting.clear()
    assert ENDED.qsize() == before + 5
    assert not net.went_on
    assert settled() == 0


def test_the_model_is_left_as_it_was_while_a_forward_waits() -> None:
    net = BranchOnSum()
    before = [sorted(vars(m)) for m in net.modules()]
    runtime = split(net)
    boundary = runtime.run_prefix(X)
    assert [sorted(vars(m)) for m in net.modules()] == before
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    runtime.run_suffix(boundary)


class Raises(Net):
    at = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "before":
            raise LookupError("in the first half")
        y = self.b(self.a(x))
        if self.at == "after":
            raise LookupError("in the second half")
        return self.c(y)


def test_an_exception_of_either_half_is_the_models_with_its_traceback() -> None:
    net = Raises()
    runtime = split(net)
    net.at = "before"
    with pytest.raises(LookupError, match="first half") as found:
        runtime.run_prefix(X)
    assert found.traceback[-1].name == "forward"
    net.at = "after"
    with pytest.raises(LookupError, match="second half") as found:
        runtime.run_suffix(runtime.run_prefix(X))
    assert found.traceback[-1].name == "forward"
    assert settled() == 0


ASKED: contextvars.ContextVar[str] = contextvars.ContextVar("asked", default="nobody")


class Looks(Net):
    """Notes what its thread has, on both sides of the cut."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        self.saw = [self.now(), self.now(y)]
        return self.c(y.float())

    def now(self, y: Tensor | None = None) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            ASKED.get(),
        )


def test_the_thread_has_the_callers_modes() -> None:
    net = Looks()
    runtime = split(net)
    token = ASKED.set("me")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("cpu"):
            with torch.no_grad():
                net(X)
                theirs = net.saw
            runtime.run_suffix(runtime.run_prefix(X))
            assert net.saw == theirs
        with torch.inference_mode():
            net(X)
            theirs = net.saw
            runtime.run_suffix(runtime.run_prefix(X))
            assert net.saw == theirs
    finally:
        ASKED.reset(token)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class SkipToFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.b(h) + Doubles.apply(h))


class ViewWritten(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        part = h[:, :4]
        y = self.b(h * random.random())
        part += 1
        return self.c(y + h)


class BaseWritten(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        part = h[:, :4]
        y = self.b(h * random.random())
        h += 1
        return self.c(y + torch.cat([part, part], 1))


class WalksBack(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        if y.requires_grad:
            (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
            y = y + g
        return self.c(y)


@pytest.mark.parametrize("kind", [SkipToFunction, ViewWritten, BaseWritten, WalksBack])
def test_a_skip_that_cannot_be_followed_is_refused_in_training_and_runs_without(kind: type[nn.Module]) -> None:
    with pytest.raises(TrainingError):
        split(kind())
    net = kind()
    runtime = split(net, trainable=False)
    with torch.no_grad():
        assert difference(seeded(lambda: net(X)), seeded(lambda: runtime.run_suffix(runtime.run_prefix(X)))) is None
    with pytest.raises(TrainingError):
        runtime.run_training_prefix(X)


class SelfSwitching(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            y = self.b(self.a(x))
        finally:
            torch.set_default_dtype(torch.float32)
        return self.c(y)


def test_a_cut_within_a_switch_of_the_whole_process_is_refused_with_what_is_near() -> None:
    with pytest.raises(FrontierError, match=r"torch.get_default_dtype\(\) was torch.float32"):
        split(SelfSwitching())


def test_cuts_are_named_counted_and_chosen() -> None:
    runtime = split(Shared(), at="after:b#1")
    assert [c.split_id for c in runtime.candidates] == ["after:a", "after:b#1", "after:b#2", "after:b#3", "after:c"]
    assert runtime.resplit("50%").split_id in {"after:b#1", "after:b#2"}
    assert runtime.resplit("auto").candidate.safe
    assert runtime.resplit(runtime.candidates[2]).split_id == "after:b#2"
    assert {id(p) for p in runtime.shared_parameters()} == {id(p) for p in runtime.model.b.parameters()}
    for wrong, words in {
        "after:b": "from 'after:b#1' to 'after:b#3'",
        "after:b#4": "forward calls it 3 time",
        "after:bb": "Nearest: 'b'",
        "after:c": "one side would be empty",
        "cut:3": "counts ops of a plan",
    }.items():
        with pytest.raises(FrontierError, match=words):
            runtime.resplit(wrong)


def test_the_third_call_is_where_forward_stops() -> None:
    net = Shared()
    runtime = split(net, at="after:b#3")
    with torch.no_grad():
        assert difference(seeded(lambda: net(X)), seeded(lambda: runtime.run_suffix(runtime.run_prefix(X)))) is None


def test_it_says_why_no_graph_holds_and_has_no_plan() -> None:
    runtime = prepare_split(DrawsPython(), (X,), split="after:b", fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert "draws from random" in runtime.why
    assert runtime.report().mode == "python"
    with pytest.raises(SpecError, match=r"has no .plan..*draws from random"):
        runtime.plan  # noqa: B018
    with pytest.raises(AttributeError):
        runtime.plans  # noqa: B018


def test_the_way_out_is_named_where_it_is_not_asked_for() -> None:
    with pytest.raises(UnsupportedError, match='fallback="python"'):
        prepare_split(DrawsPython(), (X,), split="after:b")
    with pytest.raises(SpecError, match="fallback is one of 'refuse', 'python'"):
        prepare_split(DrawsPython(), (X,), split="after:b", fallback="pyhton")  # type: ignore[call-overload]


def test_a_graph_is_taken_where_one_holds_and_python_where_it_holds_for_some_inputs_only() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert isinstance(prepare_split(plain, (X,), split="after:1", fallback="python"), SplitRuntime)
    branches = prepare_split(BranchOnSum(), (X,), split="after:b", fallback="python")
    assert isinstance(branches, SplitRuntime)
    runtime = prepare_split(BranchOnSum(), (X,), split=SplitSpec("after:b", max_paths=1), fallback="python")
    assert isinstance(runtime, PythonSplit)
    assert "reads numbers out of a tensor" in runtime.why


def test_a_copy_of_the_runtime_runs_the_copied_model() -> None:
    runtime = split(BranchOnSum())
    twin = copy.deepcopy(runtime)
    with torch.no_grad():
        for p in twin.model.parameters():
            p.zero_()
        assert not twin.run_suffix(twin.run_prefix(X)).any()
        assert runtime.run_suffix(runtime.run_prefix(X)).any()
    assert {id(p) for p in twin.suffix_parameters()} <= {id(p) for p in twin.model.parameters()}
    with pytest.raises(BoundaryError):
        runtime.run_suffix(twin.run_prefix(X))


def test_two_optimizers_train_as_one_does() -> None:
    net, twin = Skip(), Skip()
    runtime = split(net)
    one, before, after = (
        torch.optim.SGD(p, 0.1, momentum=0.9)
        for p in ([*twin.parameters()], runtime.prefix_parameters(), runtime.suffix_parameters())
    )
    for x in inputs():

        def whole(x: Tensor = x) -> None:
            one.zero_grad()
            total(twin(x)).backward()
            one.step()

        def halves(x: Tensor = x) -> None:
            boundary = runtime.run_training_prefix(x)
            _, gradients = runtime.train_suffix(boundary, loss_fn=total, optimizer=after)
            runtime.backward_prefix(boundary, gradients, optimizer=before)

        seeded(whole)
        seeded(halves)
        assert difference(left(twin), left(net)) is None


def test_a_forward_that_runs_from_several_threads_at_once_gives_what_it_gives_alone() -> None:
    net = BranchOnSum()
    runtime = split(net)
    with torch.no_grad():
        wanted = [net(x) for x in inputs()]
    wrong: list[Any] = []

    def work(x: Tensor, theirs: Tensor) -> None:
        for _ in range(20):
            found = difference(theirs, runtime.run_suffix(runtime.run_prefix(x)))
            if found:
                wrong.append(found)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs(), wanted, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
