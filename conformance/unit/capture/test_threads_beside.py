"""What other threads do while a split is prepared, or a call captures a plan: they go on as ever, and captures take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ariadne import prepare_split
from ariadne.errors import UnsupportedError

ASKED: SimpleQueue[bool] = SimpleQueue()
ANSWERED: SimpleQueue[Any] = SimpleQueue()
POOL = ThreadPoolExecutor(1)
X = torch.ones(2, 4)


class Net(nn.Module):
    """As many ops as the batch has rows, so that each batch has a plan of its own; between the layers another thread works."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(x.shape[0]):
            h = torch.relu(h)
        return self.b(self.between(h))

    def between(self, h: Tensor) -> Tensor:
        ASKED.put(True)
        ANSWERED.get(timeout=20)
        return h


class Works:
    """A thread that does `work` whenever forward asks, and hands on what it raises; `found` is what it gave."""

    def __init__(self) -> None:
        self.work: Callable[[], Any] = lambda: None
        self.found: list[Any] = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while ASKED.get():
            try:
                self.found.append(self.work())
            except Exception as error:
                self.found.append(error)
            ANSWERED.put(None)


@pytest.fixture
def works() -> Iterator[Works]:
    found = Works()
    yield found
    ASKED.put(False)
    found.thread.join()


def same(split: Any, model: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(split.run_suffix(split.run_prefix(x)), model(x))


def with_fakes() -> bool:
    """Fake tensors put the modes of their thread aside for a moment; gives whether it has one of a recording's after that."""
    with FakeTensorMode():
        for _ in range(2):
            torch.empty(2).add(1)
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)


def test_a_thread_with_fake_tensors_of_its_own_is_left_alone(works: Works) -> None:
    works.work, model = with_fakes, Net()
    split = prepare_split(model, (X,), split="after:a")
    assert works.found == [False] * len(works.found) != []
    assert same(split, model, X)


def test_work_that_another_thread_hands_to_a_pool_hides_no_op(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: SimpleQueue[bool] = SimpleQueue()
    goes_on: SimpleQueue[bool] = SimpleQueue()
    plain = ThreadPoolExecutor.submit

    def slow(*args: Any, **kwargs: Any) -> Any:
        inside.put(True)
        goes_on.get(timeout=20)
        return plain(*args, **kwargs)

    class Meanwhile(Net):
        def between(self, h: Tensor) -> Tensor:
            ASKED.put(True)
            inside.get(timeout=20)
            h = h * 3
            goes_on.put(True)
            ANSWERED.get(timeout=20)
            return h

    monkeypatch.setattr(ThreadPoolExecutor, "submit", slow)
    works.work, model = lambda: POOL.submit(int).result(), Meanwhile()
    split = prepare_split(model, (X,), split="after:a")
    assert any(node.target.startswith("aten.mul") for node in split.plan.nodes)
    assert works.found == [0] * len(works.found) != []
    assert same(split, model, X)


class Plain(Net):
    def between(self, h: Tensor) -> Tensor:
        BEGAN.put(True)
        return h


BEGAN: SimpleQueue[bool] = SimpleQueue()


def test_two_prepares_take_turns(works: Works) -> None:
    made: list[Any] = []
    other = threading.Thread(target=lambda: made.append(prepare_split(Plain(), (X,), split="after:a")))

    def second() -> int:
        if len(works.found) == 1:  # now forward runs and is not recorded
            other.start()
            other.join(0.3)
        return BEGAN.qsize()

    works.work = second
    prepare_split(Net(), (X,), split="after:a")
    assert len(works.found) > 2
    assert set(works.found) == {0}
    other.join()
    assert same(made[0], made[0].model, X)


def test_calls_that_have_a_plan_go_on_while_another_is_captured(works: Works) -> None:
    model = Net()
    split = prepare_split(model, (X,), split="after:a")
    split.run_prefix(torch.ones(3, 4))
    works.found.clear()
    works.work = lambda: split.run_suffix(split.run_prefix(X))
    split.run_prefix(torch.ones(4, 4))
    works.work = lambda: None
    with torch.no_grad():
        expected = model(X)
    assert works.found.pop() is None  # the whole asked, too
    assert works.found
    assert all(torch.equal(found, expected) for found in works.found)


@pytest.mark.parametrize("fallback", ["refuse", "python"])
def test_a_thread_that_forward_waits_for_is_told_that_it_would_wait_forever(fallback: Any) -> None:
    split = prepare_split(Plain(), (X,), split="after:a")

    class Nested(Net):
        def between(self, h: Tensor) -> Tensor:
            POOL.submit(lambda: split.run_prefix(torch.ones(5, 4))).result()
            return h

    with pytest.raises(UnsupportedError, match="they would wait for each other"):
        prepare_split(Nested(), (X,), split="after:a", fallback=fallback)
