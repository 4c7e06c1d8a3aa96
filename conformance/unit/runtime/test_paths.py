"""Paths: Python reads numbers out of tensors and branches on them; each path has a plan, and a call is answered on its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, SplitSpec
from ariadne.errors import ModuleError, SpecError, TrainingError, WitnessError
from conformance.suite.state import seed_torch
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_twins import Twins, either, same, seeded, square_loss, state


class Net(nn.Module):
    """(B, 6) -> (B, 4): enter, what `middle` makes of it, leave."""

    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        self.enter, self.left, self.right, self.leave = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.middle = middle
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.middle(self, torch.tanh(self.enter(x))))
        return found


def one_question(m: Net, h: Tensor) -> Tensor:
    return m.left(h).relu() if h.sum() > 0 else m.right(h).sigmoid() * 2


def two_in_a_row(m: Net, h: Tensor) -> Tensor:
    h = m.left(h) if h[0].sum() > 0 else torch.tanh(m.right(h))
    return m.norm(h) if h[0, 0] > 0 else h * 2


def loop_by_data(m: Net, h: Tensor) -> Tensor:
    for _ in range(int(h[0].abs().sum() * 2) % 4):
        h = m.left(h).relu() + h
    return h


def early_exit(m: Net, h: Tensor) -> Tensor:
    h = m.norm(m.left(h))
    if h[0].max() > 1:
        return h
    return m.right(h.relu())


def after_a_write(m: Net, h: Tensor) -> Tensor:
    m.calls += 1
    h = m.norm(h)
    h = m.left(h) if h[0].sum() > 0 else m.right(h)
    m.calls += 2
    return h * (m.calls % 5)


def reads_what_it_wrote(m: Net, h: Tensor) -> Tensor:
    m.calls += 1
    return m.left(h) if m.calls % 2 == 0 else m.right(h)


def layer_drop(m: Net, h: Tensor) -> Tensor:
    for layer in (m.left, m.right):
        if torch.rand(()) < 0.5:
            h = h + layer(torch.dropout(h, 0.3, m.training))
    return h


def under_no_grad(m: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        high = bool(h[0].mean() > 0)
        scale = h.abs().amax() + 1
    return (m.left(h) if high else m.right(h)) / scale


def under_autocast(m: Net, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        low = m.left(h)
        low = low * 2 if low[0].sum() > 0 else m.right(low)
    return low.float()


def called_twice(m: Net, h: Tensor) -> Tensor:
    return m.gate(m.gate(h))  # type: ignore[operator,no-any-return]


def stored_on_one_path(m: Net, h: Tensor) -> Tensor:
    if h[0].sum() > 0:
        m.kept = h.detach() * 2
        return m.left(h)
    return m.right(h)


def used_on_one_path(m: Net, h: Tensor) -> Tensor:
    """What one path alone uses is made before the question."""
    extra, total = m.left(h).sigmoid(), h[0].sum()
    return h * extra if total > 0 else m.right(h)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.way = nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.way(h) if h[0].sum() > 0 else h - 0.1


MIDDLES = (
    one_question, two_in_a_row, loop_by_data, early_exit, after_a_write, reads_what_it_wrote, layer_drop, under_no_grad,
    under_autocast, called_twice, stored_on_one_path, used_on_one_path,
)  # fmt: skip


def build(middle: Callable[..., Tensor]) -> Net:
    net = Net(middle)
    if middle is called_twice:
        net.gate = Gate()
    return net


def named(middles: Any, *long: Any) -> dict[str, Any]:
    """Each of these; those that take long with the other variants."""
    marked = [pytest.param(m, marks=pytest.mark.variants) if m in long else m for m in middles]
    return {"argvalues": marked, "ids": [m.__name__ for m in middles]}


def shown(middle: Callable[..., Tensor], train: bool) -> tuple[Twins, list[Any]]:
    """Twins, of which the split one was shown some inputs beforehand, at every cut."""
    examples = [(seeded((3, 6), seed),) for seed in range(6)]
    twins = Twins(
        lambda: build(middle), seeded((3, 6), 3), train=train, prepare=partial(prepare_split, more_examples=examples)
    )
    return twins, twins.cuts()


@pytest.mark.parametrize("middle", **named(MIDDLES, layer_drop))
def test_calls_that_change_path_equal_the_model_at_every_cut(middle: Callable[..., Tensor]) -> None:
    twins, cuts = shown(middle, True)
    for runtime in cuts[::2]:
        for seed in range(7):
            seed_torch(seed)
            with torch.no_grad():
                want = twins.whole(seeded((3, 6), seed))
            after = state(twins.whole), twins.whole.kept
            seed_torch(seed)
            boundary = runtime.run_prefix(seeded((3, 6), seed))
            same(want, runtime.run_suffix(boundary))
            same(after, (state(twins.split), twins.split.kept))


@pytest.mark.parametrize("middle", **named(MIDDLES, loop_by_data))
def test_training_steps_that_change_path_equal_the_model_at_every_cut(middle: Callable[..., Tensor]) -> None:
    twins, cuts = shown(middle, True)
    for runtime in cuts[1::3]:
        for seed in range(5 if not runtime.candidate.inexact else 0):
            twins.train(seeded((3, 6), seed), steps=1, cuts=[runtime])


@pytest.mark.parametrize("boundary", ["30%", "80%"])
@pytest.mark.parametrize("middle", **named((two_in_a_row, reads_what_it_wrote, layer_drop, stored_on_one_path)))
def test_a_path_that_nobody_showed_is_captured_from_the_call_that_takes_it(
    middle: Callable[..., Tensor], boundary: str
) -> None:
    twins = Twins(lambda: build(middle), seeded((3, 6), 3), train=True)
    runtime = twins.runtime.resplit(boundary)
    for seed in range(5):
        batch = 2 + seed % 3
        seed_torch(seed)
        with torch.no_grad():
            want = twins.whole(seeded((batch, 6), seed))
        after = state(twins.whole), twins.whole.kept
        seed_torch(seed)
        same(want, runtime.run_suffix(runtime.run_prefix(seeded((batch, 6), seed))))
        same(after, (state(twins.split), twins.split.kept))
        twins.train(seeded((batch, 6), seed + 10), steps=1, cuts=[runtime])
    assert len(runtime.plans) >= 2


# --- where it ends ------------------------------------------------------------------------------------------------------

X = seeded((3, 6), 3)


def prepared(middle: Callable[..., Tensor], split: Any = "50%", **options: Any) -> tuple[Net, Any]:
    seed_torch(0)
    model = build(middle).eval()
    return model, prepare_split(model, (X,), split=split, **options)


def equal(model: nn.Module, runtime: Any, x: Tensor) -> None:
    with torch.no_grad():
        same(model(x), runtime.run_suffix(runtime.run_prefix(x)))


def test_a_path_past_the_last_raises_an_error_that_names_the_way_out() -> None:
    def scaled(m: Net, h: Tensor) -> Tensor:
        return m.left(h) * float(str(h.sum().item()))

    model, runtime = prepared(scaled, SplitSpec("50%", max_paths=3))
    for seed in range(2):
        equal(model, runtime, seeded((3, 6), seed))
    with pytest.raises(WitnessError, match=r"3 path\(s\) .* max_paths.*fallback=\"python\""):
        equal(model, runtime, seeded((3, 6), 9))
    equal(model, runtime, X)
    assert len(runtime.plans) == 3


def test_code_that_subscribes_type_while_it_is_in_disguise_runs() -> None:
    """As modules do that torch imports in the midst of a first capture; without, that fell back to real runs."""

    def scaled(m: Net, h: Tensor) -> Tensor:
        return m.left(h) * h.sum().item() * len(type[int].__args__)  # type: ignore[attr-defined]

    _, runtime = prepared(scaled, SplitSpec("50%"))
    assert runtime.plan.captured_by == "symbolic"


def test_what_a_refused_call_moved_is_put_back() -> None:
    model, runtime = prepared(reads_what_it_wrote, SplitSpec("70%", max_paths=1))
    runtime.run_suffix(runtime.run_prefix(X))
    moved = model.calls.clone()
    with pytest.raises(WitnessError, match="max_paths"):
        runtime.run_suffix(runtime.run_prefix(X))
    assert torch.equal(model.calls, moved)


def test_a_number_of_paths_is_a_number() -> None:
    with pytest.raises(SpecError, match="max_paths is a number of paths, 1 or more; found 0"):
        SplitSpec("50%", max_paths=0)


def on_another_path() -> Tensor:
    model, _ = prepared(one_question, "after:enter")
    above = [bool(torch.tanh(model.enter(x)).sum() > 0) for x in (X, *(seeded((3, 6), s) for s in range(9)))]
    return seeded((3, 6), above.index(not above[0]) - 1)


def test_a_suffix_behind_a_wire_says_which_question_had_which_answer() -> None:
    model, runtime = prepared(one_question, "after:enter")
    other = on_another_path()
    boundary = BoundaryPayload.from_bytes(runtime.run_prefix(other).to_bytes())
    with pytest.raises(WitnessError, match=r"at capture it was (True|False), now it is .*over a wire"):
        runtime.run_suffix(boundary)
    equal(model, runtime, other)


def test_an_input_written_into_before_a_suffix_on_another_path_is_told() -> None:
    _, runtime = prepared(one_question, "after:enter")
    x = on_another_path()
    boundary = runtime.run_prefix(x)
    x.mul_(2)
    with pytest.raises(WitnessError, match="were written into since"):
        runtime.run_suffix(boundary)


def test_boundaries_of_several_paths_are_in_flight_and_run_twice() -> None:
    model, runtime = prepared(two_in_a_row, "after:enter")
    inputs = [seeded((3, 6), seed) for seed in range(5)]
    boundaries = [runtime.run_prefix(x) for x in inputs]
    with torch.no_grad():
        for _ in range(2):
            for x, boundary in zip(inputs, boundaries, strict=True):
                same(model(x), runtime.run_suffix(boundary))


def test_a_copy_has_the_paths_and_a_model_of_its_own() -> None:
    model, runtime = prepared(two_in_a_row, more_examples=[(seeded((3, 6), s),) for s in range(5)])
    again = copy.deepcopy(runtime)
    assert len(again.plans) == len(runtime.plans) > 1
    with torch.no_grad():
        for p in again.model.parameters():
            p.mul_(1.5)
    for seed in range(5):
        equal(again.model, again, seeded((3, 6), seed))
        equal(model, runtime, seeded((3, 6), seed))


def test_parameters_of_paths_that_nobody_took_have_a_side_and_keep_it() -> None:
    seed_torch(0)
    model = build(one_question)
    runtime = prepare_split(model, (X,), split=SplitSpec("after:enter", trainable=True))
    sides = runtime.prefix_parameters(), runtime.suffix_parameters()
    ids = [{id(p) for p in side} for side in sides]
    assert {id(p) for p in (*model.left.parameters(), *model.right.parameters())} <= ids[0] | ids[1]
    for seed in range(5):
        boundary = runtime.run_training_prefix(seeded((3, 6), seed))
        _, gradients = runtime.train_suffix(boundary, loss_fn=square_loss)
        runtime.backward_prefix(boundary, gradients)
    assert len(runtime.plans) == 2
    assert [{id(p) for p in side} for side in (runtime.prefix_parameters(), runtime.suffix_parameters())] == ids


def test_a_known_path_runs_what_it_shares_once() -> None:
    ran = []

    def heavy(m: Net, h: Tensor) -> Tensor:
        total = h[0].sum()
        for _ in range(6):
            h = m.left(h).relu()
        return m.right(h) if total > 0 else h * 2

    model, runtime = prepared(heavy, "90%", more_examples=[(seeded((3, 6), s) * 3,) for s in range(6)])
    inputs = [seeded((3, 6), s) * 3 for s in range(6)]
    for x in inputs * 2:
        equal(model, runtime, x)
    assert len(runtime.plans) == 2

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    counts = set()
    for x in inputs:
        ran.clear()
        with Counting():
            runtime.run_suffix(runtime.run_prefix(x))
        counts.add(ran.count("relu"))
    assert counts == {6}


def keeps_a_list(m: Net, h: Tensor) -> Tensor:
    m.kept.append(h.detach().sum())
    h = m.left(h)
    return h if h[0].sum() > h[1].sum() else m.right(h)


def keeps_a_tensor(m: Net, h: Tensor) -> Tensor:
    m.kept = h.detach() * 2
    h = m.left(h)
    return h if h[0].sum() > h[1].sum() else m.right(h)


@pytest.mark.parametrize("middle", **named((keeps_a_list, keeps_a_tensor)))
def test_what_a_prefix_that_came_later_put_into_python_is_not_lost(middle: Callable[..., Tensor]) -> None:
    model, refused = build(middle).eval(), 0
    model.kept = []
    runtime = prepare_split(model, (X,), split="after:left")
    for seed in range(8):
        model.kept = []
        boundary = runtime.run_prefix(seeded((3, 6), seed))
        for other in range(4):  # of which a later tensor may stand where the first one stood in memory
            runtime.run_prefix(seeded((3, 6), other))
        after = copy.deepcopy(model.kept)
        refused += either(partial(runtime.run_suffix, boundary), WitnessError, "were written into since") == "refused"
        same(after, model.kept)
    assert refused


class Writes(nn.Module):
    """It writes into its input, and then asks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        h = self.enter(x)
        return self.left(h) if h[0].sum() > h[1].sum() else self.right(h) * x


