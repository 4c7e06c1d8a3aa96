"""What forward leaves in containers, under settings of its own, and in tensors of a user's class, in halves from files."""

from __future__ import annotations

import copy
from collections import UserDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne.errors import HalfError
from ariadne.remote import Server
from conformance.suite.halves_fuzz import closed, opened
from conformance.unit.remote_kit import beside


class Scores(Tensor):
    """A class of a user's own."""


class Net(nn.Module):
    """Two layers; between them and after them what a test wants, which may put things into what it `holds`."""

    def __init__(self, middle: Callable[..., Any], end: Callable[..., Any] = lambda m, y: y, **holds: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.middle, self.end = middle, end
        self.__dict__.update(holds)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        self.middle(self, h)
        return self.end(self, self.b(h))


def pair(folder: Path, model: nn.Module, **options: Any) -> tuple[ariadne.Half, ariadne.Half]:
    runtime = ariadne.prepare_split(model, (torch.randn(2, 4),), split="after:a")
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return ariadne.load(folder / "prefix", **options), ariadne.load(folder / "suffix", **options)


def append(m: Any, h: Tensor) -> None:
    m.kept.append(h.sum())


def by_name(m: Any, h: Tensor) -> None:
    m.kept["layers"]["first"].append(h.mean())
    m.kept["last"] = (h, h.sum())


def as_attribute(m: Any, h: Tensor) -> None:
    m.kept.seen.h = h
    m.kept.mean = h.mean()


NETS = {
    "a list": (append, []),
    "a deque": (append, deque(maxlen=2)),
    "dicts within dicts": (by_name, {"layers": defaultdict(list)}),
    "objects": (as_attribute, SimpleNamespace(seen=SimpleNamespace(h=None), mean=None)),
}


def plainly(thing: Any) -> Any:
    if isinstance(thing, SimpleNamespace):
        return plainly(vars(thing))
    if isinstance(thing, dict):
        return {k: plainly(v) for k, v in thing.items()}
    return [plainly(t) for t in thing] if isinstance(thing, (list, tuple, deque)) else thing


@pytest.mark.parametrize("name", sorted(NETS))
def test_a_half_has_containers_of_its_own_that_hold_what_the_models_would(tmp_path: Path, name: str) -> None:
    middle, kept = NETS[name]
    model = Net(middle, kept=copy.deepcopy(kept)).eval()
    prefix, suffix = pair(tmp_path, model)
    assert plainly(model.kept) == plainly(kept), "saving put something into the model's own"
    for batch in (2, 3, 5):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert torch.equal(suffix(prefix(x)), model(x))
    found = suffix.attributes["kept"]
    assert "kept" not in prefix.attributes
    assert type(found) is type(kept)
    theirs, mine = (repr(plainly(thing)) for thing in (model.kept, found))
    assert theirs == mine
    assert plainly(copy.deepcopy(suffix).attributes["kept"]) is not None


def test_both_sides_may_put_something_into_the_same_list(tmp_path: Path) -> None:
    class Both(Net):
        def forward(self, x: Tensor) -> Any:
            self.kept.append(x.sum())
            return super().forward(x)

    model = Both(append, kept=[]).eval()
    prefix, suffix = pair(tmp_path, model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(suffix(prefix(x)), model(x))
    assert [*map(float, prefix.attributes["kept"] + suffix.attributes["kept"])] == [*map(float, model.kept)]


class Box(UserDict[str, Any]):
    """No dict of Python's own."""


OUTSIDE: list[Tensor] = []


@pytest.mark.parametrize(
    ("middle", "kept", "told"),
    [
        (lambda m, h: OUTSIDE.append(h.sum()), [], "the model doesn't hold that in an attribute"),
        (lambda m, h: m.kept.__setitem__("h", h * m.kept["w"]), {"w": torch.ones(4)}, "and reads it, too"),
        (lambda m, h: m.kept.__setitem__("h", h), type("Table", (dict,), {})(), "put it into a dict, a list"),
    ],
)
def test_other_containers_are_refused(tmp_path: Path, middle: Any, kept: Any, told: str) -> None:
    with pytest.raises(HalfError, match=told):
        pair(tmp_path, Net(middle, kept=kept).eval())


def changed(folder: Path, change: Callable[[list[Any]], None]) -> None:
    """The suffix's file, where `change` was made to the first thing that it stores."""
    header, half, body = opened((folder / "suffix").read_bytes())
    change(half["plans"][0]["stores"][0])
    (folder / "suffix").write_bytes(closed(header, half, body))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.__setitem__(5, "eval"),
        lambda s: s.__setitem__(5, "remove"),
        lambda s: s.__setitem__(6, []),
        lambda s: s[6].__setitem__(0, ["key", "__class__"]),
        lambda s: s[6].__setitem__(0, ["key", "forward"]),
        lambda s: s[6].__setitem__(0, ["key", "b"]),
        lambda s: s[6].__setitem__(0, ["attribute", "kept"]),
        lambda s: s[6].__setitem__(1, ["attribute", "__class__"]),
        lambda s: s[6].__setitem__(1, ["key", {"list": []}]),
        lambda s: (
            s[6].__setitem__(1, ["attribute", "\uff3f\uff3fclass\uff3f\uff3f"]),
            s[7].__setitem__(0, ["object", None]),
        ),
        lambda s: s[6].__setitem__(0, ["key", "kep\uff54"]),
        lambda s: s[7].__setitem__(0, [["dict"], None]),
        lambda s: s[6].extend([["key", "k"]] * 40),
        lambda s: s[7].__setitem__(0, ["dict", 3]),
        lambda s: s[7].__setitem__(0, ["object", None]),
        lambda s: s[7].__setitem__(0, ["module", None]),
        lambda s: s[7].__setitem__(1, ["deque", -1]),
        lambda s: s[7].pop(),
        lambda s: s.pop(),
        lambda s: s.__setitem__(1, "outside"),
        lambda s: s.__setitem__(3, "*"),
    ],
)
def test_a_file_can_t_put_anything_elsewhere(tmp_path: Path, change: Any) -> None:
    middle = lambda m, h: m.kept["first"].append(h.sum())  # noqa: E731
    pair(tmp_path, Net(middle, kept={"first": []}).eval())
    ariadne.load(tmp_path / "suffix")
    changed(tmp_path, change)
    with pytest.raises(HalfError):
        ariadne.load(tmp_path / "suffix")


