"""Packages kept in the user's folder: who may write there, which are found, and which are thrown away; no compiler runs here."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.compiled import ahead
from ariadne.compiled.ahead import Ahead
from ariadne.compiled.kept import Broken, Kept, user_folder
from ariadne.errors import CompileError, SpecError
from ariadne.plan import Batches
from ariadne.segment import load
from conformance.unit.compiled_kit import halves, whole
from conformance.unit.trap_kit import numbers

ALL = Batches(((1, 64),))
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists, which nothing here reads")
A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def put(kept: Kept, name: str, content: bytes, hint: int = 2, used: float | None = None) -> Path:
    """Keep a package of these bytes; returns where its card lies. `used`: so many seconds ago."""
    made = kept.path.parent / "made.pt2"
    made.write_bytes(content)
    assert not kept.keep(name, str(made), ALL, hint, "a test")
    (card,) = (c for c in kept.cards(name) if c.path.name.endswith(f"-from-{hint}.json"))
    if used is not None:
        os.utime(card.path, (time.time() - used,) * 2)
    return card.path


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "xdg", "expected"),
    [
        ("/here/packages", "/elsewhere", "/here/packages"),
        ("", "/elsewhere", "/elsewhere/ariadne"),
        ("", "relative", "/somewhere/me/.cache/ariadne"),  # which the XDG rules say to ignore
        ("", "", "/somewhere/me/.cache/ariadne"),
        ("~/mine", "", "/somewhere/me/mine"),
    ],
)
def test_the_folder_is_the_one_that_is_named_or_the_user_s_cache_folder(
    named: str, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in {"ARIADNE_CACHE_DIR": named, "XDG_CACHE_HOME": xdg, "HOME": "/somewhere/me"}.items():
        monkeypatch.setenv(name, value)
    assert user_folder() == Path(expected)


# --- who --------------------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(("place", "mode"), [("packages", 0o777), ("packages", 0o1777), (".", 0o777)])
def test_a_folder_that_others_can_write_to_is_refused_as_the_split_is_prepared(
    place: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages := tmp_path / "packages").mkdir()
    (tmp_path / place).chmod(mode)
    monkeypatch.setenv("ARIADNE_CACHE_DIR", str(packages))
    with pytest.raises(SpecError, match=r"can be written to by others .*Make it yours alone"):
        prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:1", mode="compiled")
    (tmp_path / place).chmod(0o700)
    prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:1", mode="compiled")


@posix
def test_where_the_folder_that_nobody_named_is_open_to_others_nothing_is_kept_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.delenv("ARIADNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime = prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:1", mode="compiled")
    assert "not kept for the next process: no packages are taken from" in str(runtime.report())
    assert not (tmp_path / "ariadne").exists()


@posix
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    assert kept.trusted() is kept
    found = tmp_path.stat()
    if found.st_uid == 0:
        os.chown(tmp_path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(SpecError, match=r"belongs to another user \(\d+\)"):
        kept.trusted()


@posix
def test_a_link_leads_to_where_it_led_when_it_was_looked_at(tmp_path: Path) -> None:
    (real := tmp_path / "real").mkdir(mode=0o700)
    (other := tmp_path / "other").mkdir(mode=0o777)
    (link := tmp_path / "link").symlink_to(real)
    kept = Kept(link)
    link.unlink()
    link.symlink_to(other)
    put(kept, A, b"code")
    assert [*real.glob("*.pt2")]
    assert not [*other.iterdir()]


@posix
def test_a_file_that_others_could_have_written_is_no_package(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "packages")
    card = put(kept, A, b"code")
    (found,) = kept.named(A)
    assert not isinstance(found, Broken)
    found.package.chmod(0o666)
    with pytest.raises(ValueError, match="others can write to it"):
        kept.checked(found)
    card.chmod(0o666)
    assert [str(b.why) for b in kept.named(A) if isinstance(b, Broken)] == [
        "it belongs to another user, or others can write to it"
    ]


def test_a_card_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "packages")
    card = put(kept, A, b"code")
    for lie in ("../made.pt2", str(tmp_path / "made.pt2"), "other.pt2"):
        card.write_text(json.dumps({**json.loads(card.read_text()), "package": lie}))
        assert [type(found) for found in kept.named(A)] == [Broken]


# --- how many ---------------------------------------------------------------------------------------------------------


def test_those_used_longest_ago_are_thrown_away_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "packages", bounded=True)
    for name, used in ((A, 300), (B, 200), (C, 100)):
        put(kept, name, name.encode() * 100, used=used)
    (oldest,) = kept.named(A)
    assert not isinstance(oldest, Broken)
    oldest.touch()
    (kept.path / "notes.txt").write_text("not ours")
    kept.limit = kept.size - 1
    assert kept.prune() > 0
    assert [card.told["name"] for card in kept.cards()] == [C, A]
    assert kept.clear() > 0
    assert sorted(p.name for p in kept.path.iterdir()) == ["limit.json", "notes.txt"]


def test_what_is_larger_than_the_limit_is_not_kept_and_a_limit_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "packages", bounded=True)
    kept.limit = 0
    (made := tmp_path / "made").write_bytes(b"code")
    assert kept.keep(A, str(made), ALL, 2, "a test") == "it has 4 bytes, and the cache holds 0 (ariadne cache limit)"
    assert not kept.cards()
    assert not Kept(tmp_path / "other").keep(A, str(made), ALL, 2, "a test")  # one that the user named has no limit


def test_a_package_without_a_card_is_thrown_away_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "packages", bounded=True)
    put(kept, A, b"code")
    young, old = (kept.path / f"ariadne-{name[:32]}-{name[:32]}.pt2" for name in (B, C))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    kept.prune()
    assert (young.exists(), old.exists(), len(kept.cards())) == (True, False, 1)


def test_many_writers_and_readers_at_once_meet_only_whole_packages(tmp_path: Path) -> None:
    kept, wrong, start = Kept(tmp_path / "packages"), [], threading.Barrier(4)
    (tmp_path / "packages").mkdir(mode=0o700)

    def write(number: int) -> None:
        made = tmp_path / f"made-{number}"
        start.wait()
        for i in range(40):
            made.write_bytes(f"{number} {i}".encode() * 1000)
            kept.keep(A, str(made), ALL, 2, "a test")

    def read() -> None:
        start.wait()
        for _ in range(100):
            for found in kept.named(A):
                if isinstance(found, Broken):
                    wrong.append(found.why)
                else:
                    kept.checked(found)

    threads = [threading.Thread(target=write, args=(n,)) for n in (1, 2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert len(kept.cards(A)) == 1


# --- which ------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Two sides that take the same and hold tensors of the same sizes, wherever it is cut; and a number in each."""

    def __init__(self, by: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.by = nn.Linear(5, 5), nn.Linear(5, 5), by
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 5) -> (B, 5)."""
        return (self.second((self.first(x) * self.by).tanh()) * self.by).tanh()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A compiler whose packages run the kernel's Python; which side it was asked for, each time."""
    made: list[Callable[..., Any]] = []
    asked: list[str] = []

    def compiled(
        self: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, hint: int, path: str, apart: Any
    ) -> tuple[Batches, None]:
        asked.append(self.lifted.name)
        made.append(load(self.lifted.kernel(marked=False, checked=False), "pretended"))
        Path(path).write_text(str(len(made) - 1))
        return served, None

    def loaded(path: str, device: int) -> Callable[..., Any]:
        run = made[int(Path(path).read_text())]
        return lambda tensors: run(*tensors)

    monkeypatch.setenv("ARIADNE_CACHE_DIR", str(tmp_path / "packages"))
    monkeypatch.setattr(Ahead, "_lower", compiled)
    monkeypatch.setattr(ahead, "_loaded", loaded)
    return asked


