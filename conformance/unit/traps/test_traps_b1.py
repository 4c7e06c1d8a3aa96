"""Traps 15 to 21: threads, errors, modes that Python looks at, numbers read out, autograd's own, changed models."""

from __future__ import annotations

import collections
import copy
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import is_grad_enabled, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from ariadne import SplitRuntime, SplitSpec, prepare_split, prepare_split_replay
from ariadne.errors import BoundaryError, ConsumedError, GuardError, ModuleError, UnsupportedError, WitnessError
from conformance.unit.trap_twins import Twins, either, same, seeded, square_loss, state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.third = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(self.act(self.first(x)))))


# 15. Threads, several runtimes, several boundaries


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Run them all at once; raise what the first to fail raised."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            gate.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def test_two_threads_on_one_runtime_each_get_their_own_answer() -> None:
    twins = Twins(Net, seeded((2, 6)))

    def job(seed: int) -> Callable[[], None]:
        def run() -> None:
            for i in range(40):
                x = seeded((1 + (seed + i) % 5, 6), seed * 100 + i)
                with torch.no_grad():
                    want = twins.whole(x)
                same(want, twins.runtime.run_suffix(twins.runtime.run_prefix(x)))
                assert torch.is_grad_enabled()

        return run

    in_threads([job(1), job(2), job(3)])


