"""A Python split's boundary alone: forward runs again from what crossed, its part before the cut skipped."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from ariadne import BoundaryPayload, PythonSplit, SplitSpec, prepare_split
from ariadne.boundary import decode, encode
from ariadne.compare import difference
from ariadne.errors import BoundaryError, PayloadError
from ariadne.stopped import noted, python, skipped
from ariadne.stopped.absent import Ghost, Standing

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Branches on data after the cut, whatever it does before."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.calls, self.shapes = 0, ()
        self.seen: list[int] = []
        self.register_buffer("total", torch.zeros(()))

    def before(self, x: Tensor) -> Tensor:
        return self.encoder(x).relu()

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        first = self.before(x)
        h = self.middle(first)
        return self.head(self.after(h + 1 if h.sum() > 0 else h, first, x))


class Skips(Net):
    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h + first * x.sum()


class Counts(Net):
    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().before(x)

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h * self.calls


class CountsTwice(Counts):
    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class Draws(Net):
    def before(self, x: Tensor) -> Tensor:
        self.factor = random.random() + numpy.random.rand()
        return super().before(x)

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h * self.factor + random.random()


class Reads(Net):
    def before(self, x: Tensor) -> Tensor:
        self.length = int((x > 0).sum())
        values, _ = x.max(1)
        self.mean = values.tolist()
        return super().before(x)

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h[:, : self.length] @ torch.ones(min(self.length, 8), 8) + self.mean[0]


class Adds(Net):
    """Both use one buffer, into which the first part writes."""

    def before(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum().abs() + 1)
        return super().before(x)

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h * self.total


class Replaces(Net):
    def before(self, x: Tensor) -> Tensor:
        self.total = self.total * 0.5 + x.mean()
        return super().before(x)

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return h + self.total


class Returns(Net):
    """Returns tensors from before the cut as they are."""

    def forward(self, x: Tensor) -> Any:
        first = self.before(x)
        h = self.middle(first)
        return {"out": self.head(h + 1 if h.sum() > 0 else h), "first": first, "x": x}


class Normalises(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def before(self, x: Tensor) -> Tensor:
        return self.norm(super().before(x))  # type: ignore[no-any-return]

    def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
        return nn.functional.dropout(h + first, 0.5)


NETS = [Net, Skips, Counts, CountsTwice, Draws, Reads, Adds, Replaces, Returns, Normalises]


def split(net: nn.Module, **options: Any) -> PythonSplit:
    made = prepare_split(net, (X,), split=SplitSpec("after:middle", max_paths=1, **options), fallback="python")
    if isinstance(made, PythonSplit):
        return made
    pytest.fail("a graph holds it")


def made(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def state(net: nn.Module) -> dict[str, Any]:
    plain = {k: v for k, v in net.__dict__.items() if type(v) in (int, float, list, tuple)}
    buffers = {k: v.clone() for k, v in net.named_buffers()}
    return {**plain, **buffers, "random": random.getstate(), "torch": torch.get_rng_state()}


def seeded(run: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    return run()


def sent(boundary: BoundaryPayload) -> BoundaryPayload:
    return BoundaryPayload.from_bytes(boundary.to_bytes())


@pytest.mark.parametrize("kind", NETS)
def test_a_boundary_from_bytes_gives_what_the_model_gives_and_leaves_what_it_leaves(kind: type[Net]) -> None:
    net, twin = made(kind), made(kind)
    runtime = split(net)
    assert runtime.stays == ""
    for x in (X, X + 0.3, X.flip(0)):
        with torch.no_grad():
            theirs = seeded(lambda x=x: twin(x))
        whole = state(twin)
        assert difference(theirs, seeded(lambda x=x: runtime.run_suffix(sent(runtime.run_prefix(x))))) is None
        assert difference(whole, state(net)) is None


@pytest.mark.parametrize("kind", [Skips, Adds])
def test_a_boundary_is_sent_and_run_under_inference_mode(kind: type[Net]) -> None:
    net, twin = made(kind), made(kind)
    runtime = split(net)
    with torch.inference_mode():
        for x in (X, X + 0.3):  # made outside, and inside
            theirs = seeded(lambda x=x: twin(x))
            assert difference(theirs, seeded(lambda x=x: runtime.run_suffix(sent(runtime.run_prefix(x))))) is None


LATER: list[float] = []
DRAWS = random.Random(0)
LATE = {"appends": "LATER.append(1.0)", "draws": "DRAWS.random()", "counts": "global COUNT; COUNT = COUNT + 1"}


@pytest.mark.parametrize("how", LATE)
def test_code_that_comes_later_and_counts_before_the_cut_is_refused_by_name(how: str) -> None:
    class Late(Net):
        pass

    runtime = split(made(Late))
    runtime.run_suffix(sent(runtime.run_prefix(X)))
    table = {"LATER": LATER, "DRAWS": DRAWS, "COUNT": 0}
    exec(f"def before(self, x):\n    {LATE[how]}\n    return self.encoder(x).relu()", table)
    Late.before = table["before"]  # type: ignore[method-assign, assignment]
    boundary = runtime.run_prefix(X)
    with pytest.raises(BoundaryError, match=r"before the cut forward changes what .*(LATER|DRAWS|COUNT)"):
        sent(boundary)


@pytest.mark.parametrize("kind", [k for k in NETS if k not in (Draws, Normalises)])
def test_a_boundary_is_run_any_number_of_times_and_gives_the_same(kind: type[Net]) -> None:
    runtime = split(made(kind))
    boundary = runtime.run_prefix(X)
    payload = sent(boundary)
    first = runtime.run_suffix(boundary)
    runtime.run_suffix(runtime.run_prefix(X + 1))
    for again in (boundary, payload, payload):
        assert difference(first, runtime.run_suffix(again)) is None


@pytest.mark.parametrize("kind", [Net, Skips, Counts, Reads, Adds, Normalises])
def test_a_step_whose_boundary_and_gradients_travel_is_the_whole_models(kind: type[Net]) -> None:
    net, twin = made(kind), made(kind)
    runtime = split(net, trainable=True)

    def total(out: Tensor, _: Any = None) -> Tensor:
        return (out * torch.arange(out.numel()).view(out.shape).cos()).sum()

    for x in (X, X + 0.3):
        net.zero_grad()
        twin.zero_grad()
        seeded(lambda x=x: total(twin(x)).backward())
        torch.manual_seed(1)
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(sent(boundary), loss_fn=total)
        runtime.backward_prefix(boundary, gradients)
        theirs = {k: p.grad for k, p in twin.named_parameters()}
        assert difference(theirs, {k: p.grad for k, p in net.named_parameters()}) is None


def test_another_process_runs_the_suffix_on_the_model_that_it_has(tmp_path: Path) -> None:
    here, net = Path(__file__), made(CountsTwice)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, test_skipped as t\n"
        "runtime = t.split(t.made(t.CountsTwice))\n"
        "payload = t.BoundaryPayload.from_bytes(open(sys.argv[2], 'rb').read())\n"
        "torch.save([runtime.run_suffix(payload), runtime.run_suffix(payload)], sys.argv[3])\n"
    )
    runtime = split(net)
    (tmp_path / "boundary").write_bytes(runtime.run_prefix(X).to_bytes())
    command = [sys.executable, "-c", code, str(here.parent), str(tmp_path / "boundary"), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=300, cwd=here.parents[3])
    with torch.no_grad():
        whole = made(CountsTwice)(X)
    assert all(torch.equal(whole, found) for found in torch.load(tmp_path / "out"))


def test_what_did_not_cross_is_named_and_an_example_shows_it() -> None:
    class Seldom(Net):
        def before(self, x: Tensor) -> Tensor:
            self.wide = (x.new_ones(3, 8) * x.abs().sum()).repeat(100, 1, 1)
            return super().before(x)

        def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
            return h + self.wide[0] if h.abs().sum() > 1e3 else h

    net = made(Seldom)
    runtime = split(net)
    assert runtime.stays == ""
    large = X * 1e5
    assert runtime.run_suffix(sent(runtime.run_prefix(X))).shape == (3, 2)
    with torch.no_grad():
        whole = net(large)
    with pytest.raises(BoundaryError, match="which did not cross"):
        runtime.run_suffix(sent(runtime.run_prefix(large)))
    runtime.learn((large,))
    assert torch.equal(whole, runtime.run_suffix(sent(runtime.run_prefix(large))))


def test_a_model_that_went_another_way_before_the_cut_is_refused() -> None:
    class Flag(Net):
        deep = False

        def before(self, x: Tensor) -> Tensor:
            return super().before(x).cos() if self.deep else super().before(x)

    runtime = split(made(Flag))
    elsewhere = copy.deepcopy(runtime)
    elsewhere.model.deep = True
    with pytest.raises(BoundaryError, match="goes another way here than where the prefix ran"):
        elsewhere.run_suffix(sent(runtime.run_prefix(X)))


def test_what_python_and_numpy_drew_on_a_way_that_is_refused_is_put_back() -> None:
    class Draws(Net):
        deep = False

        def before(self, x: Tensor) -> Tensor:
            if not self.deep:
                return super().before(x)
            scale = random.random() + float(numpy.random.rand())
            return super().before(x).cos() * scale

    runtime = split(made(Draws))
    elsewhere = copy.deepcopy(runtime)
    elsewhere.model.deep = True
    given, stood = sent(runtime.run_prefix(X)), python.plainly(python.generators())
    with pytest.raises(BoundaryError, match="goes another way here than where the prefix ran"):
        elsewhere.run_suffix(given)
    assert python.plainly(python.generators()) == stood


@pytest.mark.parametrize("what", ["appends", "views", "numpy"])
def test_what_can_not_be_sent_is_refused_with_a_reason_and_runs_in_its_process(what: str) -> None:
    class Odd(Net):
        def before(self, x: Tensor) -> Tensor:
            if what == "appends":
                self.seen.append(1)
            if what == "numpy":
                self.length = x.numpy().shape[0]
            return self.encoder.weight.t()[:3] if what == "views" else super().before(x)

        def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
            return h + first

    net = made(Odd)
    runtime = split(net)
    assert runtime.stays
    with torch.no_grad():
        whole = net(X)
    boundary = runtime.run_prefix(X)
    with pytest.raises(BoundaryError, match="no bytes can be made of it"):
        boundary.to_bytes()
    assert torch.equal(whole, runtime.run_suffix(boundary))


def test_a_write_that_a_twin_in_memory_would_not_see_is_refused() -> None:
    class Shares(Net):
        def before(self, x: Tensor) -> Tensor:
            self.pair = super().before(x).chunk(2, 1)
            return torch.cat(self.pair, 1)

        def after(self, h: Tensor, first: Tensor, x: Tensor) -> Tensor:
            left, right = self.pair
            left.add_(1)
            return h + torch.cat([left, right], 1)

    runtime = split(made(Shares))
    assert "shares memory" in runtime.stays


@pytest.mark.parametrize("part", range(9))
def test_a_payload_that_tells_nonsense_of_python_is_refused(part: int) -> None:
    runtime = split(made(Counts))
    payload = sent(runtime.run_prefix(X))
    for nonsense in (("x",), {"a": 1}, -1, (("lost",),)):
        told = list(payload.raw[-1])
        told[part] = nonsense
        raw = (*payload.raw[:-1], tuple(told))
        forged = BoundaryPayload(payload.split_id, payload.plan_signature, 1, payload.labels, raw)
        with pytest.raises((BoundaryError, PayloadError), match=r"payload|goes another way|cut|attribute|cross"):
            runtime.run_suffix(forged)


def test_an_attribute_that_no_example_changed_is_not_set_by_a_payload() -> None:
    net = made(Counts)
    runtime = split(net)
    payload = sent(runtime.run_prefix(X))
    told = list(payload.raw[-1])
    told[4] = ((("middle", "__dict__", "in_features"), (9,), (9,)),)
    forged = BoundaryPayload(
        payload.split_id, payload.plan_signature, 1, payload.labels, (*payload.raw[:-1], tuple(told))
    )
    with pytest.raises(BoundaryError, match="in no example of this side"):
        runtime.run_suffix(forged)
    assert net.middle.in_features == 8


def test_a_ghost_travels_as_sizes_alone() -> None:
    kind = noted.Absent.of(torch.ones(2, 3))
    assert kind is not None
    assert decode(encode({}, {}, [kind]))[2] == [kind]
    ghost = Ghost.of(kind, ("call", 0, 0), "a result", Standing(passed=True))
    assert (ghost.shape, ghost.dtype, ghost.device.type, len(ghost)) == ((2, 3), torch.float32, "cpu", 2)
    with pytest.raises(BoundaryError, match=r"a result .* did not cross"):
        ghost + 1


# --- planted bugs ---------------------------------------------------------------------------------------------------


def late(net: Counts) -> int:
    """How many calls a model has counted, once a boundary of the first was run after the second."""
    runtime = split(net)
    payload = sent(runtime.run_prefix(X))
    runtime.run_suffix(runtime.run_prefix(X))
    runtime.run_suffix(payload)
    return net.calls


def test_an_effect_of_python_that_is_not_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the skipped part changes in Python is left as it is."""
    assert late(made(Counts)) == 2
    monkeypatch.setattr(python.Undoing, "run", lambda self: None)
    assert late(made(Counts)) != 2