def differing(*splits: tuple[nn.Module, str]) -> list[str]:
    """The splits whose results are not their model's, each prepared anew as the next process would."""
    found, x = [], numbers(3, 5)
    for model, cut in splits:
        runtime = prepare_split(model, (numbers(4, 5),), split=cut, mode="compiled")
        if not torch.equal(halves(runtime, x), whole(model, x)):
            found.append(cut)
    return found


def other(weights: int) -> Scaled:
    model = Scaled(2.0)
    torch.manual_seed(weights)
    nn.init.normal_(model.first.weight)
    return model


def test_without_options_packages_are_kept_in_the_user_s_folder_and_the_next_process_has_nothing_to_compile(
    pretended: list[str], tmp_path: Path
) -> None:
    runtime = prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:3", mode="compiled")
    for batch in (4, 1, 17):
        x = numbers(batch, 5, seed=batch)
        assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    assert pretended == ["prefix", "suffix"]
    assert len(Kept(tmp_path / "packages").cards()) == 2
    following = prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:3", mode="compiled")
    assert torch.equal(halves(following, x), whole(following.model, x))
    report = following.report()
    assert [(s.state, s.loaded, s.ways) for s in report.segments] == [("loaded", 1, {False: "ahead of time"})] * 2
    assert (report.backend, pretended) == ("chosen by task", ["prefix", "suffix"])


def test_a_package_is_taken_for_its_own_cut_and_constants_and_follows_the_weights(pretended: list[str]) -> None:
    assert not differing(
        (Scaled(2.0), "cut:3"), (Scaled(2.0), "cut:2"), (Scaled(2.0), "cut:1"), (Scaled(3.0), "cut:3"), (other(7), "cut:3")
    )  # fmt: skip
    assert len(pretended) == 8  # the last has other weights alone, and those are handed to native code at each call


def forget(monkeypatch: pytest.MonkeyPatch, *forgotten: str) -> None:
    """Plant a bug: packages are named as if they did not depend on these."""
    dumps = json.dumps

    def forgetful(told: Any, **options: Any) -> str:
        return dumps({k: v for k, v in told.items() if k not in forgotten} if "ambient" in told else told, **options)

    monkeypatch.setattr(ahead.json, "dumps", forgetful)


