"""Views whose memory is written into: autograd gives them another place, and adds up gradients in another order."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.cut.frontier import GradientOrder
from ariadne.errors import FrontierError, TrainingError
from ariadne.runtime import Ends, training
from conformance.suite.compare import difference
from conformance.unit.trap_kit import without_what_is_a_view

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(7))


def stale(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x)
    view = base.unsqueeze(0).expand(3, -1, -1)
    base.relu_()
    return m.chain(base), view, base


def used_without_gradients(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x)
    view = base.unsqueeze(0).expand(3, -1, -1)
    base.relu_()
    with torch.no_grad():
        twice = view * 2
    return m.chain(base), view, base, twice


def used_in_a_question(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x)
    view = base.unsqueeze(0).expand(3, -1, -1)
    base.relu_()
    return m.chain(base), view, base, torch.where(view > 0, 1.0, 2.0)


def written_without_gradients(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x)
    view = base.view(-1, 2, 2)
    with torch.no_grad():
        view.clamp_(min=-1)
    return m.chain(base), view, base


def parameter_clamped(m: Any, x: torch.Tensor) -> Any:
    view = m.weight.t()
    with torch.no_grad():
        m.weight.clamp_(-1, 1)
    h = m.chain(m.first(x))
    return F.linear(F.linear(h, m.weight), m.weight) @ view


def used_again(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x)
    view = base.unsqueeze(0).expand(3, -1, -1)
    base.relu_()
    return m.chain(base), view, base, view * 2


WAYS = [parameter_clamped, stale, used_again, used_in_a_question, used_without_gradients, written_without_gradients]


class Net(nn.Module):
    """Several paths lead back to one tensor."""

    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)


def loss_of(output: Any, _: object = None) -> torch.Tensor:
    total = torch.zeros(())
    for i, t in enumerate(output if isinstance(output, tuple) else (output,)):
        total = total + (t * torch.randn(t.shape, generator=torch.Generator().manual_seed(i))).sum()
    return total


def differing(way: Callable[[Any, torch.Tensor], Any], frozen: bool = False, steps: int = 8) -> list[str]:
    """The cuts that train, and at which a gradient of some step is not the whole model's."""
    torch.manual_seed(0)
    model = Net(way).requires_grad_(not frozen)
    split = prepare_split(model, (X,), split="auto")
    model.requires_grad_(True)
    found, trained = [], 0
    for cut in split.candidates:
        if not cut.safe or cut.inexact:
            continue
        runtime, whole = split.resplit(cut), copy.deepcopy(model)
        for step in range(steps):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            whole.zero_grad()
            loss_of(whole(x)).backward()
            try:
                boundary = runtime.run_training_prefix(x)
            except TrainingError:  # the plan for training says so
                break
            _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
            runtime.backward_prefix(boundary, gradients)
            trained += 1
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                same = (p.grad is None) == (q.grad is None)
                if not same or (p.grad is not None and q.grad is not None and not torch.equal(p.grad, q.grad)):
                    found.append(cut.split_id)
    assert trained
    return sorted(set(found))


@pytest.mark.parametrize("frozen", [False, True], ids=["as_it_is", "frozen_at_prepare"])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_every_cut_that_trains_does_so_as_the_whole(way: Any, frozen: bool) -> None:
    assert differing(way, frozen, steps=3) == []


@pytest.mark.parametrize("way", [w for w in WAYS if w is not used_again], ids=lambda f: f.__name__)
def test_without_the_rule_gradients_differ(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientOrder, "at", lambda self, cut, live: "")
    assert differing(way)


# --- two gradients: their sum lies in memory as the first of them ---------------------------------------------------------


def beside(use: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], Any]:
    """A view of a linear layer's output, which is written into, and one use of the output itself."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.first(x)
        view = y.t()
        y.mul_(2)
        return use(m, y), view * 3

    return forward


def copied(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x).t().contiguous()
    view = base.t()
    base.mul_(2)
    return base.t() * 2, view.t() * 3


def copied_flat(m: Any, x: torch.Tensor) -> Any:
    base = m.first(x).t().reshape(-1)
    view = base.view(2, -1)
    base.mul_(2)
    return base * 0.3, base * 0.7, view * 1.1


def given(m: Any, x: torch.Tensor) -> Any:
    y = x * 1.0
    view = y.t()
    y.mul_(2)
    return m.first(y), view * 3


@torch.library.custom_op("ariadne_test_stale_views::linear", mutates_args=())
def turning_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A matmul whose gradient lies transposed."""
    return x @ weight.t()


turning_linear.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
turning_linear.register_autograd(
    lambda ctx, g: ((ctx.saved_tensors[1].t() @ g.t()).t(), g.t() @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# Each with whether it trains at the cut that the view crosses together with its base, once that is written into.
MEETINGS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], bool]] = {
    "linear": (beside(lambda m, y: m.second(y)), True),
    "linear, then transposed": (beside(lambda m, y: m.second(y).t() * 2), True),
    "elementwise": (beside(lambda m, y: y * 2), False),
    "transposed": (beside(lambda m, y: y.t() * 2), False),
    "bias": (beside(lambda m, y: F.linear(y.detach(), m.second.weight, y).t() * 2), False),
    "another linear": (beside(lambda m, y: turning_linear(y, m.second.weight)), False),
    "copied": (copied, False),
    "copied flat": (copied_flat, False),
    "of an elementwise op": (given, False),
}