@pytest.mark.parametrize("boundary", ["10%", "60%", "joined"])
def test_an_input_with_a_graph_that_was_written_into_gets_that_graph_back(boundary: str) -> None:
    seed_torch(0)
    model = Writes()
    runtime = prepare_split(model, (X.clone().requires_grad_() * 1,), split="40%" if boundary == "joined" else boundary)
    for seed in range(6):
        found = []
        for whole in (True, False):
            model.zero_grad()
            source = seeded((3, 6), seed).requires_grad_()
            if whole or boundary == "joined":
                square_loss((model if whole else runtime.joined)(source * 1)).backward()
            else:
                crossing = runtime.run_training_prefix(source * 1)
                runtime.backward_prefix(crossing, runtime.train_suffix(crossing, loss_fn=square_loss)[1])
            found.append((source.grad, [p.grad for p in model.parameters()]))
        same(*found)
    assert len(runtime.plans) == 2


def test_a_view_with_a_graph_that_was_written_into_is_told() -> None:
    seed_torch(0)
    model = Writes()
    runtime = prepare_split(model, (X.clone(),), split="90%")
    views = [(seeded((4, 6), seed).requires_grad_() * 1)[1:] for seed in range(6)]
    found = [
        either(partial(runtime.run_training_prefix, x), WitnessError, "is a view", "Pass a clone()") for x in views
    ]
    assert {*found} == {"followed", "refused"}