@pytest.mark.parametrize(
    ("forgotten", "splits", "wrong"),
    [
        (("kernel", "split"), [(Scaled(2.0), "cut:3"), (Scaled(2.0), "cut:2")], ["cut:2"]),
        (("kernel", "plan"), [(Scaled(2.0), "cut:3"), (Scaled(3.0), "cut:3")], ["cut:3"]),
    ],
    ids=["a package of another cut", "a package for other constants"],
)
def test_a_planted_stale_package_is_noticed(
    forgotten: tuple[str, ...],
    splits: list[tuple[nn.Module, str]],
    wrong: list[str],
    pretended: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch, *forgotten)
    assert differing(*splits) == wrong


def test_a_planted_package_that_holds_weights_is_noticed(pretended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    call = Ahead.__call__

    def stale(self: Ahead, batch: int, *tensors: Any) -> Any:
        if self.lifted.name == "prefix":
            taken.append(tensors[self.split :])
            tensors = (*tensors[: self.split], *taken[0])
        return call(self, batch, *tensors)

    monkeypatch.setattr(Ahead, "__call__", stale)
    assert differing((Scaled(2.0), "cut:3"), (other(7), "cut:3")) == ["cut:3"]


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "torch": (torch, "__version__", "2.99.0"),
    "machine": (ahead, "processor", lambda: ("another processor",)),
    "threads": (torch, "get_num_threads", lambda: 3),
    "settings": (ahead, "_inductor_settings", lambda: "others"),
    "sources": (ahead, "sources", lambda: "another release"),
}


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("changed", CHANGES)
def test_a_package_of_another_torch_machine_or_release_is_not_taken(
    changed: str, planted: bool, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        forget(monkeypatch, changed)
    assert not differing((Scaled(2.0), "cut:3"))
    monkeypatch.setattr(*CHANGES[changed])
    assert not differing((Scaled(2.0), "cut:3"))
    assert len(pretended) == (2 if planted else 4)


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_a_package_that_was_written_over_is_made_anew(
    planted: bool, pretended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        monkeypatch.setattr(Kept, "checked", lambda self, card: str(card.package))
    assert not differing((Scaled(2.0), "cut:2"))
    first, second = sorted((tmp_path / "packages").glob("*.pt2"))
    other = first.read_text()
    first.write_text(second.read_text())
    second.write_text(other)
    assert differing((Scaled(2.0), "cut:2")) == (["cut:2"] if planted else [])


@posix
@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_a_folder_that_became_open_to_others_gives_no_package(
    planted: bool, pretended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not differing((Scaled(2.0), "cut:3"))
    runtime = prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:3", mode="compiled")
    (tmp_path / "packages").chmod(0o777)
    if planted:
        monkeypatch.setattr(Kept, "trusted", lambda self: self)
        halves(runtime, numbers(3, 5))
        assert [s.state for s in runtime.report().segments] == ["loaded"] * 2
        return
    with pytest.raises(SpecError, match="can be written to by others"):
        halves(runtime, numbers(3, 5))


def test_names_in_a_kernel_count_for_what_they_stand_for() -> None:
    """A plan that comes from a file says by itself what its signature is."""

    def told(thing: Any) -> Any:
        source = SimpleNamespace(namespace={"op": thing, "unused": object()})
        return ahead.names(SimpleNamespace(body=("y = op(x)",), source=source))  # type: ignore[arg-type]

    aten = torch.ops.aten
    things = [torch.relu, torch.sigmoid, torch.Tensor.relu, aten.relu.default, aten.add.Tensor, 1.0, 2.0, torch.int8]
    assert len({str(told(thing)) for thing in things}) == len(things)
    assert told(aten.relu.default) == told(aten.relu.default) == [["op", "aten.relu.default"]]


# --- what else runs ---------------------------------------------------------------------------------------------------


def test_what_can_not_be_a_package_runs_under_torch_compile_and_the_report_says_why(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: Ahead, *_: Any) -> Any:
        raise CompileError("it writes on the model")

    compile_ = torch.compile
    monkeypatch.setattr(Ahead, "_lower", refuses)
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_(function, **{**given, "backend": "eager"}))
    runtime = prepare_split(Scaled(2.0), (numbers(4, 5),), split="cut:3", mode="compiled")
    for batch in (4, 1, 9):
        x = numbers(batch, 5)
        assert torch.equal(halves(runtime, x), whole(runtime.model, x))
    report = runtime.report()
    assert [(s.state, s.ways) for s in report.segments] == [("compiled", {False: "torch.compile"})] * 2
    assert report.recompiles == 0
    assert all(s.notes == ["torch.compile in its place: it writes on the model"] for s in report.segments)
    assert "torch.compile in its place: it writes on the model" in str(report)


def test_without_options_training_on_a_cpu_is_eager_bit_for_bit_and_the_report_says_so(pretended: list[str]) -> None:
    model, twin, x = Scaled(2.0), Scaled(2.0), numbers(3, 5)
    runtime = prepare_split(model, (numbers(4, 5),), split="cut:3", mode="compiled")
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: output.square().mean())
    runtime.backward_prefix(boundary, gradients)
    expected = twin(x).square().mean()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not pretended
    assert [s.ways for s in runtime.report().segments] == [{True: "eager"}] * 2
    assert "training runs as eager code" in str(runtime.report())