class Wide(nn.Module):
    """Wide enough that the layout of a gradient shows in the sum of a bias's."""

    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.way, self.before = way, nn.Linear(64, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, self.before(x))


def wide(way: Callable[[Any, torch.Tensor], Any]) -> tuple[list[str], bool]:
    """The cuts at which a gradient is not the whole model's, and whether any cut after the write refuses to train."""
    torch.manual_seed(0)
    model, x = Wide(way), torch.randn(256, 64)
    split, whole = prepare_split(model, (x,), split=SplitSpec("auto", dynamic_batch=(2, 512))), copy.deepcopy(model)
    loss_of(whole(x)).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    different = []
    written = next(i for i, node in enumerate(split.plan.nodes) if node.writes)
    for cut in split.candidates:
        if not cut.safe or cut.inexact:
            continue
        runtime = split.resplit(cut)
        model.zero_grad()
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, loss_fn=loss_of)
        runtime.backward_prefix(boundary, gradients)
        if difference(expected, {name: p.grad for name, p in model.named_parameters()}):
            different.append(cut.split_id)
    return different, any(c.inexact for c in split.candidates if c.safe and c.cut > written)


@pytest.mark.parametrize("case", sorted(MEETINGS))
def test_two_gradients_meet_where_both_lie_as_the_base_does_or_not_at_all(case: str) -> None:
    way, exact = MEETINGS[case]
    assert wide(way) == ([], not exact)


@pytest.mark.parametrize("case", ["bias", "copied", "transposed"])
def test_where_two_gradients_lie_otherwise_they_differ(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientOrder, "_written_before", lambda self, cut, live: "")
    assert wide(MEETINGS[case][0])[0]


# --- written into after the cut -----------------------------------------------------------------------------------------

MADE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "no_view": lambda m, x: x @ m.weight,
    "of_a_tensor_that_einsum_keeps_to_itself": lambda m, x: torch.einsum("bi,io->ob", x, m.weight),
    "of_what_linear_keeps_in_older_torch": lambda m, x: m.first(x.view(2, 2, 2).repeat(1, 1, 2)).flatten(0, 1),
    "part_of_another": lambda m, x: m.first(x)[:, :3],
    "the_same_by_an_alias": lambda m, x: m.first(x)[...],
    "the_same_by_an_op_with_nothing_to_do": lambda m, x: m.first(x).contiguous(),
    "transposed": lambda m, x: m.first(x).t(),
}
USES = [u for n in range(3) for u in itertools.combinations(("twice", "plus", "view", "view_used", "again"), n)]


