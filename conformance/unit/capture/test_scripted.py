"""Functions under `torch.jit.script` and `torch.jit.trace`: each call is one op, right cold and warm, in training too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitRuntime, SplitSpec, prepare_split
from ariadne.capture.scripted import Effects
from ariadne.compare import difference
from ariadne.errors import UnsupportedError, VerificationError, WitnessError

BATCHES = (2, 3, 6, 1, 8)
TIMES = 4  # a function is profiled at its first call, and compiled for the next

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.jit import script, script_if_tracing, trace

    class Two(NamedTuple):
        u: Tensor
        v: Tensor

    @script
    def snake(x: Tensor, p: Tensor) -> Tensor:
        return x + torch.sin(p * x).pow(2)

    @script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    @script
    def shifted(x: Tensor, by: int) -> tuple[Tensor, int]:
        y = x * 2
        y.add_(by)
        return y, x.shape[1]

    @script
    def with_batch(x: Tensor) -> tuple[Tensor, int]:
        return x.relu(), x.shape[0]

    @script
    def doubled_(x: Tensor) -> Tensor:
        x.mul_(2)
        return x

    @script
    def counted(x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(x.detach().sum(0))
        return x * seen

    @script
    def containers(xs: list[Tensor], more: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        return {"a": xs[0] + xs[1]}, [more["k"], xs[0]]

    @script
    def by_size(x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return x * 2
        return x * 3

    @script
    def at_most_four(x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            return x[:4]
        return x

    @script
    def by_data(x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x * 3

    @script
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True)

    @script
    def named(x: Tensor) -> Two:
        return Two(x * 2, x.sin())

    @script
    def perhaps(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if y is None:
            return x * 2, None
        return x + y, y

    @script
    def width(x: Tensor) -> int:
        return x.shape[1]

    @script
    def largest(x: Tensor) -> float:
        return float(x.abs().max())

    @script
    def itself(x: Tensor) -> Tensor:
        return x

    @script
    def bare(x: Tensor, wide: bool) -> tuple[Tensor, Tensor | None]:
        if x.shape[0] > 2:
            return x, x
        return x, None

    @script_if_tracing
    def maybe(x: Tensor) -> Tensor:
        return x * torch.tanh(x)

    traced = trace(lambda x: x * torch.tanh(x), (torch.ones(3, 4),))
    scripted_linear = script(nn.Linear(4, 4))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.p = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.act = snake


class OfTheClass(Base):
    gate = swish

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.gate(self.a(x)))


def model(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return type("Body", (Base,), {"forward": lambda self, x: self.b(body(self, self.a(x)))})()


def with_size_of_batch(s: Any, h: Tensor) -> Tensor:
    y, n = with_batch(h)
    return y * n


def with_containers(s: Any, h: Tensor) -> Tensor:
    d, (k, first) = containers([h, h.cos()], more={"k": h.sin()})
    return d["a"] + k * first


def with_optional(s: Any, h: Tensor) -> Tensor:
    h, nothing = perhaps(h)
    assert nothing is None
    h, p = perhaps(h, s.p)
    return h + p


def written_view(s: Any, h: Tensor) -> Tensor:
    y = itself(h)
    y.relu_()
    return h + y


def without_gradients(s: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = snake(h, s.p)
    return h * gate


def in_autocast(s: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return snake(h @ h.new_ones(4, 4), s.p).float()


def fewer_rows(s: Any, h: Tensor) -> Tensor:
    few = at_most_four(h)
    return few[:1].expand(h.shape[0], 4) * few.shape[0]


SPELLINGS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a global function": lambda s, h: snake(h, s.p),
    "an attribute, by keyword": lambda s, h: s.act(h, p=s.p),
    "in turn": lambda s, h: swish(snake(swish(h), s.p)),
    "a number in, and one out": lambda s, h: torch.mul(*shifted(h, 3)),
    "the batch in": lambda s, h: shifted(h, h.shape[0])[0],
    "the batch out": with_size_of_batch,
    "containers": with_containers,
    "a namedtuple": lambda s, h: named(h).u + named(h).v,
    "optional": with_optional,
    "a number alone": lambda s, h: h * width(h),
    "written": lambda s, h: doubled_(h),
    "a buffer is written": lambda s, h: counted(h, s.seen),
    "a view that is written": written_view,
    "a parameter comes back": lambda s, h: h * itself(s.p),
    "branches on the batch": lambda s, h: by_size(h),
    "as many rows as it likes": fewer_rows,
    "branches on data": lambda s, h: by_data(h),
    "draws": lambda s, h: dropped(h),
    "without gradients": without_gradients,
    "in autocast": in_autocast,
    "scripted if traced": lambda s, h: maybe(h),
    "traced": lambda s, h: traced(h),
}


def step(run: Callable[[], Tensor], of: nn.Module) -> Any:
    of.zero_grad()
    torch.manual_seed(3)
    loss = run()
    return loss.detach(), [p.grad for p in of.parameters()], [b.clone() for b in of.buffers()], torch.get_rng_state()


def hold(runtime: SplitRuntime, twin: nn.Module, batch: int) -> None:
    """One call and one step of both, compared bit for bit."""
    x, t = torch.randn(batch, 4), torch.randn(batch, 4)
    torch.manual_seed(2)
    found = runtime.run_suffix(runtime.run_prefix(x))
    torch.manual_seed(2)
    with torch.no_grad():
        assert difference(twin(x), found) is None

    def whole() -> Tensor:
        loss = F.mse_loss(twin(x), t)
        loss.backward()
        return loss

    def halves() -> Tensor:
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, t, loss_fn=F.mse_loss)
        runtime.backward_prefix(boundary, gradients)
        return loss

    assert difference(step(whole, twin), step(halves, runtime.model)) is None


def held_everywhere(make: Callable[[], nn.Module]) -> SplitRuntime:
    """A split that was held against its twin at each cut and batch, cold and warm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runtime = prepare_split(
            make(), (torch.randn(2, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 8), trainable=True)
        )
        for cut in runtime.candidates:
            if cut.safe and cut.trainable and not cut.inexact:
                again, twin = runtime.resplit(cut), make()
                twin.load_state_dict(again.model.state_dict())
                for batch in BATCHES:
                    for _ in range(TIMES):
                        hold(again, twin, batch)
    return runtime


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_scripted_function_gives_what_the_model_gives_cold_and_warm(spelling: str) -> None:
    held_everywhere(lambda: model(SPELLINGS[spelling]))