def test_an_input_written_into_where_no_version_tells_is_told() -> None:
    seed_torch(0)
    model = build(one_question)
    runtime = prepare_split(model, (X,), split="after:enter")
    x = on_another_path()
    memory = x.numpy()
    boundary = runtime.run_training_prefix(torch.from_numpy(memory))
    memory *= 2
    with pytest.raises(WitnessError, match=r"gives another 'enter'.* were written into since"):
        runtime.train_suffix(boundary, loss_fn=square_loss)


def norm_twice(m: Net, h: Tensor) -> Tensor:
    h = m.norm(m.left(m.norm(h)))
    return h if h[0].sum() > 0 else m.right(h)


@pytest.mark.variants
def test_a_suffix_that_writes_what_its_prefix_reads_runs_on_another_path() -> None:
    twins = Twins(lambda: build(norm_twice), X, train=True)
    for runtime in twins.cuts():
        for seed in range(4):
            twins.train(seeded((3, 6), seed), steps=1, cuts=[runtime])


def graph_in_a_buffer(m: Net, h: Tensor) -> Tensor:
    m.norm.running_mean.detach_()
    m.norm.running_mean.mul_(0.5).add_(h.mean(0))
    h = m.left(h) + m.norm.running_mean
    return h if h[0].sum() > 0 else m.right(h)