def writing(made: str, how: tuple[str, ...]) -> Callable[[Any, torch.Tensor], Any]:
    """A way in which a tensor is used, and viewed, before relu_ writes into it and after."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        y = MADE[made](m, x)
        outputs = [use for name, use in (("twice", y * 2), ("plus", y + 3)) if name in how]
        view = y.t() if "view" in how else y
        if "view_used" in how:
            outputs.append(view * 5)
        y.relu_()
        if "again" in how:
            outputs.append(y.unsqueeze(0) * 2)
        return *outputs, y * 0.3, y * 0.7, view * 2

    return forward


@pytest.mark.parametrize(
    "made", [m if m != "no_view" else pytest.param(m, marks=pytest.mark.variants) for m in sorted(MADE)]
)
def test_every_cut_before_a_write_trains_as_the_whole_or_refuses_to(made: str) -> None:
    assert {how: found for how in USES if (found := differing(writing(made, how)))} == {}


@pytest.mark.parametrize("made", sorted(m for m in MADE if m.startswith(("of_a_tensor", "part", "transposed"))))
def test_if_views_were_not_told_gradients_would_differ(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_what_is_a_view(monkeypatch)
    assert any(differing(writing(made, how)) for how in USES)


def test_what_is_a_view_is_what_was_one_in_a_real_run() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.transpose(-1, -2)  # torch's Python version, which fake tensors run, ends in a view
            return scores.float().contiguous().mul_(2)  # these two give back what they got

    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    split = prepare_split(Attention(), (x,), split="auto")
    assert split.plan.captured_by == "symbolic"
    assert [n for n, v in split.plan.values.items() if v.is_view] == ["transpose_1"]
    assert not [c for c in split.candidates if c.inexact]
    for cut in split.candidates:
        split.resplit(cut).run_training_prefix(x)


def test_a_batch_at_which_what_is_written_into_is_a_view_as_it_was_not_does_not_train() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.first(x).t().reshape(-1)  # of one sample a view, of two a copy
        early = y * 5
        y.relu_()
        return early, y * 0.3, y * 0.7

    model = Net(forward)
    split = prepare_split(model, (X,), split=SplitSpec("auto", dynamic_batch=(1, 4)))
    cut = next(c for c in split.candidates if c.live == ("reshape_1",))
    runtime = split.resplit(cut)
    loss_of(runtime.run_suffix(runtime.run_training_prefix(X)))
    with pytest.raises(TrainingError, match="'reshape_1' is a view of another tensor, which it was not at capture"):
        runtime.run_training_prefix(X[:1])
    with torch.no_grad():
        assert all(map(torch.equal, model(X[:1]), runtime.run_suffix(runtime.run_prefix(X[:1]))))


@pytest.mark.parametrize(("options", "asked"), [(None, True), ({"backend": "eager"}, False)])
def test_compiled_mode_asks_for_views_where_training_runs_as_eager_code(options: Any, asked: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.first(x).t().reshape(-1)
        early = y * 5
        y.relu_()
        return early, y * 0.3, y * 0.7

    spec = SplitSpec("auto", dynamic_batch=(1, 4))
    split = prepare_split(Net(forward), (X,), split=spec, mode="compiled", compile_options=options)
    runtime = split.resplit(next(c for c in split.candidates if c.live == ("reshape_1",)))
    runtime.run_training_prefix(X)
    if asked:
        with pytest.raises(TrainingError, match="'reshape_1' is a view of another tensor, which it was not at capture"):
            runtime.run_training_prefix(X[:1])
    else:  # a compiler makes views of its own
        runtime.run_training_prefix(X[:1])


def returns_a_stale_view(m: Any, x: torch.Tensor) -> Any:
    """Four gradients of one tensor: three of its own, and one of a view that the loss is the first to ask for its node."""
    y = m.first(x)
    y.sin_()
    view = y.expand(-1, -1)
    y.neg_()
    return torch.sigmoid(y) * y, y, view, y * 1, y


def test_the_loss_is_the_first_to_ask_a_stale_view_of_the_output_for_its_node() -> None:
    assert not differing(returns_a_stale_view)


def test_a_stale_view_that_was_asked_before_the_loss_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Early(Ends):
        def __init__(self, output: Any) -> None:
            super().__init__(output)
            list(self)

    monkeypatch.setattr(training, "Ends", Early)
    assert differing(returns_a_stale_view)


def test_numbers_without_gradients_may_be_written_into_at_any_cut() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        mask = (m.first(x) > 0).t()
        twice = mask | (x.t() > 1), mask & (x.t() < 1)
        mask.logical_not_()
        return m.chain(x * mask.t()), *twice

    split = prepare_split(Net(forward), (X,), split="auto")
    assert not [c for c in split.candidates if c.inexact]


def test_a_cut_before_a_write_into_a_view_replays_and_does_not_train() -> None:
    split = prepare_split(Net(writing("transposed", ())), (X,), split="auto")
    with torch.no_grad():
        whole = split.model(X)
    (refused,) = [c for c in split.candidates if c.inexact]
    runtime = split.resplit(refused)
    with torch.no_grad():
        assert all(map(torch.equal, whole, runtime.run_suffix(runtime.run_prefix(X))))
    with pytest.raises(TrainingError, match=r"'t_1' is a view of memory that 'relu__1' writes into after the cut"):
        runtime.run_training_prefix(X)


def test_a_use_whose_result_nobody_wants_stays_where_it_gives_a_view_its_place() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.first(x)
        view = y.t()
        y.relu_()
        view.clone()
        y.clone()  # no view: this one goes
        return y * 0.3, y * 0.7, view * 2

    assert differing(forward) == []
    split = prepare_split(Net(forward), (X,), split="auto")
    plan = split.plan
    assert [node.args[0].name for node in plan.nodes if node.target == "aten.clone.default"] == ["t_1"]
    boundary = split.run_training_prefix(X)
    assert boundary.plan_signature == plan.signature


def test_what_forward_keeps_is_not_written_into_on_the_other_side_of_the_cut() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        m.kept = y = m.first(x)
        y[:, 0].relu_()
        return y.sin()

    model = Net(forward)
    whole, split = copy.deepcopy(model), prepare_split(model, (X,), split="auto")
    with torch.no_grad():
        whole(X)
    for candidate in filter(lambda c: c.safe, split.candidates):
        model.kept = None
        again = split.resplit(candidate)
        again.run_suffix(again.run_prefix(X))
        assert torch.equal(model.kept, whole.kept)


# --- such cuts ----------------------------------------------------------------------------------------------------------


def test_such_a_cut_replays_and_does_not_train() -> None:
    model = Net(stale)
    split = prepare_split(model, (X,), split="cut:4")
    with torch.no_grad():
        whole, found = model(X), split.run_suffix(split.run_prefix(X))
    assert all(map(torch.equal, whole, found))
    with pytest.raises(TrainingError, match=r"across cut:4 may differ .*'expand_1' is a view of memory.*Cut elsewhere"):
        split.run_training_prefix(X)
    with pytest.raises(FrontierError, match=r"'cut:4' with trainable=True: 'expand_1' is a view.*Nearest safe splits"):
        prepare_split(model, (X,), split=SplitSpec(boundary="cut:4", trainable=True))
    percent = prepare_split(model, (X,), split=SplitSpec(boundary="percent:50", trainable=True))
    assert not next(c for c in percent.candidates if c.split_id == percent.split_id).inexact