class ByBatch(nn.Module):
    """Another op at every batch, so that every batch needs a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        for i in range(int(x.shape[0])):
            x = (torch.tanh, torch.relu, torch.sigmoid)[i % 3](x) + x[i]
        return self.out(x)


def test_threads_may_meet_batches_that_no_plan_serves_yet() -> None:
    twins = Twins(ByBatch, seeded((2, 6)))
    state_before = {n: p.detach().clone() for n, p in twins.split.named_parameters()}

    def job(batches: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            for b in batches:
                x = seeded((b, 6), b)
                with torch.no_grad():
                    want = twins.whole(x)
                same(want, twins.runtime.run_suffix(twins.runtime.run_prefix(x)))

        return run

    in_threads([job((2, 4, 3, 5, 2, 1, 4)), job((5, 3, 4, 2, 1)), job((2,) * 60)])
    same(state_before, {n: p.detach() for n, p in twins.split.named_parameters()})


def test_two_threads_may_train_on_one_runtime() -> None:
    """Numbers are small integers, so that the order in which gradients add up does not show."""

    def whole_numbers() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        for p in net.parameters():
            p.data = torch.randint(-2, 3, p.shape).float()
        return net

    twins = Twins(whole_numbers, torch.ones(2, 4))
    inputs = [torch.randint(-2, 3, (b, 4), generator=torch.Generator().manual_seed(b)).float() for b in (2, 3, 4, 5)]
    for x in inputs * 5:
        twins.whole(x).sum().backward()

    def run() -> None:
        for x in inputs * 5 if threading.current_thread() is threading.main_thread() else mine[threading.get_ident()]:
            boundary = twins.runtime.run_training_prefix(x)
            _, gradients = twins.runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
            twins.runtime.backward_prefix(boundary, gradients)

    mine: dict[int, list[torch.Tensor]] = {}

    def job(share: list[torch.Tensor]) -> Callable[[], None]:
        def start() -> None:
            mine[threading.get_ident()] = share
            run()

        return start

    in_threads([job(inputs[:2] * 5), job(inputs[2:] * 5)])
    same(state(twins.whole)["gradients"], state(twins.split)["gradients"])


def test_two_runtimes_on_one_model_train_it_in_turns() -> None:
    twins = Twins(Net, seeded((2, 6)))
    other = prepare_split(twins.split, (seeded((3, 6)),), split="after:first")
    for runtime in (twins.runtime, other, twins.runtime, other):
        twins.train(seeded((3, 6)), cuts=[runtime])
        twins.replay(seeded((2, 6)), cuts=[other, twins.runtime])


def test_a_boundary_of_another_cut_or_model_is_refused() -> None:
    twins = Twins(Net, seeded((2, 6)))
    boundary = twins.runtime.resplit("after:first").run_prefix(seeded((2, 6)))
    with pytest.raises(BoundaryError, match="made by another split"):
        twins.runtime.resplit("after:second").run_suffix(boundary)


def test_boundaries_in_flight_may_be_consumed_in_any_order() -> None:
    twins = Twins(Net, seeded((2, 6)))
    inputs = [seeded((b, 6), b) for b in (2, 3, 4)]
    alone = []
    for x in inputs:
        twins.whole.zero_grad()
        loss = square_loss(twins.whole(x))
        loss.backward()
        alone.append((loss.detach(), {n: p.grad.clone() for n, p in twins.whole.named_parameters()}))
    for runtime in twins.cuts():
        twins.split.zero_grad()
        suffix_names = {id(p) for p in runtime.suffix_parameters()}
        flying = [runtime.run_training_prefix(x) for x in inputs]
        gradients = {}
        for i in (1, 2, 0):
            loss, gradients[i] = runtime.train_suffix(flying[i], loss_fn=square_loss)
            same(alone[i][0], loss)
        for i in (0, 2, 1):
            runtime.backward_prefix(flying[i], gradients[i])
        for name, p in twins.split.named_parameters():
            a, b, c = (1, 2, 0) if id(p) in suffix_names else (0, 2, 1)
            same((alone[a][1][name] + alone[b][1][name]) + alone[c][1][name], p.grad)


def test_replay_boundaries_in_flight_keep_their_values() -> None:
    twins = Twins(Net, seeded((2, 6)))
    inputs = [seeded((b, 6), b) for b in (2, 3, 4)]
    for runtime in twins.cuts():
        flying = [runtime.run_prefix(x) for x in inputs]
        for i in (2, 0, 1, 2):
            with torch.no_grad():
                same(twins.whole(inputs[i]), runtime.run_suffix(flying[i]))


@pytest.mark.parametrize("by", ["train_suffix", "backward_prefix"])
def test_a_boundary_consumed_twice_is_refused(by: str) -> None:
    runtime = Twins(Net, seeded((2, 6))).runtime
    boundary = runtime.run_training_prefix(seeded((3, 6)))
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
    if by == "backward_prefix":
        runtime.backward_prefix(boundary, gradients)
    before = {n: p.grad.clone() for n, p in runtime.model.named_parameters() if p.grad is not None}
    again = {
        "train_suffix": lambda: runtime.train_suffix(boundary, loss_fn=square_loss),
        "backward_prefix": lambda: runtime.backward_prefix(boundary, gradients),
    }
    with pytest.raises(ConsumedError, match=f"already taken by {by}.*run_training_prefix"):
        again[by]()
    same(before, {n: p.grad for n, p in runtime.model.named_parameters() if p.grad is not None})


def test_two_threads_that_race_for_one_boundary_train_it_once() -> None:
    runtime = Twins(Net, seeded((2, 6))).runtime
    for _ in range(10):
        boundary, taken, refused = runtime.run_training_prefix(seeded((3, 6))), [], []

        def job(boundary: Any = boundary, taken: list[Any] = taken, refused: list[Any] = refused) -> None:
            try:
                taken.append(runtime.train_suffix(boundary, loss_fn=square_loss))
            except ConsumedError as error:
                refused.append(error)

        in_threads([job, job, job])
        assert (len(taken), len(refused)) == (1, 2)


def test_parameters_that_stepped_while_a_boundary_was_in_flight_are_noticed() -> None:
    """The prefix's graph needs the old weight; autograd says so for the whole model, and for the split."""
    twins = Twins(Net, seeded((2, 6)))
    runtime = twins.runtime.resplit("cut:4")
    boundary = runtime.run_training_prefix(seeded((3, 6)))
    _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
    with torch.no_grad():
        twins.split.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runtime.backward_prefix(boundary, gradients)


