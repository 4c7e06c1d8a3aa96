"""Packages ahead of time: what they rely on is held at each call, and what is kept is loaded, checked and made anew."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne.compiled import SegmentReport
from ariadne.compiled.ahead import Ahead, _killed
from ariadne.compiled.exported import admitted
from ariadne.compiled.modes import modes
from ariadne.compiled.package import Layout
from ariadne.errors import CompileError, SpecError
from ariadne.plan import Batches, Expr
from conformance.unit.compiled_kit import BATCHES, Conv, Offset, compiler, fails, halves, made, near
from conformance.unit.trap_kit import numbers


class Attention(nn.Module):
    """Attention that drops out at a rate of its own, whatever the mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.second, self.rate = nn.Linear(6, 6), nn.Linear(6, 6), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(F.scaled_dot_product_attention(x, x, x, dropout_p=self.rate)))


@pytest.mark.compiler
@pytest.mark.slow  # runs the C++ compiler
@compiler
def test_a_package_serves_every_batch_follows_the_model_and_is_loaded_by_the_next_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    options = {"backend": "aot_inductor", "cache_dir": packages}
    first = made(Offset, 5, boundary="after:first", **options)
    first.warmup(numbers(1, 5))
    assert [(s.state, s.batches) for s in first.report().segments] == [("compiled", ("1 to 64",))] * 2
    for batch in (*BATCHES, 64):
        near(first.model, x := numbers(batch, 5, seed=batch), halves(first, x))
    with torch.no_grad():
        first.model.first.weight.mul_(2)
        first.model.shift.add_(1)
    first.model.second.weight = nn.Parameter(numbers(4, 6, seed=1))
    near(first.model, x, halves(first, x))
    strided = numbers(10, 64).t()[:, :5]
    near(first.model, strided, halves(first, strided))
    assert first.report().recompiles == 0
    with pytest.raises(CompileError, match="'aot_inductor' serves inference"):
        first.run_training_prefix(x)

    monkeypatch.setattr(
        torch._inductor, "aoti_load_package", fails
    )  # a third of a second of imports and of looking at the CPU
    second = made(Offset, 5, boundary="after:first", **options)
    near(second.model, x, halves(second, x))
    assert [(s.state, s.loaded) for s in second.report().segments] == [("loaded", 1)] * 2

    card = next(packages.glob("*.json"))
    package = card.with_name(json.loads(card.read_text())["package"])
    package.write_bytes(package.read_bytes()[:-1] + b"\0\1")
    third = made(Offset, 5, boundary="after:first", on_compile_error="eager", **options)
    near(third.model, x, halves(third, x))
    assert sorted(s.state for s in third.report().segments) == ["compiled", "loaded"]
    assert any("its bytes are not those that were written" in n for s in third.report().segments for n in s.notes)
    for card in packages.glob("*.json"):
        card.write_text(json.dumps({**json.loads(card.read_text()), "name": "0" * 64}))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    fourth = made(Offset, 5, boundary="after:first", **options)
    with pytest.raises(CompileError, match="AOTInductor refused"):
        fourth.run_prefix(x)
    assert any("it was made for something else" in note for note in fourth.report().segments[0].notes)


@compiler
@pytest.mark.compiler
def test_a_package_takes_several_tensors_that_share_the_batch() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x.relu()) + x

    runtime = made(Residual, 5, boundary="cut:2", backend="aot_inductor")
    assert len(runtime.candidates[1].live) == 2
    for batch in (2, 1, 7):
        near(runtime.model, x := numbers(batch, 5), halves(runtime, x))
    assert [sum(s.compiled.values()) for s in runtime.report().segments] == [1, 1]