def test_so_does_one_that_stands_in_the_class() -> None:
    held_everywhere(OfTheClass)


def prepared(body: Callable[[Any, Tensor], Tensor], **options: Any) -> SplitRuntime:
    split = SplitSpec("percent:50", dynamic_batch=(1, 8), trainable=True)
    return prepare_split(model(body), (torch.randn(2, 4),), split=split, **options)


def test_it_is_one_op_for_every_batch() -> None:
    plan = prepared(SPELLINGS["a global function"]).plan
    assert [n.target for n in plan.nodes] == ["aten.linear.default", "python.torch.jit.snake", "aten.linear.default"]
    assert (plan.captured_by, str(plan.batches)) == ("symbolic", "1 to 8")
    assert (plan.nodes[1].writes, plan.nodes[1].seeded, plan.nodes[1].may_alias) == ((), False, ())


def test_what_it_writes_and_draws_is_read_from_its_graph() -> None:
    (_, op, _) = prepared(SPELLINGS["written"]).plan.nodes
    assert op.writes == ("a",)
    (_, op, _) = prepared(SPELLINGS["a buffer is written"]).plan.nodes
    assert op.writes == ("seen",)
    (_, op, _) = prepared(SPELLINGS["draws"]).plan.nodes
    assert op.seeded


def test_what_it_may_give_back_of_what_it_got_is_followed_through_branches_and_containers() -> None:
    found = {f.name: Effects.of(f).aliases for f in (perhaps, containers, at_most_four, snake, counted, itself)}
    assert found == {
        "perhaps": (False, True), "containers": (True, True), "at_most_four": (True,), "snake": (False, False),
        "counted": (False, False), "itself": (True,),
    }  # fmt: skip


