"""Halves as files: what is saved, what is loaded, what is refused."""

from __future__ import annotations

import copy
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ariadne
from ariadne.cli import main
from ariadne.errors import BoundaryError, FrontierError, HalfError, InputError, ModuleError, SpecError
from ariadne.halves.form import _has_grown
from ariadne.halves.ops import resolve, schema_of
from conformance.suite import halves_fuzz
from conformance.suite.halves_fuzz import closed, opened

ROOT = Path(__file__).resolve().parents[3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4 * 36, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


def pair(tmp_path: Path, model: nn.Module, x: Any, split: str = "50%", **options: Any) -> tuple[Any, Any, Any]:
    """The split of a model in one process, and its halves from files."""
    runtime = ariadne.prepare_split(model, (x,), split=split)
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side, **options)
    return runtime, ariadne.load(tmp_path / "prefix"), ariadne.load(tmp_path / "suffix")


def _value(half: Any, name: str) -> list[Any]:
    """A row of the first plan's values."""
    return next(v for v in half["plans"][0]["values"] if v[0] == name)


def sent(boundary: Any) -> Any:
    return ariadne.BoundaryPayload.from_bytes(boundary.to_bytes())


def rewritten(path: Path, change: Any) -> None:
    """The same file with another half in its metadata."""
    header, half, body = opened(path.read_bytes())
    change(half)
    path.write_bytes(closed(header, half, body))


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_halves_from_files_give_what_the_model_gives(tmp_path: Path, batch: int) -> None:
    model = Net().eval()
    _, prefix, suffix = pair(tmp_path, model, torch.randn(2, 3, 8, 8))
    x = torch.randn(batch, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(suffix(sent(prefix(x))), model(x))


def test_a_fresh_process_without_the_models_code_loads_and_runs_a_half(tmp_path: Path) -> None:
    model = Net().eval()
    pair(tmp_path, model, torch.randn(2, 3, 8, 8))
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        safetensors.torch.save_file({"x": x, "y": model(x)}, tmp_path / "expected")
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torchvision', 'timm', 'conformance', 'model_zoo', 'sympy')))\n"
        "import torch, ariadne, safetensors.torch as s\n"
        f"p, q = (ariadne.load({str(tmp_path)!r} + '/' + n) for n in ('prefix', 'suffix'))\n"
        f"e = s.load_file({str(tmp_path / 'expected')!r})\n"
        "assert torch.equal(q.run_suffix(ariadne.BoundaryPayload.from_bytes(p.run_prefix(e['x']).to_bytes())), e['y'])\n"
        "print('equal', 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["equal", "False"], done.stderr


def test_halves_train_as_the_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().train()
    twin = copy.deepcopy(model)
    _, prefix, suffix = pair(tmp_path, model, torch.randn(2, 3, 8, 8), "after:body")
    whole = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    ours = [torch.optim.SGD(h.parameters(), lr=0.1, momentum=0.9) for h in (prefix, suffix)]
    for step in range(3):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 7, (4,))
        torch.manual_seed(step)
        whole.zero_grad()
        loss = nn.functional.cross_entropy(twin(x), y)
        loss.backward()
        whole.step()
        torch.manual_seed(step)
        boundary = prefix.run_training_prefix(x)
        found, gradients = suffix.train_suffix(
            sent(boundary), y, loss_fn=nn.functional.cross_entropy, optimizer=ours[1]
        )
        prefix.backward_prefix(boundary, gradients, optimizer=ours[0])
        assert torch.equal(found, loss.detach())
    state = twin.state_dict()
    for half in (prefix, suffix):
        assert half.state_dict()
        assert all(torch.equal(t, state[n]) for n, t in half.state_dict().items())


def test_the_tensors_of_a_half_have_the_models_names_and_any_tool_can_read_them(tmp_path: Path) -> None:
    model = Net().eval()
    runtime, prefix, suffix = pair(tmp_path, model, torch.randn(2, 3, 8, 8), "after:body")
    assert [*suffix.state_dict()] == ["head.weight", "head.bias"]
    assert runtime.suffix_state_dict().keys() == suffix.state_dict().keys()
    assert runtime.prefix_state_dict().keys() == prefix.state_dict().keys()
    assert torch.equal(safetensors.torch.load_file(tmp_path / "suffix")["head.weight"], model.head.weight)