def test_a_buffer_whose_graph_leads_past_the_boundary_is_told() -> None:
    twins = Twins(lambda: build(graph_in_a_buffer), X, train=True)
    cuts = twins.cuts()
    beside = [runtime for runtime in cuts if "gets a graph before the cut" in runtime.candidate.inexact]
    for runtime in cuts:
        for seed in range(3 if runtime not in beside else 0):
            twins.train(seeded((3, 6), seed), steps=1, cuts=[runtime])
    with pytest.raises(TrainingError, match=r"gets a graph before the cut.*past the boundary"):
        beside[0].run_training_prefix(X)


def draws_on_one_path(m: Net, h: Tensor) -> Tensor:
    return m.right(h) if h[0].sum() > h[-1].sum() else torch.dropout(m.left(h), 0.3, True)


def test_a_path_without_draws_is_captured_without_any() -> None:
    model = build(draws_on_one_path)
    runtime = prepare_split(model, (X,), split="50%")
    for seed in range(6):
        for batch in (2, 3):
            seed_torch(seed)
            with torch.no_grad():
                want = model(seeded((batch, 6), seed)), torch.get_rng_state()
            seed_torch(seed)
            same(want, (runtime.run_suffix(runtime.run_prefix(seeded((batch, 6), seed))), torch.get_rng_state()))