@pytest.mark.parametrize(
    ("build", "sizes", "train", "words"),
    [
        (Conv, (3, 8, 8), True, "writes into|random numbers"),
        (Conv, (3, 8, 8), False, None),
        (partial(Attention, 0.5), (4, 6), False, "draws random numbers"),
        (partial(Attention, 0.0), (4, 6), False, None),
    ],
)
def test_what_native_code_can_not_do_is_refused_before_the_compiler_runs(
    build: Any, sizes: tuple[int, ...], train: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def stopped(*args: Any, **options: Any) -> Any:
        ran.append(args)
        raise RuntimeError("the compiler was reached")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", stopped)
    runtime = made(build, *sizes, train=train, backend="aot_inductor")
    with pytest.raises(CompileError, match=words or "the compiler was reached"):
        halves(runtime, numbers(2, *sizes))
    assert bool(ran) == (words is None)


def test_batches_for_which_the_compiler_s_assumptions_fail_are_not_admitted() -> None:
    import sympy  # noqa: PLC0415 - torch's own dependency

    s, t, u, v = (sympy.Symbol(name, integer=True) for name in "stuv")

    class Guard:
        def __init__(self, expr: Any) -> None:
            self.expr = expr

    class Env:
        def __init__(self, *guards: Any) -> None:
            self.guards, self.var_to_range = [Guard(g) for g in guards], {}
            self.replacements: dict[Any, Any] = {u: s}

    one, both = {s: Expr("B")}, {s: Expr("B"), t: Expr("2*B")}
    assert admitted(Env(s < 16), one, "B", Batches(((1, 64),))) == Batches(((1, 15),))
    assert admitted(Env(sympy.Eq(s % 8, 0)), one, "B", Batches(((1, 20),))) == Batches(((8, 8), (16, 16)))
    assert admitted(Env(sympy.Eq(s * 2, t), t < 9), both, "B", Batches(((1, 64),))) == Batches(((1, 4),))
    assert admitted(Env(sympy.Eq(u, s), u > 2), one, "B", Batches(((1, 9),))) == Batches(((3, 9),))
    assert not admitted(Env(s < v), one, "B", Batches(((1, 64),)))
    # A size that was fixed to the example's, or to twice another: torch writes it into the guard, which is then true.
    fixed, tied = Env(sympy.Eq(s * 32, 256)), Env()
    fixed.replacements |= {s: sympy.Integer(8)}
    tied.replacements |= {t: s + 4}
    assert admitted(fixed, one, "B", Batches(((1, 64),))) == Batches(((8, 8),))
    assert admitted(tied, both, "B", Batches(((1, 64),))) == Batches(((4, 4),))
    assert not admitted(Env(), {}, "B", Batches(((1, 64),)))
    # A size that follows data: open; taken for a number, for the batch, for another such size.
    assert admitted(Env(s < 16), one, "B", Batches(((1, 64),)), [v]) == Batches(((1, 15),))
    number = Env()
    number.replacements |= {v: sympy.Integer(6)}
    assert not admitted(number, one, "B", Batches(((1, 64),)), [v])
    assert not admitted(Env(), one, "B", Batches(((1, 64),)), [s])
    assert not admitted(Env(), one, "B", Batches(((1, 64),)), [v, v])
    assert not admitted(Env(), one, "B", Batches(((1, 64),)), [2 * v])


def taking(sizes: tuple[Any, ...], folder: Path | None = None) -> Ahead:
    """A kernel of one input of these sizes, for batches 1 to 64, that was compiled for nothing yet."""
    lifted = SimpleNamespace(
        inputs=["x"],
        sizes={"x": sizes},
        symbol="B",
        batch="x.shape[0]",
        has_witness=False,
        name="prefix",
        kernel=lambda **_: SimpleNamespace(text=""),
        body=(),
        source=SimpleNamespace(namespace={}),
    )
    plan = SimpleNamespace(batches=Batches(((1, 64),)), objects=(), signature="p")
    report = SegmentReport("prefix", "cut:1")
    options = SimpleNamespace(cache_dir=folder, given={}, on_error="raise", chosen=False)
    return Ahead(lifted, plan, "prefix", options, report, None, CompileError, threading.RLock())  # type: ignore[arg-type]


@pytest.fixture
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A compiler that makes nothing, for all batches; what it was asked for: the layouts of the inputs, and how the state lies."""
    asked: list[Any] = []

    def quick(self: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, *more: Any) -> Any:
        asked.append((layouts, [t.stride() for t in state]))
        return served, None

    monkeypatch.setattr(Ahead, "_lower", quick)
    monkeypatch.setattr(
        "ariadne.compiled.ahead._loaded", lambda path, device: lambda tensors: [t.clone() for t in tensors]
    )
    return asked


@pytest.mark.parametrize(
    ("batch", "shape", "words"),
    [
        (3, (3, 4), r"'x' has size 4 in dim 1, where capture saw 5 \(here 5\)"),
        (3, (2, 5), r"'x' has size 2 in dim 0, where capture saw B \(here 3\)"),
    ],
)
def test_native_code_is_given_no_fewer_elements_than_it_reads(
    batch: int, shape: tuple[int, ...], words: str, compiled_for: list[Any]
) -> None:
    ahead = taking((Expr("B"), 5))
    with torch.no_grad():
        ahead(3, torch.ones(3, 5))
        ahead(7, torch.ones(7, 5))
        with pytest.raises(CompileError, match=words):
            ahead(batch, torch.ones(shape))
    assert len(compiled_for) == 1


def test_a_size_that_follows_data_is_open_from_2_on(compiled_for: list[Any]) -> None:
    ahead = taking((Expr("B"), Expr("k")))
    with torch.no_grad():
        for batch, size in ((3, 4), (3, 9), (2, 2), (3, 1), (5, 1), (3, 0), (3, 4)):
            ahead(batch, torch.ones(batch, size))
    assert [layouts[0].sizes for layouts, _ in compiled_for] == [(Expr("B"), n) for n in (None, 1, 0)]


def test_native_code_reads_the_model_s_tensors_as_they_lay_when_it_was_compiled(compiled_for: list[Any]) -> None:
    ahead = taking((Expr("B"), 5))
    wide = numbers(4, 10)
    part, x = wide[:, :5], torch.ones(3, 5)
    with torch.no_grad():
        for state in (part, part.contiguous(), part, wide[:, 5:], numbers(4, 5)):
            found = ahead(3, x, state)[1]
            assert torch.equal(found, state)
    assert [state for _, state in compiled_for] == [[(10, 1)], [(5, 1)]]
    assert ahead.report.recompiles == 1


@pytest.mark.compiler
@compiler
def test_a_tensor_of_the_model_that_lies_otherwise_is_compiled_for_anew() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 5)
            self.register_buffer("part", numbers(4, 10)[:, :5])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu()) @ self.part.t()

    runtime = made(Narrow, 5, boundary="after:first", backend="aot_inductor")
    x, part = numbers(3, 5), runtime.model.part
    for state in (part, part.contiguous(), part):
        runtime.model.part = state
        near(runtime.model, x, halves(runtime, x))
    assert runtime.report().recompiles == 1


def test_what_is_compiled_serves_though_it_can_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").write_text("a file in its place")
    monkeypatch.setattr("ariadne.compiled.ahead._loaded", lambda path, device: lambda tensors: tensors[:1])
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, package_path, **_: None)
    runtime = made(Offset, 5, boundary="after:first", backend="aot_inductor", cache_dir=tmp_path / "packages")
    with torch.no_grad():
        assert len(runtime.run_prefix(numbers(2, 5)).tensors)
    assert any(note.startswith("not kept for the next process: ") for note in runtime.report().segments[0].notes)


def test_a_package_whose_loading_ends_a_process_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on CUDA with torch 2.11: the loader ends in a segmentation fault, which nothing can catch."""
    monkeypatch.setattr("ariadne.compiled.ahead._TRY", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, package_path, **_: None)
    monkeypatch.setattr(Ahead, "_device", lambda self, tensors: 0)
    runtime = made(Offset, 5, boundary="after:first", backend="aot_inductor")
    with torch.no_grad(), pytest.raises(CompileError, match=r"ends the process that loads it.*signal 11.*'inductor'"):
        runtime.run_prefix(numbers(2, 5))


def test_a_package_that_is_no_package_ends_no_process() -> None:
    assert _killed("there is none", 0) is None


def test_packages_that_serve_few_batches_are_kept_side_by_side_and_found_by_each_batch_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def few(
        self: Ahead, layouts: Any, inputs: Any, state: Any, served: Batches, hint: int, path: str, apart: Any
    ) -> Any:
        compiled.append(hint)
        admitted = next(Batches(((lo, hi),)) for lo, hi in ((1, 3), (4, 15), (16, 64)) if lo <= hint <= hi)
        Path(path).write_bytes(f"code for {hint}".encode())
        return admitted, None

    monkeypatch.setattr(Ahead, "_lower", few)
    monkeypatch.setattr("ariadne.compiled.ahead._loaded", lambda path, device: print)
    packages = tmp_path / "packages"

    def loaded(*batches: int) -> list[int]:
        """How often a new process had loaded after each of these batches."""
        ahead, counts = taking((Expr("B"), 5), packages), []
        for batch in batches:
            assert batch in ahead._find(batch, [torch.ones(batch, 5)], [], modes()).batches  # type: ignore[union-attr]
            counts.append(ahead.report.loaded)
        return counts

    assert loaded(2, 16, 5) == [0, 0, 0]
    assert compiled == [2, 16, 5]
    assert loaded(20, 9, 3, 64) == [1, 2, 3, 3]
    assert loaded(5) == [1]
    cards = {int(card.stem.rpartition("-")[2]): card for card in packages.glob("*.json")}
    assert sorted(cards) == [2, 5, 16]

    def package(hint: int) -> Path:
        return cards[hint].with_name(json.loads(cards[hint].read_text())["package"])

    package(16).write_bytes(b"other")  # one that is damaged is made anew, and no other
    assert loaded(9, 20) == [1, 1]
    assert compiled == [2, 16, 5, 20]
    assert sorted(int(card.stem.rpartition("-")[2]) for card in packages.glob("*.json")) == [2, 5, 20]
    cards[2].write_text("{")  # nor does it hide one that is whole
    assert loaded(20, 9) == [1, 2]
    assert len(compiled) == 4


@pytest.mark.parametrize("change", ["dtype", "deterministic", "precision", "autocast"])
def test_a_package_serves_only_under_the_modes_of_torch_that_it_was_compiled_under(
    change: str, compiled_for: list[Any]
) -> None:
    ahead, x = taking((Expr("B"), 5)), torch.ones(3, 5)
    with torch.no_grad(), ExitStack() as stack:
        ahead(3, x)
        if change == "dtype":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        elif change == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        elif change == "precision":
            place: Any = torch.backends.mkldnn.matmul
            stack.callback(setattr, place, "fp32_precision", place.fp32_precision)
            place.fp32_precision = "bf16"
        else:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        ahead(3, x)
        ahead(3, x)
        assert len(compiled_for) == 2
    with torch.no_grad():
        ahead(3, x)
    assert len(compiled_for) == 2


def test_a_setting_that_inductor_does_not_have_is_refused_when_the_split_is_prepared() -> None:
    with pytest.raises(SpecError, match="inductor has no setting 'max_autotun'"):
        made(Offset, 5, boundary="after:first", backend="aot_inductor", options={"max_autotun": True})
    made(Offset, 5, boundary="after:first", backend="aot_inductor", options={"max_autotune": True})


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_inputs_are_laid_out_as_a_package_expects_them_at_every_batch(form: torch.memory_format) -> None:
    example = torch.empty(2, 3, 4, 5).to(memory_format=form)
    layout = Layout.of(example, (Expr("B"), 3, 4, 5))
    for batch in (1, 2, 7):
        t = numbers(batch, 3, 4, 5)
        laid = layout.lay(t)
        assert torch.equal(laid, t)
        assert laid.stride() == torch.empty(batch, 3, 4, 5).to(memory_format=form).stride() or batch == 1
        assert layout.lay(laid) is laid