def test_a_tied_tensor_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    model = halves_fuzz.Tied().eval()
    _, prefix, suffix = pair(tmp_path, model, torch.randint(0, 11, (2, 7)))
    header, _, _ = opened((tmp_path / "suffix").read_bytes())
    assert sum(k in ("embed.weight", "out.weight") for k in header) == 1
    assert suffix.get_parameter("out.weight") is suffix.get_parameter("embed.weight")
    assert [p.shape for p in suffix.shared_parameters()] == [p.shape for p in prefix.shared_parameters()] == [(11, 6)]
    suffix.get_submodule("out").weight = nn.Parameter(torch.zeros(11, 6))
    with pytest.raises(ModuleError, match="were one tensor at capture, and are two now"):
        suffix.run_suffix(sent(prefix.run_prefix(torch.randint(0, 11, (2, 7)))))


class Views(nn.Module):
    """Tensors that the format has no words for: views of one memory, gaps, strides, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(40)
        self.register_buffer("one", flat[:16].view(4, 4))
        self.register_buffer("two", flat[8:40:2].view(4, 4))
        self.register_buffer("turned", torch.randn(4, 4).t())
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex128))
        self.register_buffer("empty", torch.randn(0, 4))
        self.plain = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.one + self.plain) @ self.turned
        x = torch.cat([x, self.empty]) @ self.two
        return x * self.wave.real.float()


def test_strides_aliases_and_other_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    model = Views().eval()
    x = torch.randn(3, 4)
    runtime = ariadne.prepare_split(model, (x,), split="50%")
    for candidate in runtime.candidates:
        if candidate.safe:
            made = runtime.resplit(candidate)
            made.save(tmp_path / "p", side="prefix")
            made.save(tmp_path / "s", side="suffix")
            prefix, suffix = ariadne.load(tmp_path / "p"), ariadne.load(tmp_path / "s")
            assert torch.equal(suffix(sent(prefix(x))), model(x))
            for half in (prefix, suffix):
                for name, t in half.named_buffers():
                    if name != "plain":
                        was = model.get_buffer(name)
                        assert (t.stride(), t.dtype, t.shape) == (was.stride(), was.dtype, was.shape)
    both = dict(ariadne.load(tmp_path / "p").named_buffers())
    assert both["one"].untyped_storage().data_ptr() == both["two"].untyped_storage().data_ptr()


def test_what_a_half_moves_stays_out_of_its_file(tmp_path: Path) -> None:
    _, prefix, _ = pair(tmp_path, Net().train(), torch.randn(2, 3, 8, 8))
    before = (tmp_path / "prefix").read_bytes()
    prefix(torch.randn(4, 3, 8, 8))
    assert (tmp_path / "prefix").read_bytes() == before
    assert not torch.equal(prefix.get_buffer("body.1.running_mean"), torch.zeros(4))


def test_a_half_without_weights_takes_a_state_dict_or_a_file(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 3, 8, 8)
    runtime = ariadne.prepare_split(model, (x,), split="50%")
    runtime.save(tmp_path / "p", side="prefix", weights=False)
    assert (tmp_path / "p").stat().st_size < 20_000
    with pytest.raises(HalfError, match="saved without weights; pass weights="):
        ariadne.load(tmp_path / "p")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model")
    expected = runtime.run_prefix(x).raw
    for weights in (model.state_dict(), tmp_path / "model"):
        assert torch.equal(ariadne.load(tmp_path / "p", weights=weights).run_prefix(x).raw[0], expected[0])
    with pytest.raises(HalfError, match=r"nothing was replaced: 'body.0.weight' is missing"):
        ariadne.load(tmp_path / "p", weights={})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("head.bias"), "'head.bias' is missing"),
        (
            lambda s: s.update({"head.bias": torch.zeros(8)}),
            r"'head.bias' is torch.float32\[8\], the half has torch.float32\[7\]",
        ),
        (lambda s: s.update({"head.bias": torch.zeros(7).double()}), "'head.bias' is torch.float64"),
    ],
)
def test_weights_that_do_not_fit_replace_nothing(tmp_path: Path, change: Any, says: str) -> None:
    model = Net().eval()
    _, _, suffix = pair(tmp_path, model, torch.randn(2, 3, 8, 8), "after:body")
    before = {n: t.clone() for n, t in suffix.state_dict().items()}
    other = Net().state_dict()
    change(other)
    with pytest.raises(HalfError, match=f"nothing was replaced: {says}"):
        suffix.replace_weights(other)
    assert all(torch.equal(before[n], t) for n, t in suffix.state_dict().items())
    suffix.replace_weights(Net().state_dict())
    assert not torch.equal(before["head.weight"], suffix.state_dict()["head.weight"])


def test_a_tied_tensor_given_twice_with_two_values_is_refused(tmp_path: Path) -> None:
    _, _, suffix = pair(tmp_path, halves_fuzz.Tied().eval(), torch.randint(0, 11, (2, 7)))
    state = {n: t.clone() for n, t in suffix.state_dict().items()}
    state["out.weight"] += 1
    with pytest.raises(HalfError, match="are one tensor in the model, and are given with two values"):
        suffix.replace_weights(state)


def test_halves_of_other_weights_are_refused_unless_told_otherwise(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    torch.manual_seed(0)
    _, prefix, _ = pair(tmp_path, Net().eval(), x)
    (tmp_path / "b").mkdir()
    _, _, suffix = pair(tmp_path / "b", Net().eval(), x)
    with pytest.raises(BoundaryError, match="saved with other weights"):
        suffix.run_suffix(sent(prefix.run_prefix(x)))
    suffix.other_weights = True
    suffix.run_suffix(sent(prefix.run_prefix(x)))
    suffix.other_weights = False
    with torch.no_grad():
        next(prefix.parameters()).mul_(2)
    assert prefix.digest == ""
    suffix.run_suffix(sent(prefix.run_prefix(x)))


def test_weights_that_were_replaced_or_added_take_the_digest_away(tmp_path: Path) -> None:
    _, prefix, suffix = pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    known = prefix.digest
    assert known
    assert suffix.digest == known
    name, p = next(iter(prefix.named_parameters()))
    owner = prefix.get_submodule(name.rpartition(".")[0])
    owner._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(p.detach().clone())
    assert prefix.digest == ""
    owner._parameters[name.rpartition(".")[2]] = p
    assert prefix.digest == known
    owner.__dict__["_buffers"] = {"more": torch.ones(1)}
    assert prefix.digest == ""
    owner.__dict__["_buffers"] = {}
    assert prefix.digest == known
    assert copy.deepcopy(suffix).digest == known


def test_a_boundary_of_another_kind_is_refused_after_one_that_fits(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = Net().eval()
    _, prefix, suffix = pair(tmp_path, model, x)
    boundary = sent(prefix.run_prefix(x))
    for _ in range(2):
        assert torch.equal(suffix.run_suffix(boundary), model(x))
    at = next(i for i, t in enumerate(boundary.raw) if isinstance(t, torch.Tensor) and t.dim() > 1)
    for other in (boundary.raw[at].double(), boundary.raw[at][:, :1], boundary.raw[at][:1], 3.0, [boundary.raw[at]]):
        wrong = sent(prefix.run_prefix(x))
        wrong.raw = (*boundary.raw[:at], other, *boundary.raw[at + 1 :])
        with pytest.raises(BoundaryError, match="must be"):
            suffix.run_suffix(wrong)
    other_batch = sent(prefix.run_prefix(x))
    other_batch.batch = 1
    with pytest.raises(BoundaryError, match=r"must be|serves"):
        suffix.run_suffix(other_batch)


def test_a_half_is_a_module_that_moves_copies_and_saves_again(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 3, 8, 8)
    _, prefix, suffix = pair(tmp_path, model, x)
    double = copy.deepcopy(prefix).double(), copy.deepcopy(suffix).double()
    with torch.no_grad():
        assert torch.equal(double[1](sent(double[0](x.double()))), copy.deepcopy(model).double()(x.double()))
        assert torch.equal(suffix(sent(prefix(x))), model(x))  # the originals are as they were
        next(prefix.parameters()).mul_(2)
    prefix.save(tmp_path / "again")
    again = ariadne.load(tmp_path / "again")
    assert torch.equal(again(x).raw[0], prefix(x).raw[0])
    assert again.digest == ""
    half = ariadne.load(tmp_path / "prefix", dtype=torch.bfloat16)
    assert half(x.bfloat16()).raw[0].dtype is torch.bfloat16


def test_the_side_that_is_absent_and_calls_that_no_plan_serves_say_so(tmp_path: Path) -> None:
    _, prefix, suffix = pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    with pytest.raises(SpecError, match="this is the suffix alone, and that call needs the prefix"):
        suffix.run_prefix(torch.randn(2, 3, 8, 8))
    with pytest.raises(SpecError, match="this is the prefix alone"):
        prefix.run_suffix(prefix.run_prefix(torch.randn(2, 3, 8, 8)))
    with pytest.raises(InputError, match="What may change is the batch"):
        prefix.run_prefix(torch.randn(2, 3, 9, 8))
    with pytest.raises(ModuleError, match="was captured in eval mode and is now in train mode"):
        prefix.train().run_prefix(torch.randn(2, 3, 8, 8))
    with pytest.raises(InputError, match=r"dtype|float64|f64"):
        prefix.eval().run_prefix(torch.randn(2, 3, 8, 8).double())


class Asks(nn.Module):
    """Runs otherwise with gradients, and at batch 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if torch.is_grad_enabled():
            x = x * 2
        if x.shape[0] == 1:
            x = x + 1
        return self.two(x).relu()