class Gained(nn.Module):
    """(B, 6) -> (B, 6): one of two layers, by data; the right one is scaled by what stands on the module that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.left, self.right, self.leave = (nn.Linear(6, 6) for _ in range(4))
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        h = self.left(h) if h.sum() > 0 else self.right(h) * self.gain
        found: Tensor = self.leave(h)
        return found


def gain(model: Gained) -> None:
    model.gain = 3.0


def class_of_the_branch(model: Gained) -> None:
    model.right.__class__ = type("Linear", (nn.Linear,), {"forward": lambda s, x: nn.Linear.forward(s, x) + 1})


def hook_on_the_branch(model: Gained) -> None:
    model.right.register_forward_hook(lambda module, args, output: output + 1)


@pytest.mark.parametrize("boundary", ["after:enter", "percent:85"])
@pytest.mark.parametrize("change", [gain, class_of_the_branch, hook_on_the_branch])
def test_what_changes_on_another_path_is_seen_by_the_call_that_goes_on_there(
    change: Callable[[Gained], None], boundary: str
) -> None:
    torch.manual_seed(0)
    model = Gained().eval()
    x = torch.randn(2, 6)
    some = {bool(model.enter(s).sum() > 0): s for s in (x, -x, x * 5, -x * 5)}
    left, right = some[True], some[False]
    runtime = prepare_split(model, (left,), split=boundary, more_examples=[(right,)])
    for x in (left, right, left, right, left):
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
    change(model)
    refusals = []
    for x in (left, right):  # the first sees a write, and goes on
        try:
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
        except ModuleError as error:
            refusals.append(str(error))
    assert all("right" in told or "gain" in told for told in refusals)
