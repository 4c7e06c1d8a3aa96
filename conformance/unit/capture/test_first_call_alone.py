"""What forward does at its first call alone: a plan goes that way at each call, so it is refused by name."""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ariadne import SplitSpec, prepare_split
from ariadne.capture import observed
from ariadne.errors import UnsupportedError

INITED = {"net": False}


class Net(nn.Module):
    def __init__(self, once: Callable[[Any], Any], act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.once, self.act = nn.Linear(4, 8), nn.Linear(8, 2), once, act
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)
        self.shift, self.extra = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("off", torch.zeros(8))
        self.todo, self.names, self.im, self.inited, self.none = {"off"}, ["off"], nn.ReLU(), False, None
        self.settings, self.kept, self.rows = types.SimpleNamespace(init=True), {"t": torch.zeros(8)}, [torch.zeros(8)]
        INITED["net"] = False

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.b(h + self.off + self.shift + self.kept["t"] + self.rows[0])
        if self.once(self):
            with torch.no_grad():
                self.act(self, h)
        return y, F.mse_loss(h, self.teacher(x))


def flag(m: Any) -> bool:
    was, m.inited = m.inited, True
    return not was


def none(m: Any) -> bool:
    was, m.none = m.none, 1
    return was is None


def absent(m: Any) -> bool:
    was, m.begun = hasattr(m, "begun"), True
    return not was


def member(m: Any) -> bool:
    return "off" in m.todo and not m.todo.discard("off")


def popped(m: Any) -> bool:
    return bool(m.names) and m.names.pop() == "off"


def setting(m: Any) -> bool:
    was, m.settings.init = m.settings.init, False
    return bool(was)


def outside(m: Any) -> bool:
    was, INITED["net"] = INITED["net"], True
    return not was


def on_a_buffer(m: Any) -> bool:
    was, m.off.done = getattr(m.off, "done", False), True
    return not was


def module(m: Any) -> bool:
    was = isinstance(m.im, nn.ReLU)
    if was:
        m.im = nn.Identity()
    return was


def taught(m: Any, h: Tensor) -> None:
    for p, q in zip(m.teacher.parameters(), m.a.parameters(), strict=True):
        p.data.copy_(q.data)


ACTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a parameter": lambda m, h: m.shift.sub_(h.mean(0)),
    "a parameter's data": lambda m, h: m.shift.data.sub_(h.mean(0)),
    "a parameter, drawn": lambda m, h: nn.init.normal_(m.extra),
    "a buffer": lambda m, h: m.off.sub_(h.mean(0)),
    "a tensor in a dict": lambda m, h: m.kept["t"].sub_(h.mean(0)),
    "a tensor in a list": lambda m, h: m.rows[0].sub_(h.mean(0)),
    "a teacher": taught,
    "draws": lambda m, h: torch.randn(3),
}
ONCE = [flag, none, absent, member, popped, setting, outside, on_a_buffer, module]
CASES = [(flag, act) for act in ACTS] + [(once, "a parameter") for once in ONCE[1:]]
CASES += [(once, "a teacher") for once in ONCE[1:]]
IDS = [f"{act}, by {once.__name__}" for once, act in CASES]


def states(m: nn.Module) -> list[Any]:
    own: Any = m
    return [*m.state_dict().values(), own.kept["t"], own.rows[0], torch.get_rng_state()]


def alike(split: nn.Module, run: Callable[[Tensor], Any], whole: nn.Module, steps: int = 4) -> bool:
    for i in range(steps):
        x, found = torch.randn(3, 4, generator=torch.Generator().manual_seed(i)), []
        for call, m in ((whole, whole), (run, split)):
            torch.manual_seed(i)
            found.append([*call(x), *states(m)])
        if not all(map(torch.equal, *found)):
            return False
    return True


@pytest.mark.parametrize(("once", "act"), CASES, ids=IDS)
def test_it_is_refused(once: Callable[[Any], Any], act: str) -> None:
    net = Net(once, ACTS[act])
    before = copy.deepcopy(states(net)[:-1])
    with pytest.raises(
        UnsupportedError, match=r"at its first call|for once or for each|reads and changes|goes on with"
    ):
        prepare_split(net, (torch.randn(2, 4),), split="after:a", fallback="refuse")
    assert all(map(torch.equal, states(net)[:-1], before))


@pytest.mark.parametrize(("once", "act"), CASES[::3], ids=IDS[::3])
def test_after_a_first_call_of_the_model_the_split_equals_it(once: Callable[[Any], Any], act: str) -> None:
    whole, split = (Net(once, ACTS[act]) for _ in range(2))
    for m in (whole, split):
        torch.manual_seed(5)
        with torch.no_grad():
            INITED["net"] = False
            m(torch.ones(2, 4))
    runtime = prepare_split(split, (torch.randn(2, 4),), split="after:a", fallback="refuse")
    with torch.no_grad():
        assert alike(split, lambda x: runtime.run_suffix(runtime.run_prefix(x)), whole)