def test_plans_for_other_batches_and_modes_are_in_one_file(tmp_path: Path) -> None:
    model = Asks().eval()
    _, prefix, suffix = pair(tmp_path, model, torch.randn(2, 4), examples=[(torch.randn(1, 4),)])
    assert len(prefix.runtime._plans) >= 3
    for batch in (1, 2, 5):
        x = torch.randn(batch, 4)
        with torch.no_grad():
            assert torch.equal(suffix(sent(prefix(x))), model(x))
        loss, _ = suffix.train_suffix(sent(prefix.run_training_prefix(x)), loss_fn=lambda y, _: y.sum())
        assert torch.equal(loss, model(x).sum().detach())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mid = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mid(self.norm(x)))


def test_state_that_one_side_writes_and_the_other_reads_keeps_the_halves_together(tmp_path: Path) -> None:
    runtime = ariadne.prepare_split(Shared().train(), (torch.randn(3, 4),), split="after:mid")
    with pytest.raises(FrontierError, match=r"can't part: 'norm\.\w+' is written by the prefix and used by the suffix"):
        runtime.save(tmp_path / "p", side="prefix")
    assert not (tmp_path / "p").exists()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(Doubled.apply(self.one(x)))


def test_python_of_the_model_is_named_and_called_only_with_leave(tmp_path: Path) -> None:
    runtime = ariadne.prepare_split(Calls(), (torch.randn(2, 4),), split="after:one")
    runtime.save(tmp_path / "s", side="suffix")
    where = f"{__name__}:Doubled"
    with pytest.raises(HalfError, match=f"uses '{where}'"):
        ariadne.load(tmp_path / "s")
    half, x = ariadne.load(tmp_path / "s", allow=[where]), torch.randn(3, 4)
    boundary = sent(runtime.run_prefix(x))
    assert torch.equal(half.run_suffix(boundary), runtime.run_suffix(boundary))