def in_double(m: Any, y: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return y * (torch.ones(2) / 3)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_setting_of_torch_is_set_by_a_half_where_it_is_allowed(tmp_path: Path) -> None:
    model = Net(lambda m, h: None, in_double).eval()
    with pytest.raises(HalfError, match="for the whole process"):
        pair(tmp_path, model)
    prefix, suffix = pair(tmp_path, model, allow=["torch.get_default_dtype()"])
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(suffix(prefix(x)), model(x))
    assert torch.get_default_dtype() == torch.float32


def test_a_result_of_a_users_class_keeps_it_where_that_is_allowed(tmp_path: Path) -> None:
    model, x = Net(lambda m, h: None, lambda m, y: y.as_subclass(Scores)).eval(), torch.randn(3, 4)
    with pytest.raises(HalfError, match="the class of a result"):
        pair(tmp_path, model)
    for options, cls in (({"allow": [f"{__name__}:Scores"]}, Scores), ({"plain": True}, Tensor)):
        prefix, suffix = pair(tmp_path, model, **options)
        with torch.no_grad():
            found = suffix(prefix(x))
            assert type(found) is cls
            assert torch.equal(found.as_subclass(Tensor), model(x).as_subclass(Tensor))
    header, half, body = opened((tmp_path / "suffix").read_bytes())
    half["plans"][0]["output_spec"]["class"] = "builtins:object"
    (tmp_path / "suffix").write_bytes(closed(header, half, body))
    with pytest.raises(HalfError, match="no container of kind subclass"):
        ariadne.load(tmp_path / "suffix", allow=["builtins:object"])


def test_a_server_empties_what_forward_appended_in_the_call_before(tmp_path: Path) -> None:
    model = Net(append, kept=[]).eval()
    prefix, suffix = pair(tmp_path, model)
    with (
        beside(Server(suffix, listen="127.0.0.1:0", log=None)) as server,
        ariadne.connect(server.address, prefix) as remote,
    ):
        remote.begin()
        for batch in (2, 3, 5):
            x = torch.randn(batch, 4)
            with torch.no_grad():
                assert torch.equal(remote.run_suffix(prefix(x)), model(x))
    assert [*map(float, suffix.attributes["kept"])] == [float(model.kept[-1])]