# 16. An exception inside a segment


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Identity(), nn.Embedding(5, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.lin(x)) + self.inner(i))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_a_traceback_shows_the_generated_line_and_the_module(side: str, train: bool) -> None:
    model = Lookup()
    spec = SplitSpec("after:lin" if side == "suffix" else "after:inner")
    runtime = prepare_split(model, (torch.tensor([1, 2]), seeded((2, 4))), split=spec)
    bad = torch.tensor([1, 7])

    def act() -> None:
        if train:
            runtime.train_suffix(runtime.run_training_prefix(bad, seeded((2, 4))), loss_fn=square_loss)
        else:
            runtime.run_suffix(runtime.run_prefix(bad, seeded((2, 4))))

    with pytest.raises(IndexError) as raised:
        act()
    frames = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.filename.startswith("<ariadne")]
    assert len(frames) == 1
    assert side in frames[0].filename
    source = runtime.prefix_source if side == "prefix" else runtime.suffix_source
    line = source.splitlines()[frames[0].lineno - 1].strip()
    assert frames[0].line == line
    assert "embedding(" in line
    assert line.endswith("# inner.1")


def test_a_failed_call_leaves_the_modes_and_the_runtime_as_they_were() -> None:
    model = Lookup()
    runtime = prepare_split(model, (torch.tensor([1, 2]), seeded((2, 4))), split="after:inner")
    with pytest.raises(IndexError):
        runtime.run_prefix(torch.tensor([1, 7]), seeded((2, 4)))
    assert torch.is_grad_enabled()
    with torch.no_grad():
        want = model(torch.tensor([1, 2]), seeded((2, 4)))
    same(want, runtime.run_suffix(runtime.run_prefix(torch.tensor([1, 2]), seeded((2, 4)))))