def _out_of_state(header: dict[str, Any], target: str) -> None:
    """Make the first op one that writes its result into a parameter."""
    at = next(v[0] for v in header["plans"][0]["values"] if v[1] == "parameter")
    header["ops"][target] = schema_of(resolve(target))
    header["plans"][0]["nodes"][0].update(
        op=target, args=[{"ref": [at, None]}] * 2, kwargs=[["out", {"ref": [at, None]}]]
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h["plans"][0]["nodes"][0].update(op="aten.from_file.default"), "no schema"),
        (lambda h: h["ops"].update({"aten.from_file.default": "x"}), "reaches beyond the tensors"),
        (lambda h: _out_of_state(h, "aten.add.out"), "writes its result into what is neither a buffer"),
        (lambda h: h["ops"].update({"prims.add.default": "x"}), "of the library 'prims'"),
        (lambda h: h["ops"].update({"aten.save.default": "x"}), "has not"),
        (lambda h: h["plans"][0].update(batch="__import__"), "no name for a value"),
        (lambda h: h["plans"][0]["nodes"][0].update(module="a\nimport os"), "a module is"),
        (lambda h: h["plans"][0]["inputs"][0].__setitem__(1, "print"), "no name for a value"),
        (lambda h: h["plans"][0]["values"][0].__setitem__(2, [{"expr": "__import__('os').x()"}]), "is no size|calls something"),
        (lambda h: h["plans"][0]["values"][0].__setitem__(2, [{"expr": "9**9**9"}]), "power"),
        (lambda h: h["plans"][0].update(output_spec={"kind": "fields", "class": "os:x", "children": [], "keys": []}), "uses 'os"),
        (lambda h: h["state"][0][5].__setitem__(0, 2**40), "does not hold what lies in it"),
        (lambda h: h["plans"][0]["nodes"][0]["args"].__setitem__(0, {"ref": ["B", None]}), "a reference is to the batch"),
        (lambda h: h["state"][0][0][0].__setitem__(2, "forward.x"), "taken|kept nowhere|not in the file"),
        (lambda h: h["plans"][0]["cut"]["live"].append(h["plans"][0]["cut"]["live"][0]), "crosses twice"),
        (lambda h: _value(h, h["plans"][0]["nodes"][0]["out"][0]).__setitem__(1, "constant"), "is a constant that is not there"),
        (lambda h: h.update(format=4), "has format 4, and this Ariadne"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    rewritten(tmp_path / "prefix", change)
    with pytest.raises(HalfError, match=says):
        ariadne.load(tmp_path / "prefix")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the device is there")
def test_a_constant_on_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    model, x = halves_fuzz.Net().eval(), torch.randn(2, 3, 8, 8)
    ariadne.prepare_split(model, (x,), split="50%").save(tmp_path / "suffix", side="suffix")
    rewritten(tmp_path / "suffix", lambda h: h["plans"][0]["constants"]["constant"].__setitem__(5, "cuda:0"))
    with pytest.raises(HalfError, match="is on 'cuda:0', a device that this process can't use"):
        ariadne.load(tmp_path / "suffix")


def test_what_is_no_half_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.torch.save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(HalfError, match="may be a checkpoint"):
        ariadne.load(path)
    for data in (b"", b"x" * 7, struct.pack("<Q", 2**63), struct.pack("<Q", 4) + b"[[[["):
        path.write_bytes(data)
        with pytest.raises(HalfError, match="no safetensors file"):
            ariadne.load(path)
    path.write_bytes(closed({}, "[" * 100_000, b""))
    with pytest.raises(HalfError, match="can't be read"):
        ariadne.load(path)


def test_another_torch_is_told_and_another_op_is_refused(tmp_path: Path) -> None:
    pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    rewritten(tmp_path / "prefix", lambda h: h.update(torch="2.3.1"))
    with pytest.warns(UserWarning, match=r"saved with torch 2\.3\.1"):
        ariadne.load(tmp_path / "prefix")

    def older(half: dict[str, Any]) -> None:
        name = "aten.conv2d.default"
        half["ops"][name] = half["ops"][name].replace("SymInt groups=1", "SymInt groups=2")

    rewritten(tmp_path / "suffix", lambda h: None)
    rewritten(tmp_path / "prefix", older)
    with pytest.raises(HalfError, match="is another one here"):
        ariadne.load(tmp_path / "prefix")


def test_an_op_that_grew_an_argument_with_a_default_still_runs() -> None:
    assert _has_grown("aten::f(Tensor a, int b=1) -> Tensor", "aten::f(Tensor a, int b=1, *, bool c=False) -> Tensor")
    assert not _has_grown("aten::f(Tensor a, int b=1) -> Tensor", "aten::f(Tensor a, int b=2, int c=0) -> Tensor")
    assert not _has_grown("aten::f(Tensor a) -> Tensor", "aten::f(Tensor a, int c) -> Tensor")


def test_native_code_is_loaded_only_with_leave(tmp_path: Path) -> None:
    pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    options = {"backend": "aot_inductor", "cache_dir": tmp_path}
    with pytest.raises(SpecError, match="trust_native_code=True"):
        ariadne.load(tmp_path / "prefix", mode="compiled", compile_options=options)


def test_a_half_runs_in_the_debug_interpreter_too(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 3, 8, 8)
    pair(tmp_path, model, x)
    prefix, suffix = (ariadne.load(tmp_path / n, mode="debug_interpreter") for n in ("prefix", "suffix"))
    with torch.no_grad():
        assert torch.equal(suffix(sent(prefix(x))), model(x))


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _, _ = pair(tmp_path, Net().eval(), torch.randn(2, 3, 8, 8))
    before = (tmp_path / "prefix").read_bytes()

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        runtime.save(tmp_path / "prefix", side="prefix")
    assert (tmp_path / "prefix").read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_files_are_refused_or_decoded(seed: int) -> None:
    count = int(os.environ.get("ARIADNE_HALVES_FUZZ", "150"))
    found = halves_fuzz.run(count, seed)
    assert sum(found.values()) == count
    assert found["refused"] > count // 2


def test_the_fuzzer_notices_a_loader_that_runs_what_the_file_says() -> None:
    def careless(path: Path) -> Any:
        _, half, _ = opened(path.read_bytes())
        for node in half["plans"][0]["nodes"]:
            eval(compile(node["op"].split(".")[0], "/from/the/file", "eval"), {"aten": 1, "python": 1, "quantized": 1})

    with pytest.raises(AssertionError, match=r"compiles /from/the/file|raises"):
        halves_fuzz.run(50, 0, careless)


def test_save_and_inspect_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "edge.safetensors")
    assert main(["save", "nn/mlp10x64", "50%", "--side", "prefix", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["side"] == "prefix"
    assert main(["inspect", out]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in ("Half(prefix of", "crosses", "linear.default"))
    assert main(["inspect", str(tmp_path / "none")]) == 2
