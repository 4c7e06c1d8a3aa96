"""Plain attributes that forward reads and changes: followed where no result follows them, refused where one may."""

from __future__ import annotations

import copy
import math
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ariadne import SplitSpec
from ariadne.capture import ways
from ariadne.errors import ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split


class Layers(nn.Module):
    """Two layers; what stands between them is `between`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 2)
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.leave(self.between(self.enter(x)))
        return found

    def between(self, h: Tensor) -> Tensor:
        """What reads and changes an attribute."""
        raise NotImplementedError


class Flag(Layers):
    """A flag alone."""

    def between(self, h: Tensor) -> Tensor:
        if self.first:
            self.first = False
        return h


class FlagOfTable(Layers):
    """A flag, and a table that is made while it is up."""

    def between(self, h: Tensor) -> Tensor:
        if self.first:
            self.table = torch.ones(4)
            self.first = False
        return h * self.table


class FlagOfRows(Layers):
    """A flag, and rows that are made anew for another batch."""

    def between(self, h: Tensor) -> Tensor:
        if self.first or self.rows.shape[0] != h.shape[0]:
            self.rows, self.first = torch.ones(h.shape[0], 4), False
        return h * self.rows


class FlagInDict(Layers):
    """A flag, and a dict that is filled while it is up."""

    def between(self, h: Tensor) -> Tensor:
        if self.first:
            self.tables["scale"] = torch.ones(4)
            self.first = False
        return h * self.tables["scale"]


class Noted(Layers):
    """The batch of the last call."""

    def between(self, h: Tensor) -> Tensor:
        if h.shape[0] != self.batch:
            self.batch = h.shape[0]
        return h.view(self.batch, 2, 2).reshape(self.batch, 4)


class Hidden(Layers):
    """The batch of the last call, and a state of that size."""

    def between(self, h: Tensor) -> Tensor:
        if self.batch != len(h):
            self.batch = len(h)
            self.hidden = torch.zeros(self.batch, 4)
        return h + self.hidden


FOLLOWED = {
    "flag": lambda: Flag(first=True),
    "flag the other way round": lambda: Flag(first=1 == 1),
    "flag of a table": lambda: FlagOfTable(first=True),
    "flag of rows": lambda: FlagOfRows(first=True),
    "batch": lambda: Noted(batch=1),
    "batch of the example": lambda: Noted(batch=3),
    "no batch yet": lambda: Noted(batch=None),
    "hidden": lambda: Hidden(batch=1),
    "hidden, and no batch yet": lambda: Hidden(batch=None),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_no_result_follows_is_followed_and_the_model_may_run_between(name: str) -> None:
    torch.manual_seed(0)
    model, twin = FOLLOWED[name](), FOLLOWED[name]()
    twin.load_state_dict(model.state_dict())
    runtime = prepare_split(model, (torch.randn(3, 4),), split="percent:50")
    assert runtime.plan.captured_by == "symbolic"
    with torch.no_grad():
        for batch, whole in (
            (5, False),
            (2, True),
            (2, False),
            (5, False),
            (2, True),
            (7, False),
            (7, True),
            (1, False),
        ):
            x = torch.randn(batch, 4)
            found = model(x) if whole else runtime.run_suffix(runtime.run_prefix(x))
            assert torch.equal(found, twin(x))
            if runtime.plan.stores:
                plain = {k: v for k, v in twin.__dict__.items() if isinstance(v, (int, type(None)))}
                assert plain == {k: model.__dict__[k] for k in plain}


def test_a_flag_that_is_moved_without_what_a_call_fills_is_noticed() -> None:
    model = FlagOfTable(first=True)
    runtime = prepare_split(model, (torch.randn(3, 4),), split="percent:50")
    x = torch.randn(3, 4)
    for first, table in ((False, None), ("up", torch.ones(4))):
        model.__dict__.update(first=first, table=table)
        with pytest.raises(ModuleError, match="'first' of the model"):
            runtime.run_prefix(x)
    with torch.no_grad():
        for first in (False, True):
            model.__dict__.update(first=first, table=torch.ones(4))
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


class Larger(Layers):
    """It follows whether the last batch was a large one."""

    def between(self, h: Tensor) -> Tensor:
        h = h * 2 if self.batch > 8 else h
        self.batch = h.shape[0]
        return h


class OfThree(Layers):
    """It asks for a batch that is no call's."""

    def between(self, h: Tensor) -> Tensor:
        h = h * 2 if self.batch == 40 else h
        self.batch = h.shape[0]
        return h