# 17. Python that branches on the grad mode


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre, self.attention, self.out = (
            nn.Linear(8, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pre(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Looks(nn.Module):
    """Another op with gradients on; `how` asks for the mode."""

    def __init__(self, how: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x)
        return torch.relu(x) * 2 if self.how(x) else torch.sigmoid(x) * 2


WAYS_TO_ASK_FOR_GRADIENTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "torch.is_grad_enabled": lambda x: torch.is_grad_enabled(),
    "the same, imported by name": lambda x: is_grad_enabled(),
    "torch._C.is_grad_enabled": lambda x: torch._C.is_grad_enabled(),
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "is_leaf": lambda x: not x.is_leaf,
    "is_inference_mode_enabled": lambda x: not torch.is_inference_mode_enabled() and torch.is_grad_enabled(),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("build", [encoder, Attention])
def test_fast_paths_of_torch_are_those_of_the_mode(build: Callable[[], nn.Module], train: bool) -> None:
    twins = Twins(build, seeded((2, 5, 8)), train=train)
    few = twins.cuts()[::4]
    for b in (1, 3):
        twins.replay(seeded((b, 5, 8), b), cuts=few)
        twins.train(seeded((b, 5, 8), b), cuts=few)


@pytest.mark.parametrize("prepare", [prepare_split, prepare_split_replay])
@pytest.mark.parametrize("way", WAYS_TO_ASK_FOR_GRADIENTS)
def test_python_that_looks_at_the_grad_mode_sees_that_of_the_call(
    way: str, prepare: Callable[..., SplitRuntime]
) -> None:
    Twins(lambda: Looks(WAYS_TO_ASK_FOR_GRADIENTS[way]), seeded((2, 6)), prepare=prepare).hold(6, batches=(1, 3))


def test_prepared_under_no_grad_it_trains_all_the_same() -> None:
    with torch.no_grad():
        twins = Twins(lambda: Looks(WAYS_TO_ASK_FOR_GRADIENTS["torch.is_grad_enabled"]), seeded((2, 6)))
    twins.hold(6, batches=(1, 3))


# 18. Python that branches on being traced


WAYS_TO_ASK_FOR_TRACING: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda x: torch.compiler.is_dynamo_compiling(),
    "torch._dynamo.is_compiling": lambda x: torch._dynamo.is_compiling(),
    "jit.is_tracing": lambda x: torch.jit.is_tracing(),
    "jit.is_scripting": lambda x: torch.jit.is_scripting(),
    "onnx.is_in_onnx_export": lambda x: torch.onnx.is_in_onnx_export(),
    "_get_tracing_state": lambda x: torch._C._get_tracing_state() is not None,
    "is_fx_tracing": lambda x: torch.fx._symbolic_trace.is_fx_tracing(),
    "the type of a tensor": lambda x: type(x) is not torch.Tensor,
    "the type of a size": lambda x: type(x.shape[0]) is not int,
    "a dispatch mode": lambda x: torch.utils._python_dispatch._get_current_dispatch_mode() is not None,
    "a function mode": lambda x: bool(torch.overrides._get_current_function_mode_stack()),
}


class Shy(nn.Module):
    """Does something else where it believes that it is being traced."""

    def __init__(self, traced: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.traced, self.a, self.b = traced, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        if self.traced(x):
            return torch.sigmoid(self.b(x) * 2)
        return torch.relu(self.b(x)) * 2


@pytest.mark.parametrize("way", WAYS_TO_ASK_FOR_TRACING)
def test_what_is_captured_is_the_forward_that_runs(way: str) -> None:
    Twins(lambda: Shy(WAYS_TO_ASK_FOR_TRACING[way]), seeded((2, 6))).hold(6, batches=(1, 3))


# 19. Numbers read out of tensors


def read_item(s: torch.Tensor) -> float:
    return s.item()


WAYS_TO_READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": read_item,
    "arithmetic on it": lambda s: s.item() * 2 + 1,
    "float": lambda s: float(s.detach()),
    "int": lambda s: int(s * 10),
    "tolist": lambda s: s.reshape(1).tolist()[0],
    "numpy": lambda s: float(s.detach().numpy()),
    "unpacked": lambda s: float(next(iter(s.detach().reshape(1)))),
    "bool": lambda s: 3.0 if s > 1.0 else -3.0,
    "format": lambda s: float(f"{s.detach():.3f}"),
}


class Scaled(nn.Module):
    """Multiplies by a number that was read out of a buffer."""

    def __init__(self, read: Callable[[torch.Tensor], Any], kind: str = "buffer") -> None:
        super().__init__()
        self.read, self.kind, self.a, self.b = read, kind, nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "parameter":
            self.s = nn.Parameter(torch.tensor(0.7))
        elif kind == "buffer":
            self.register_buffer("s", torch.tensor(0.7))
        elif kind == "attribute":
            self.s = torch.tensor(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        s = x.detach().abs().mean() if self.kind == "input" else self.s
        return torch.relu(self.b(x * self.read(s)))


@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute", "input"])
@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_a_number_read_out_of_a_tensor_is_the_one_of_the_call(way: str, kind: str) -> None:
    """The example's number is right; another one is followed, or its witness says that it changed."""
    twins = Twins(lambda: Scaled(WAYS_TO_READ[way], kind), seeded((2, 6)))
    for b in (2, 1, 3):
        either(lambda b=b: twins.replay(seeded((b, 6), 1)), GuardError, "capture")
    if kind != "input":
        twins.replay(seeded((2, 6)))
        for model in (twins.whole, twins.split):
            with torch.no_grad():
                model.s.fill_(1.3)
    either(lambda: twins.replay(seeded((2, 6), 9) * 30), GuardError, "capture")
    twins = Twins(lambda: Scaled(WAYS_TO_READ[way], kind), seeded((2, 6)))
    if kind != "input":
        for model in (twins.whole, twins.split):
            with torch.no_grad():
                model.s.fill_(1.3)
    either(lambda: twins.train(seeded((2, 6), 9) * 30, steps=1), GuardError, "capture")


def test_batch_norm_with_cumulative_averages_follows_or_refuses() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 2))

    twins = Twins(build, seeded((2, 6)), train=True)
    twins.train(seeded((3, 6)), steps=1, cuts=[twins.runtime])
    for _ in range(3):
        if (
            either(lambda: twins.train(seeded((3, 6)), steps=1, cuts=[twins.runtime]), WitnessError, "capture")
            == "refused"
        ):
            break
    Twins(build, seeded((2, 6)), train=False).hold(6)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm, old": nn.utils.weight_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm, old": nn.utils.spectral_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_weights_that_forward_computes_and_writes(norm: str, train: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), NORMS[norm](nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2))

    Twins(build, seeded((2, 6)), train=train).hold(6, batches=(1, 3))