@pytest.mark.parametrize("spelling", ["a buffer is written", "written", "draws"])
def test_preparing_leaves_behind_nothing_of_what_it_writes_or_draws(spelling: str) -> None:
    made = model(SPELLINGS[spelling])
    before = [*(b.clone() for b in made.buffers()), torch.get_rng_state()]
    prepare_split(made, (torch.ones(2, 4),), split=SplitSpec("50%", trainable=True))
    assert difference(before, [*made.buffers(), torch.get_rng_state()]) is None


def test_a_branch_inside_of_it_holds_for_the_batches_of_that_branch() -> None:
    assert str(prepared(SPELLINGS["branches on the batch"]).plan.batches) == "1 to 4"


def test_what_a_traced_function_makes_is_known_from_real_runs_alone() -> None:
    plan = prepared(SPELLINGS["traced"]).plan
    assert (plan.captured_by, str(plan.batches)) == ("observed", "1 to 3, 5")


def test_a_number_that_it_reads_out_of_data_is_that_of_the_call() -> None:
    split = prepared(lambda s, h: h * largest(h.detach()))
    x = torch.randn(2, 4)
    assert torch.equal(split.run_suffix(split.run_prefix(x)), split.model(x))
    assert any(n.is_witness and n.target == "python.torch.jit.largest" for n in split.plans[-1].nodes)


def test_a_result_of_another_structure_is_refused() -> None:
    def body(s: Any, h: Tensor) -> Tensor:
        found, again = bare(h, True)
        return found if again is None else found * 2

    split = prepared(body)
    assert str(split.plan.batches) == "2"
    call = next(v for v in split.plan.objects.values() if hasattr(v, "gives"))
    with pytest.raises(WitnessError, match="the scripted function 'bare' gives"):
        call(torch.ones(3, 4), True)


@pytest.mark.parametrize("mode", ["debug_interpreter", "compiled"])
def test_the_other_modes_take_it_too(mode: Any) -> None:
    options = {"compile_options": {"backend": "eager"}} if mode == "compiled" else {}
    for spelling in ("a global function", "containers", "a number in, and one out"):
        split, twin = prepared(SPELLINGS[spelling], mode=mode, **options), model(SPELLINGS[spelling])
        for batch in (2, 5):
            hold(split, twin, batch)


class Listed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.more = [scripted_linear]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.more[0](self.a(x)))


class Outside(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(scripted_linear(self.a(x)))


class ByForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(scripted_linear.forward(self.a(x)))


@pytest.mark.parametrize("kind", [Listed, Outside, ByForward])
def test_a_scripted_module_that_stands_in_no_registry_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match="forward calls a TorchScript module in the model itself"):
        prepare_split(kind(), (torch.randn(2, 4),), split="50%")


def rounds_otherwise(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted functions give other bits at so many of their first calls, as one does that is fused later."""
    run, calls = torch.jit.ScriptFunction.__call__, [0]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return run(self, *args, **kwargs) + (1e-6 if calls[0] <= times else 0)

    monkeypatch.setattr(torch.jit.ScriptFunction, "__call__", call)


def test_a_function_that_rounds_otherwise_once_it_is_warm_is_held_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds_otherwise(2, monkeypatch)
    split, twin = prepared(SPELLINGS["a global function"]), model(SPELLINGS["a global function"])
    hold(split, twin, 3)


def test_one_that_never_comes_to_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = torch.jit.ScriptFunction.__call__, [0]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return run(self, *args, **kwargs) + calls[0]

    monkeypatch.setattr(torch.jit.ScriptFunction, "__call__", call)
    with pytest.raises((UnsupportedError, VerificationError), match="another result when it runs again"):
        prepared(SPELLINGS["a global function"])