class Counted(Layers):
    """The number is used as one."""

    def between(self, h: Tensor) -> Tensor:
        h = h + self.batch * 0
        self.batch = h.shape[0]
        return h


class Handed(Layers):
    """The number goes on to another attribute."""

    def between(self, h: Tensor) -> Tensor:
        self.before, self.batch = self.batch, h.shape[0]
        return h


class Later(Layers):
    """What is done once the flag is down hangs on the batch."""

    def between(self, h: Tensor) -> Tensor:
        if self.first:
            self.first = False
        elif h.shape[0] > 8:
            h = h * 2
        return h


class Twice(Layers):
    """A flag that each call turns."""

    def between(self, h: Tensor) -> Tensor:
        self.first = not self.first
        return h


class HandedFlag(Layers):
    """The flag goes on to another attribute."""

    def between(self, h: Tensor) -> Tensor:
        self.was, self.first = self.first, False
        return h


class LargerOnceKnown(Layers):
    """Once the batch is known to be that of the last call, it is asked for its size."""

    def between(self, h: Tensor) -> Tensor:
        if self.batch == h.shape[0]:
            return h * 2 if self.batch > 8 else h
        self.batch = h.shape[0]
        return h


class LargerThanNone(Layers):
    """The first call finds nothing there, and later ones ask whether it was a large batch."""

    def between(self, h: Tensor) -> Tensor:
        h = h * 2 if self.batch is not None and self.batch > 5 else h
        self.batch = h.shape[0]
        return h


class Caught(Layers):
    """What is asked can't be followed, and forward catches whatever comes of that."""

    def between(self, h: Tensor) -> Tensor:
        try:
            h = h * (1 + (math.cos(self.batch) > 0))  # of 3 and of 4 it is not
        except:  # noqa: E722 - the widest that there is
            h = h.clone()
        self.batch = h.shape[0]
        return h


class Half(Layers):
    """A state of the batch's size beside a table that a plan lets be: it can't set which batch it is."""

    def between(self, h: Tensor) -> Tensor:
        if "scale" not in self.tables:
            self.tables["scale"] = torch.ones(4)
        return Hidden.between(self, h) * self.tables["scale"]  # type: ignore[arg-type]


REFUSED = {
    "a larger batch": lambda: Larger(batch=1),
    "a batch that is no call's": lambda: OfThree(batch=1),
    "a larger batch, once known": lambda: LargerOnceKnown(batch=1),
    "a larger batch than none": lambda: LargerThanNone(batch=None),
    "what an except clause hides": lambda: Caught(batch=None),
    "the number": lambda: Counted(batch=1),
    "the number elsewhere": lambda: Handed(batch=1, before=0),
    "a flag at large batches": lambda: Later(first=True),
    "a flag that turns": lambda: Twice(first=True),
    "a flag elsewhere": lambda: HandedFlag(first=True),
    "a flag of a dict": lambda: FlagInDict(first=True, tables={}),
    "half of a cache": lambda: Half(batch=1, tables={}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_result_may_follow_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"reads and changes the attribute '(batch|before|first|was)'"):
        prepare_split(REFUSED[name](), (torch.randn(3, 4),), split="percent:50")


@pytest.mark.parametrize(
    ("name", "check"), [("a larger batch", "refuse_questions"), ("a flag at large batches", "refuse_flags")]
)
def test_without_the_check_a_result_would_differ(name: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, check, lambda *_: None)
    model, twin = REFUSED[name](), REFUSED[name]()
    twin.load_state_dict(model.state_dict())
    runtime = prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("percent:50"))
    x = torch.randn(12, 4)
    with torch.no_grad():
        found = [(runtime.run_suffix(runtime.run_prefix(x)), twin(x)) for _ in range(2)]
    assert not all(torch.equal(a, b) for a, b in found)