# 20. What autograd is told


class Doubled(torch.autograd.Function):
    """A backward that is not the derivative, so that it shows where it ran."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * 3 + x, None


class Pair(torch.autograd.Function):
    """Two results, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        top = x.argmax(dim=1)
        ctx.mark_non_differentiable(top)
        return x * y, top

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[Any, Any]:
        x, y = ctx.saved_tensors
        return (g * y * 5 if ctx.needs_input_grad[0] else None), (g * x if ctx.needs_input_grad[1] else None)


class Later(torch.autograd.Function):
    """The newer way of writing one."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (ctx.saved_tensors[0] > -1)


class InPlace(torch.autograd.Function):
    """Writes its argument and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


class Body(nn.Module):
    """Two layers around something."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Dropout(0.4)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.middle(self, self.a(x))))


def under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.b(x).abs().mean(dim=1, keepdim=True)
    return x * scale + m.b(x)


def under_enable_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.b(x)
        with torch.enable_grad():
            y = y + torch.sin(m.b(x))
    return x + y


def decorated(m: Any, x: torch.Tensor) -> torch.Tensor:
    @torch.no_grad()
    def quiet(t: torch.Tensor) -> torch.Tensor:
        return m.b(t) * 2

    return x + quiet(x) + m.b(x)


def written_under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.b(x) * 1.5
    with torch.no_grad():
        y.mul_(0.5)
    return y + x


def in_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.b(x)
        with torch.autocast("cpu", enabled=False):
            z = m.b(x)
    return y.float() + z


def in_two_autocasts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The casts of the weight are cached within each block, and their gradients add up there."""
    with torch.autocast("cpu", torch.bfloat16):
        y = m.b(m.b(x)) + m.b(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = y + m.b(y)
    return y.float()


MIDDLES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "Function": lambda m, x: Doubled.apply(m.b(x), 0.5) + x,
    "Function with two results": lambda m, x: Pair.apply(m.b(x), x)[0] + Pair.apply(x, x)[1][:, None],
    "Function, newer": lambda m, x: Later.apply(m.b(x)) * x,
    "Function that writes": lambda m, x: InPlace.apply(m.b(x)) + x,
    "Function of a parameter": lambda m, x: F.linear(x, Doubled.apply(m.b.weight, 2.0)),
    "no_grad": under_no_grad,
    "enable_grad in no_grad": under_enable_grad,
    "no_grad as a decorator": decorated,
    "a write under no_grad": written_under_no_grad,
    "detach": lambda m, x: m.b(x).detach() * x + m.b(x.detach()),
    "detach_": lambda m, x: m.b(x).detach_() * x,
    "requires_grad_": lambda m, x: m.b(x.detach().requires_grad_()) + x,
    "data": lambda m, x: m.b(x) * x.data,
    "autocast": in_autocast,
    "autocast, twice": in_two_autocasts,
    "checkpoint": lambda m, x: checkpoint(lambda t: m.drop(torch.relu(m.b(t))), x, use_reentrant=False) + x,
    "checkpoint, reentrant": lambda m, x: checkpoint(lambda t: m.drop(torch.relu(m.b(t))), x, use_reentrant=True) + x,
    "grad inside": lambda m, x: x + torch.autograd.grad(
        torch.tanh(y := x.detach().requires_grad_()).sum(), y)[0] if torch.is_grad_enabled() else x * 2,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*requires_grad=True.*:UserWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("middle", MIDDLES)
def test_what_forward_tells_autograd_is_kept(middle: str, train: bool) -> None:
    Twins(lambda: Body(MIDDLES[middle]), seeded((2, 6)), train=train).hold(6, batches=(1, 3))


# 21. The structure changes after prepare


def replaced_same_kind(model: Any) -> None:
    torch.manual_seed(3)
    model.second = nn.Linear(8, 8)


def replaced_other_kind(model: Any) -> None:
    model.act = nn.Sigmoid()


def assigned_state(model: Any) -> None:
    torch.manual_seed(4)
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def assigned_doubles(model: Any) -> None:
    model.load_state_dict({k: v.double() for k, v in model.state_dict().items()}, assign=True)


def forward_hook(model: Any) -> None:
    model.second.register_forward_hook(lambda module, args, out: out * 2)


def forward_pre_hook(model: Any) -> None:
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def model_hook(model: Any) -> None:
    model.register_forward_hook(lambda module, args, out: out * 2)


def backward_hook(model: Any) -> None:
    model.second.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))