@pytest.mark.parametrize("act", ["a parameter", "a teacher"])
def test_without_the_check_the_split_would_do_it_at_each_call(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "refuse_once", lambda *args: None)
    whole, split = (Net(setting, ACTS[act]) for _ in range(2))
    runtime = prepare_split(split, (torch.randn(2, 4),), split="after:a", fallback="refuse")
    with torch.no_grad():
        for m in (whole, split):
            m.a.weight.mul_(1.5)
        assert not alike(split, lambda x: runtime.run_suffix(runtime.run_prefix(x)), whole) or act == "a teacher"
        for m in (whole, split):
            m.a.weight.mul_(1.5)  # the teacher follows it at each call
        assert not alike(split, lambda x: runtime.run_suffix(runtime.run_prefix(x)), whole)


class Stack(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def initialising(m: nn.Module) -> None:
    def init(module: Any, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            module.bias.sub_(output.mean(0))
        handle.remove()

    handle = m[0].register_forward_hook(init)  # type: ignore[index]


def probing(m: nn.Module) -> None:
    def probe(module: Any, args: Any, output: Tensor) -> None:
        module.seen = (*getattr(module, "seen", ()), tuple(output.shape))
        handle.remove()

    handle = m[0].register_forward_hook(probe)  # type: ignore[index]


def before(m: nn.Module) -> None:
    def probe(module: Any, args: Any) -> None:
        module.width = 4
        handle.remove()

    handle = m[0].register_forward_pre_hook(probe)  # type: ignore[index]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("hooked", [before, initialising, probing])
def test_a_hook_that_removes_itself_is_refused(hooked: Callable[[nn.Module], None], late: bool) -> None:
    m, x = Stack().eval(), torch.randn(3, 4)
    runtime: Any = prepare_split(m, (x,), split="after:1", fallback="refuse") if late else None
    hooked(m)
    with pytest.raises(UnsupportedError, match=r"hook that removes itself|at its first call"):
        runtime.run_prefix(x) if late else prepare_split(m, (x,), split="after:1", fallback="refuse")
    assert len(m[0]._forward_hooks) + len(m[0]._forward_pre_hooks) == 1


class Noted(nn.Module):
    def __init__(self, note: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.note = nn.Linear(4, 8), nn.Linear(8, 2), note

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.b(h)
        return self.note(x, h, y)


def text(x: Any, h: Any, y: Any) -> Any:
    y.info = "b2"
    return y


def loss(x: Any, h: Any, y: Any) -> Any:
    y.l_aux = (h**2).mean()
    return y


def nested(x: Any, h: Any, y: Any) -> Any:
    h.tag = "feat"
    return {"f": h, "y": y}


def on_input(x: Any, h: Any, y: Any) -> Any:
    x.feat = h.detach()
    return y


@pytest.mark.parametrize("note", [loss, nested, on_input, text])
def test_an_attribute_that_forward_sets_on_what_it_gives_or_was_given_is_refused(note: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="sets the attribute"):
        prepare_split(Noted(note), (torch.randn(2, 4),), split="after:a", fallback="refuse")


def test_an_attribute_of_a_tensor_between_that_forward_reads_is_followed() -> None:
    def between(x: Any, h: Any, y: Any) -> Any:
        h.scale = 2.0
        return y * h.scale

    m, x = Noted(between).eval(), torch.randn(3, 4)
    x.mark = "mine"  # type: ignore[attr-defined]
    runtime = prepare_split(m, (x,), split="after:a", fallback="refuse")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), m(x))


def test_draws_of_the_first_call_are_noticed_beside_other_threads() -> None:
    over = threading.Event()
    beside = threading.Thread(target=over.wait, daemon=True)
    beside.start()
    try:
        with pytest.raises(UnsupportedError, match="draws from torch at its first call"):
            prepare_split(Net(setting, ACTS["draws"]), (torch.randn(2, 4),), split="after:a", fallback="refuse")
    finally:
        over.set()
        beside.join()


def test_a_second_run_that_raises_is_told() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 2), None
            self.register_buffer("m", torch.eye(4).double())

        def forward(self, x: Tensor) -> Any:
            if self.kind is not x.dtype:
                self.m, self.kind = self.m.to(x.dtype), x.dtype  # type: ignore[assignment]
            return self.b(self.a(x) @ self.m)

    m = Cast().eval()
    with pytest.raises(UnsupportedError, match=r"raises RuntimeError when it runs again.*Run the model once"):
        prepare_split(m, (torch.randn(2, 4),), split="after:a", fallback="refuse")
    m(torch.ones(2, 4))
    x = torch.randn(3, 4)
    runtime = prepare_split(m, (torch.randn(2, 4),), split="after:a", fallback="refuse")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), m(x))


def test_statistics_of_no_rows_are_written_by_no_call() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.b(self.n(self.a(x))) * (1.0 if str(len(x)) > "1" else 2.0)

    torch.manual_seed(0)
    m, twin = Asking(), Asking()
    twin.load_state_dict(m.state_dict())
    spec = SplitSpec(boundary="after:a", dynamic_batch=(0, 4))
    runtime = prepare_split(m, (torch.randn(2, 4),), split=spec, fallback="refuse")
    for rows in (3, 0, 2):
        x = torch.randn(rows, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), twin(x))
    assert all(torch.equal(mine, its) for mine, its in zip(m.buffers(), twin.buffers(), strict=True))