class OfRegistry(Layers):
    """A table for the largest number of columns so far."""

    def between(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.longest:
            self.longest = h.shape[1]
            self.register_buffer("table", torch.arange(float(h.shape[1])), persistent=False)
        return h * self.table[: h.shape[1]]


class Assigned(OfRegistry):
    """The same, put in the place of a buffer."""

    def between(self, h: Tensor) -> Tensor:
        if self.longest < h.shape[1]:
            self.longest, self.table = h.shape[1], torch.arange(float(h.shape[1]))
        return h * self.table[: h.shape[1]]


class Plain(Assigned):
    """The same in a plain attribute."""


@pytest.mark.parametrize("kind", [OfRegistry, Assigned, Plain])
def test_of_tables_that_grow_the_error_says_to_run_the_largest_first_which_serves(kind: type[Layers]) -> None:
    model: Any = kind(longest=2)
    if kind is Plain:
        model.table = torch.arange(2.0)
    else:
        model.register_buffer("table", torch.arange(2.0), persistent=False)
    x = torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="largest size so far, run the model once on the largest inputs"):
        prepare_split(model, (x,), split="after:enter")
    assert model.longest == 2
    model(x)
    runtime = prepare_split(model, (x,), split="after:enter")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


def test_of_a_counter_it_does_not() -> None:
    class Counts(Layers):
        def between(self, h: Tensor) -> Tensor:
            self.calls += 1
            return h

    with pytest.raises(UnsupportedError, match=r"which a plan can't follow; keep such state in a buffer\. Or run"):
        prepare_split(Counts(calls=0), (torch.ones(2, 4),), split="after:enter")


COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


class Collecting(Layers):
    """At its first call it registers hooks that collect what its layers give, as transformers' models do, and goes on with that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            for layer in (self.enter, self.norm):
                layer.register_forward_hook(collect)
            self.installed = True
        found: list[Tensor] = []
        token = COLLECTED.set(found)
        try:
            self.norm(self.enter(x))
        finally:
            COLLECTED.reset(token)
        first, second = found
        out: Tensor = self.leave(first + second)
        return out


def collect(_: nn.Module, __: Any, out: Tensor) -> None:
    found = COLLECTED.get()
    if found is not None:
        found.append(out)


@pytest.mark.parametrize("training", [False, True])
def test_hooks_that_a_first_call_registers_are_registered_once(training: bool) -> None:
    torch.manual_seed(0)
    model = Collecting().train(training)
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (torch.randn(3, 4),), split=SplitSpec("percent:50", dynamic_batch=(2, 8)))
    for batch in (3, 2, 5):
        x = torch.randn(batch, 4)
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), whole(x))
    assert torch.equal(model.norm.running_mean, whole.norm.running_mean)


class Remembering(Layers):
    """It joins what it is given to what it kept, as a cache of keys is kept in a plain attribute."""

    def between(self, h: Tensor) -> Tensor:
        kept = self.kept
        self.kept = h if kept is None else torch.cat([kept, h])
        return h + self.kept.mean(0)


def test_of_state_in_python_the_error_says_where_it_is() -> None:
    with pytest.raises(UnsupportedError, match="it sets 'kept' of the model"):
        prepare_split(Remembering(kept=None), (torch.randn(3, 4),), split="percent:50")


class Hooked(nn.Module):
    """Registers a hook at its first call, and notes that it did, as extractors of features do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.hooked, self.latents = nn.Linear(4, 4), nn.Linear(4, 4), False, torch.zeros(())

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """The hook."""
        self.latents = output.detach().clone()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and what the hook kept."""
        if not self.hooked:
            self.a.register_forward_hook(self.keep)
            self.hooked = True
        return self.b(self.a(x)), self.latents


def test_a_flag_of_a_first_call_that_registers_a_hook_is_told_with_the_way_out() -> None:
    model, x = Hooked().eval(), torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="first call alone sets it, run the model once, and prepare then"):
        prepare_split(model, (x,), split="after:a")
    with torch.no_grad():
        whole = model(x)
        runtime = prepare_split(model, (x,), split="after:a")
        found = runtime.run_suffix(runtime.run_prefix(x))
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))