def parameter_hook(model: Any) -> None:
    model.second.weight.register_hook(lambda g: g * 2)


def no_bias(model: Any) -> None:
    model.second.bias = None


def new_weight(model: Any) -> None:
    torch.manual_seed(6)
    model.second.weight = nn.Parameter(torch.randn(8, 8))


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.second)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.second, "weight", amount=0.5)


def new_forward(model: Any) -> None:
    model.second.forward = lambda x: x * 2


def new_class(model: Any) -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.second.__class__ = Other


def tied(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight.new_ones(8, 8))
    model.second.bias = model.first.bias


def frozen(model: Any) -> None:
    model.second.requires_grad_(False)


def swapped(model: Any) -> None:
    model.first, model.second = model.first, copy.deepcopy(model.second)


CHANGES = [
    replaced_same_kind, replaced_other_kind, assigned_state, forward_hook, forward_pre_hook, model_hook, backward_hook,
    parameter_hook, no_bias, new_weight, parametrized, pruned, new_forward, new_class, tied, frozen, swapped,
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "when"),
    [(c, "before the call") for c in CHANGES]
    + [
        (c, "between the halves") for c in CHANGES if c not in (assigned_state, replaced_other_kind)
    ],  # the suffix's alone
)
def test_a_model_that_changed_is_followed_or_refused(change: Callable[[nn.Module], None], when: str) -> None:
    twins = Twins(Net, seeded((2, 6)))
    x = seeded((3, 6), 8)
    for cut in ("cut:1", "cut:2"):
        whole, runtime = copy.deepcopy(twins.whole), copy.deepcopy(twins.runtime.resplit(cut))
        change(whole)
        if when == "before the call":
            change(runtime.model)
        with torch.no_grad():
            want = whole(x)
        square_loss(whole(x)).backward()

        def replay(runtime: SplitRuntime = runtime, want: Any = want) -> None:
            same(want, runtime.run_suffix(runtime.run_prefix(x)))

        def train(runtime: SplitRuntime = runtime, whole: nn.Module = whole) -> None:
            boundary = runtime.run_training_prefix(x)
            if when == "between the halves":
                change(runtime.model)
            _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
            runtime.backward_prefix(boundary, gradients)
            same(state(whole)["gradients"], state(runtime.model)["gradients"])

        if when == "before the call":
            either(replay, GuardError, "prepare")
        either(train, GuardError, "prepare")


@pytest.mark.parametrize("change", [assigned_state, new_weight, frozen, parameter_hook], ids=lambda c: c.__name__)
def test_new_parameters_in_the_same_place_are_followed(change: Callable[[nn.Module], None]) -> None:
    twins = Twins(Net, seeded((2, 6)))
    change(twins.whole)
    change(twins.split)
    twins.step_whole = torch.optim.SGD(twins.whole.parameters(), lr=0.002, momentum=0.9)
    twins.step_split = torch.optim.SGD(twins.split.parameters(), lr=0.002, momentum=0.9)
    twins.hold(6)