def test_an_effect_of_python_that_is_done_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the skipped part counts on from where the prefix has counted."""
    monkeypatch.setattr(python.Undoing, "run", lambda self: None)
    monkeypatch.setattr(skipped, "_set_attributes", lambda *_: None)
    monkeypatch.setattr(skipped, "_refuse_other", lambda *_: None)
    assert "differs from the model" in split(made(Counts)).stays


def test_an_effect_that_begins_where_it_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the skipped part begins with the attributes that the prefix has left."""
    monkeypatch.setattr(skipped, "_set_attributes", lambda *_: None)
    assert split(made(Counts)).stays


def test_a_stale_crossing_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a tensor of the model that the prefix writes crosses as it was before."""
    finish = noted.Noting.finish

    def stale(self: noted.Noting, output: Any) -> Any:
        before, tensors = finish(self, output)
        return before, [t - 1 if n[0] == "state" else t for n, t in zip(before.crossing, tensors, strict=True)]

    monkeypatch.setattr(noted.Noting, "finish", stale)
    assert "differs from the model" in split(made(Adds)).stays


def test_a_skipped_result_that_is_used_without_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a tensor without data gives zeros where it is used."""
    monkeypatch.setattr(Ghost, "taken", lambda self: torch.zeros(self.shape, dtype=self.dtype))
    assert "differs from the model" in split(made(Skips)).stays


def test_draws_that_are_made_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: Python draws anew before the cut, in place of what it drew where the prefix ran."""
    monkeypatch.setattr(skipped, "set_generators", lambda states: None)
    assert split(made(Draws)).stays