def test_parameters_assigned_in_another_dtype_are_followed() -> None:
    twins = Twins(Net, seeded((2, 6)))
    for model in (twins.whole, twins.split):
        assigned_doubles(model)
    twins.replay(seeded((2, 6)).double())


def test_a_backward_hook_is_refused_at_prepare() -> None:
    net = Net()
    backward_hook(net)
    with pytest.raises(UnsupportedError, match=r"'second' has a backward hook.*remove it"):
        prepare_split(net, (seeded((2, 6)),), split="50%")


@pytest.mark.parametrize("hook", [forward_hook, forward_pre_hook, model_hook], ids=lambda c: c.__name__)
def test_hooks_that_were_there_at_prepare_are_part_of_the_plan_until_removed(hook: Callable[[nn.Module], None]) -> None:
    def build() -> nn.Module:
        net = Net()
        hook(net)
        return net

    twins = Twins(build, seeded((2, 6)))
    twins.hold(6, batches=(1, 3))
    for model in (twins.whole, twins.split):
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(model, table).clear()
            getattr(model.second, table).clear()
    with pytest.raises(ModuleError, match=r"hooks of.*changed.*prepare"):
        twins.runtime.run_prefix(seeded((2, 6)))


def test_a_hook_is_seen_in_a_table_that_was_put_there_later() -> None:
    twins = Twins(Net, seeded((2, 6)))
    twins.split.second._forward_hooks = collections.OrderedDict()
    twins.replay(seeded((2, 6)))
    handle = seeded((2, 6)).requires_grad_().register_hook(lambda grad: None)  # of a tensor: it concerns no module
    twins.replay(seeded((2, 6)))
    handle.remove()
    handle = twins.split.second.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ModuleError, match=r"hooks of 'second' \(forward_hooks\) changed"):
        twins.runtime.run_suffix(twins.runtime.run_prefix(seeded((2, 6))))
    handle.remove()
    twins.replay(seeded((2, 6)))


def test_a_global_hook_is_refused_while_it_is_there() -> None:
    twins = Twins(Net, seeded((2, 6)))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        with pytest.raises(ModuleError, match="global module hook"):
            twins.runtime.run_prefix(seeded((2, 6)))
    finally:
        handle.remove()
    twins.replay(seeded((2, 6)))


class Options(nn.Module):
    """Reads settings of every kind at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)
        self.scale, self.kind, self.on, self.sizes, self.table = 0.7, "tanh", True, [1, 2], {"k": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = getattr(torch, self.kind)(self.drop(self.a(x)) * self.scale)
        return self.b((x + 1 if self.on else x) * self.sizes[1] * self.table["k"])


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "float": lambda m: setattr(m, "scale", 3.0),
    "str": lambda m: setattr(m, "kind", "sigmoid"),
    "bool": lambda m: setattr(m, "on", False),
    "a list": lambda m: setattr(m, "sizes", [1, 5]),
    "inside a list": lambda m: m.sizes.__setitem__(1, 5),
    "inside a dict": lambda m: m.table.update(k=1.0),
    "of a submodule": lambda m: setattr(m.drop, "p", 0.1),
    "deleted": lambda m: delattr(m, "on"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_forward_reads_is_followed_or_refused(option: str) -> None:
    twins = Twins(Options, seeded((2, 6)), train=True)
    twins.hold(6, batches=(1, 3))
    cuts = twins.cuts()
    for model in (twins.whole, twins.split):
        OPTIONS[option](model)
    if option == "deleted":
        with pytest.raises(ModuleError, match="'on'"):
            twins.runtime.run_prefix(seeded((2, 6)))
        return
    for cut in cuts:
        either(lambda cut=cut: twins.train(seeded((2, 6)), steps=1, cuts=[cut]), ModuleError, "prepare")
