"""What a half must not do in silence: go to another dtype, mode, or set of weights than its model would."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ariadne
from ariadne.errors import AriadneError, FrontierError, HalfError, ModuleError, SpecError, TrainingError
from ariadne.halves.given import replace


class Base(nn.Module):
    """Two layers and what a test puts between them."""

    between: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.plain, self.listed = torch.arange(4.0) / 3, [torch.arange(4.0) / 3]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def made(between: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    found: nn.Module = type("Made", (Base,), {"between": between})().eval()
    return found


def files(folder: Path, model: nn.Module, x: Tensor, split: str = "50%") -> Any:
    runtime = ariadne.prepare_split(model, (x,), split=split)
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return runtime


def halves(folder: Path, **options: Any) -> list[Any]:
    return [ariadne.load(folder / side, **options) for side in ("prefix", "suffix")]


def sent(boundary: Any) -> Any:
    return ariadne.BoundaryPayload.from_bytes(boundary.to_bytes())


ASKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "element_size": lambda s, h: h * h.element_size(),
    "itemsize": lambda s, h: h * h.itemsize,
    "nbytes": lambda s, h: h * (h.nbytes // h.numel()),
    "type": lambda s, h: h * (2 if h.type() == "torch.FloatTensor" else 3),
    "typename": lambda s, h: h * (2 if torch.typename(h) == "torch.FloatTensor" else 3),
    "isinstance": lambda s, h: h * (2 if isinstance(h, torch.FloatTensor) else 3),
    "repr": lambda s, h: h * (2 if "dtype" in repr(h[:0]) else 3),
    "storage's dtype": lambda s, h: h * (2 if h.storage().dtype is torch.float32 else 3),
    "storage_type": lambda s, h: h * (2 if "Float" in h.storage_type().__name__ else 3),
    "finfo": lambda s, h: h + torch.finfo(h.dtype).eps,
    "numpy": lambda s, h: h * h.detach()[:0].numpy().dtype.itemsize,
    "new_tensor": lambda s, h: h + h.new_tensor([1 / 3, 2, 3, 4]),
    "new": lambda s, h: h + h.new([1 / 3, 2, 3, 4]),
    "a constant": lambda s, h: h * torch.tensor([1 / 3, 2, 3, 4]),
    "plain": lambda s, h: h * s.plain.sin(),
    "in a list": lambda s, h: h * s.listed[0].sin(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("asks", ASKS)
def test_a_half_whose_model_may_run_otherwise_in_a_dtype_does_not_go_there(
    tmp_path: Path, asks: str, dtype: torch.dtype
) -> None:
    files(tmp_path, made(ASKS[asks]), torch.randn(2, 4), "after:a")
    with pytest.raises(HalfError, match=r"this half can't go from torch\.float32 to"):
        halves(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_half_that_goes_to_a_dtype_gives_what_the_moved_model_gives(tmp_path: Path, dtype: torch.dtype) -> None:
    model, x = made(lambda s, h: h.masked_fill(h > 0, 0.1).softmax(-1) + h.new_full((4,), 1 / 3)), torch.randn(3, 4)
    files(tmp_path, model, x)
    prefix, suffix = halves(tmp_path, dtype=dtype)
    expected = copy.deepcopy(model).to(dtype)(x.to(dtype))
    assert torch.equal(suffix.run_suffix(sent(prefix.run_prefix(x.to(dtype)))), expected)


def test_plain_attributes_stay_where_the_model_leaves_them(tmp_path: Path) -> None:
    files(tmp_path, made(lambda s, h: h * s.plain + s.listed[0]), torch.randn(2, 4), "after:a")
    _, suffix = halves(tmp_path)
    suffix.get_submodule("b").double()
    assert suffix.get_submodule("b").get_parameter("weight").dtype is torch.float64
    kept = dict(suffix.named_buffers())
    assert sorted(kept) == ["listed_0", "plain"]
    suffix._root._apply(lambda t: t.double())
    assert all(t.dtype is torch.float32 for t in suffix.buffers())
    copied = copy.deepcopy(suffix)
    copied._root._apply(lambda t: t.bfloat16())
    assert all(t.dtype is torch.float32 for t in copied.buffers())


def test_a_half_that_was_moved_is_saved_as_it_is(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    files(tmp_path, made(lambda s, h: h.relu()), x)
    prefix, suffix = (half.to(torch.float64) for half in halves(tmp_path))
    assert prefix.digest == suffix.digest != ariadne.load(tmp_path / "prefix").digest
    prefix.save(tmp_path / "again")
    again = ariadne.load(tmp_path / "again")
    assert again.run_prefix(x.double()).raw[0].dtype is torch.float64
    assert again.digest == prefix.digest


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: nn.BatchNorm1d(4),
    "dropout": nn.Dropout,
    "inside": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_training_flag_of_a_halfs_module_is_guarded(tmp_path: Path, layer: str) -> None:
    x = torch.randn(3, 4)
    files(tmp_path, nn.Sequential(nn.Linear(4, 4), LAYERS[layer](), nn.Linear(4, 4)).train(), x, "after:1")
    prefix, _ = halves(tmp_path)
    prefix.run_prefix(x)
    prefix.get_submodule("1").eval()
    with pytest.raises(ModuleError, match=r"'1(\.1)?' was captured in train mode and is now in eval mode"):
        prefix.run_prefix(x)
    prefix.train().run_prefix(x)


def test_a_module_that_was_frozen_in_eval_mode_stays_so_in_its_half(tmp_path: Path) -> None:
    x, model = (
        torch.randn(3, 4),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).train(),
    )
    model[1].eval()
    files(tmp_path, model, x, "after:1")
    prefix, suffix = halves(tmp_path)
    torch.manual_seed(1)
    found = suffix.run_suffix(sent(prefix.run_prefix(x)))
    torch.manual_seed(1)
    assert torch.equal(found, model(x))
    with pytest.raises(ModuleError, match="was captured in eval mode and is now in train mode"):
        prefix.train().run_prefix(x)


def three(folder: Path) -> Any:
    files(folder, nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).eval(), torch.randn(2, 4), "after:0")
    return ariadne.load(folder / "suffix")


def test_the_halfs_own_tensors_may_change_places(tmp_path: Path) -> None:
    half = three(tmp_path)
    names = ("1.weight", "2.weight", "3.weight")
    own, before = half.state_dict(), {n: t.clone() for n, t in half.state_dict().items()}
    half.replace_weights({**own, **dict(zip(names, (own[n] for n in (*names[1:], names[0])), strict=True))})
    for name, was in zip(names, (*names[1:], names[0]), strict=True):
        assert torch.equal(half.state_dict()[name], before[was])
    half.replace_weights({**own, "1.weight": own["1.weight"].t()})
    assert torch.equal(half.state_dict()["1.weight"], before["2.weight"].t())
    assert half.digest == ""


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda t: t.to("meta"), "is on the meta device and has no data"),
        (lambda t: t.to_sparse(), "is nested, quantized or of layout torch.sparse_coo"),
        (lambda t: FakeTensorMode().from_tensor(t), "is a FakeTensor"),
    ],
)
def test_weights_without_plain_data_replace_nothing(tmp_path: Path, spoilt: Any, says: str) -> None:
    half = three(tmp_path)
    before = {n: t.clone() for n, t in half.state_dict().items()}
    other = {n: t + 1 for n, t in before.items()}
    other["3.weight"] = spoilt(other["3.weight"])
    with pytest.raises(HalfError, match=f"nothing was replaced: '3.weight' {says}"):
        half.replace_weights(other)
    with pytest.raises(HalfError, match=f"nothing was replaced: '3.weight' {says}"):
        ariadne.load(tmp_path / "suffix", weights=other)
    assert all(torch.equal(before[n], t) for n, t in half.state_dict().items())


def test_views_of_one_memory_are_replaced_together_or_not_at_all() -> None:
    whole = torch.zeros(4, 4)
    mine = {"whole": whole, "row": whole[1], "wide": torch.zeros(4, 1).expand(4, 3)}
    new = torch.arange(16.0).view(4, 4)
    fits = {"whole": new, "row": new[1].clone(), "wide": torch.arange(4.0).view(4, 1).expand(4, 3).clone()}
    replace(mine, fits)
    assert all(torch.equal(mine[n], fits[n]) for n in mine)
    for name, wrong in (("row", torch.ones(4)), ("wide", torch.rand(4, 3))):
        with pytest.raises(HalfError, match="shares memory in the half, and is given with numbers that don't go"):
            replace(mine, {**{n: t + 1 for n, t in fits.items()}, name: wrong})
        assert all(torch.equal(mine[n], fits[n]) for n in mine)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("row", self.b.weight.detach()[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.row


@pytest.mark.parametrize("kept", [True, False])
def test_a_view_of_a_weight_is_one_when_weights_come_from_elsewhere(tmp_path: Path, kept: bool) -> None:
    model, x = Aliased().eval(), torch.randn(2, 4)
    runtime = ariadne.prepare_split(model, (x,), split="after:a")
    runtime.save(tmp_path / "s", side="suffix", weights=kept)
    half = ariadne.load(tmp_path / "s", weights=model.state_dict())
    assert torch.equal(half.run_suffix(sent(runtime.run_prefix(x))), model(x))
    with torch.no_grad():
        half.get_parameter("b.weight").add_(1)
    assert torch.equal(half.get_buffer("row"), half.get_parameter("b.weight")[1])


def test_a_parameter_that_shares_memory_over_the_cut_keeps_the_halves_together(tmp_path: Path) -> None:
    for tensors in (lambda m: m.register_buffer("v", m.a.weight.detach()[0]),
                    lambda m: m.__dict__.update(v=m.a.weight.detach()[0]),
                    lambda m: setattr(m, "v", nn.Parameter(m.a.weight.data[0]))):  # fmt: skip
        model = made(lambda s, h: h)
        type(model).forward = lambda s, x: s.b(s.a(x)) * s.v
        tensors(model)
        runtime = ariadne.prepare_split(model, (torch.randn(2, 4),), split="after:b")
        for side in ("prefix", "suffix"):
            with pytest.raises(FrontierError, match="shares memory with a tensor of shape"):
                runtime.save(tmp_path / side, side=side)


def test_hooks_on_gradients_and_computed_tensors_are_in_no_file(tmp_path: Path) -> None:
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        model = made(lambda s, h: h.relu())
        handle = getattr(model.a.weight, hook)(lambda g: None)
        runtime = ariadne.prepare_split(model, (torch.randn(2, 4),), split="after:a")
        with pytest.raises(HalfError, match=r"'a\.weight' has a hook on its gradient"):
            runtime.save(tmp_path / "p", side="prefix")
        handle.remove()
        runtime.save(tmp_path / "p", side="prefix")
    model = made(lambda s, h: h @ s.w)
    model.__dict__["w"] = model.b.weight * 2
    with pytest.raises(HalfError, match="'w' was computed from other tensors"):
        files(tmp_path, model, torch.randn(2, 4), "after:a")


def test_a_plain_attribute_that_requires_grad_trains_as_in_the_model(tmp_path: Path) -> None:
    model = made(lambda s, h: h * s.plain * s.listed[0]).train()
    model.plain.requires_grad_()
    model.listed[0].requires_grad_()
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    files(tmp_path, model, x, "after:a")
    prefix, suffix = halves(tmp_path)
    loss, _ = suffix.train_suffix(sent(prefix.run_training_prefix(x)), loss_fn=lambda y, _: y.pow(2).sum())
    expected = twin(x).pow(2).sum()
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(suffix.get_buffer("plain").grad, twin.plain.grad)
    assert torch.equal(suffix.get_buffer("listed_0").grad, twin.listed[0].grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def test_a_weight_that_both_halves_have_is_not_trained_apart_in_silence(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    files(tmp_path, Tied().train(), x, "after:a")
    prefix, suffix = halves(tmp_path)
    boundary = prefix.run_prefix(x)
    suffix.run_suffix(sent(boundary))
    says = r"'(a|b)\.weight' is one parameter for both halves of the model, and each half has a copy"
    with pytest.raises(TrainingError, match=says):
        prefix.run_training_prefix(x)
    prefix.adds_shares = True
    boundary = prefix.run_training_prefix(x)
    with pytest.raises(TrainingError, match=says):
        suffix.train_suffix(sent(boundary), loss_fn=lambda y, _: y.sum())
    for half in (prefix, suffix):
        half.adds_shares = False
        for p in half.shared_parameters():
            p.requires_grad_(False)
        assert copy.deepcopy(half).adds_shares is False
    files(tmp_path, Tied().train().requires_grad_(False), x, "after:a")
    halves(tmp_path)[0].run_training_prefix(x)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.name = nn.Linear(4, 4), nn.Linear(4, 4), name
        self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * getattr(self, self.name))


@pytest.mark.parametrize("name", ['a"b', "a'b", "a b", "a\\b", "lambda", "print"])
def test_a_name_is_kept_or_refused_when_it_is_saved(tmp_path: Path, name: str) -> None:
    model, x = Named(name).eval(), torch.randn(2, 4)
    files(tmp_path, model, x)
    prefix, suffix = halves(tmp_path)
    assert torch.equal(suffix.run_suffix(sent(prefix.run_prefix(x))), model(x))


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "a\tb"])
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, name: str) -> None:
    runtime = ariadne.prepare_split(Named(name).eval(), (torch.randn(2, 4),), split="cut:2")
    with pytest.raises(HalfError, match="can't be kept in a file"):
        runtime.save(tmp_path / "prefix", side="prefix")
    assert not (tmp_path / "prefix").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "nonsense"}, "is no device that this process can use"),
        ({"device": object()}, "is no device that this process can use"),
        ({"dtype": torch.int32}, "dtype is a dtype of floating or complex numbers"),
        ({"dtype": "float16"}, "dtype is a dtype of floating or complex numbers"),
    ],
)
def test_where_a_half_can_not_go_is_said_before_it_is_read(tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ariadne.load(tmp_path / "none", **options)


def test_other_raw_errors_are_said_in_words(tmp_path: Path) -> None:
    half = three(tmp_path)
    with pytest.raises(HalfError, match="isn't pickled: write it with half"):
        torch.save(half, io.BytesIO())
    with pytest.raises(HalfError, match="can't go to the meta device"):
        half.to("meta")
    for path, says in ((tmp_path / "none" / "p", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(SpecError, match=says):
            half.save(path)
    model = made(lambda s, h: torch.sparse.mm(s.eye, h.t()).t())
    model.register_buffer("eye", torch.eye(4).to_sparse())
    with pytest.raises(AriadneError, match="of layout torch"):
        files(tmp_path, model, torch.randn(2, 4), "after:a")
    model = made(lambda s, h: h)
    model.register_buffer("unused", torch.eye(4).to_sparse())
    files(tmp_path, model, torch.randn(2, 4), "after:a")
    assert halves(tmp_path)[0].digest == ""


def test_a_half_that_is_loaded_in_inference_mode_trains_outside(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    files(tmp_path, made(lambda s, h: h.relu()), x)
    with torch.inference_mode():
        prefix = ariadne.load(tmp_path / "prefix")
        again = ariadne.load(tmp_path / "prefix", weights=prefix.state_dict())
    for half in (prefix, again):
        boundary = half.run_training_prefix(x)
        half.backward_prefix(boundary, {label: torch.ones_like(t) for label, t in boundary.tensors.items()})
        assert all(p.grad is not None for p in half.parameters())
        half.replace_weights(half.state_dict())


def test_only_plans_that_hold_for_the_model_are_in_the_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    runtime = ariadne.prepare_split(model, (torch.randn(2, 4),), split="50%")
    model.train()
    with pytest.raises(ModuleError, match="was captured in eval mode"):
        runtime.save(tmp_path / "p", side="prefix")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_half_with_observers_that_are_resized_when_they_first_run(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    model = torch.ao.quantization.prepare_qat(model).eval()
    whole = copy.deepcopy(model)
    runtime = ariadne.prepare_split(model, (torch.randn(4, 6),), split=ariadne.SplitSpec("50%", dynamic_batch=(1, 8)))
    paths = {side: str(tmp_path / f"{side}.safetensors") for side in ("prefix", "suffix")}
    for side, path in paths.items():
        runtime.save(path, side=side)
    edge, server = (ariadne.load(path) for path in paths.values())
    for batch in (3, 4):
        x = torch.randn(batch, 6)
        with torch.no_grad():
            assert torch.equal(server.run_suffix(edge.run_prefix(x)), whole(x))


def test_a_split_that_is_pickled_says_how_it_is_saved() -> None:
    runtime = ariadne.prepare_split(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), (torch.ones(2, 4),), split="50%"
    )
    with pytest.raises(HalfError, match=r"isn't pickled: write each side with runtime\.save"):
        torch.save(runtime, io.BytesIO())


class Scaled(nn.Module):
    """A tensor in a plain attribute, which trains and which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x) * self.scale))


def test_a_half_with_a_plain_attribute_is_saved_again_and_not_without_weights(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    runtime = ariadne.prepare_split(Scaled().eval(), (x,), split="50%")
    runtime.save(tmp_path / "prefix", side="prefix")
    half = ariadne.load(tmp_path / "prefix")
    half.save(tmp_path / "again")
    again = ariadne.load(tmp_path / "again")
    assert dict(again.named_buffers())["scale"].requires_grad
    assert torch.equal(again.run_prefix(x).raw[0], half.run_prefix(x).raw[0])
    with pytest.raises(HalfError, match=r"'scale' is in no state dict of the model, .* save it with its weights"):
        runtime.save(tmp_path / "bare", side="prefix", weights=False)
    assert not (tmp_path / "bare").exists()


def test_a_class_whose_name_no_file_may_hold_is_refused_at_save(tmp_path: Path) -> None:
    named = type("My\nNet", (Scaled,), {})
    runtime = ariadne.prepare_split(named().eval(), (torch.randn(3, 4),), split="50%")
    with pytest.raises(HalfError, match=r"can't be kept in a file: the model's class is 'My\\nNet'. Rename it"):
        runtime.save(tmp_path / "prefix", side="prefix")


@pytest.mark.parametrize("cut", ["after:1", "after:2"])
def test_a_half_without_weights_goes_to_another_dtype_with_the_other_one(cut: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(4, 8), nn.Softmax(-1)).eval()
    runtime = ariadne.prepare_split(model, (torch.randn(3, 4),), split=cut)
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
    prefix, suffix = (ariadne.load(tmp_path / side).double() for side in ("prefix", "suffix"))
    x = torch.randn(3, 4).double()
    with torch.no_grad():
        assert torch.equal(suffix.run_suffix(prefix.run_prefix(x)), model.double()(x))
    assert prefix.digest == suffix.digest != ""


@pytest.mark.parametrize("cut", ["after:0", "after:1"])
def test_pruned_layers_go_in_files(cut: str, tmp_path: Path) -> None:
    """Pruning leaves each weight on its layer, whose tensors may be in the other half."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    x = torch.randn(3, 4)
    runtime = ariadne.prepare_split(model, (x,), split=cut)
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
    prefix, suffix = (ariadne.load(tmp_path / side) for side in ("prefix", "suffix"))
    with torch.no_grad():
        assert torch.equal(suffix.run_suffix(prefix.run_prefix(x)), model(x))


def test_halves_of_spectral_norm_in_training_mode_write_their_buffers_by_out(tmp_path: Path) -> None:
    norm = nn.utils.parametrizations.spectral_norm
    model, x = nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), norm(nn.Linear(6, 2))), torch.randn(3, 4)
    runtime = ariadne.prepare_split(model, (x,), split="after:1")
    halves = []
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
        halves.append(ariadne.load(tmp_path / side))
    for _ in range(2):
        assert torch.equal(halves[1].run_suffix(halves[0].run_prefix(x)), model(x))


class Grouped(Scaled):
    def forward(self, x: torch.Tensor) -> Any:
        found: dict[str, list[torch.Tensor]] = defaultdict(list)
        found["y"].append(super().forward(x))
        return found


def test_an_output_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    runtime = ariadne.prepare_split(Grouped().eval(), (torch.randn(3, 4),), split="50%")
    with pytest.raises(HalfError, match=r"^in forward's output, a defaultdict can't be kept in a file: .*'list'"):
        runtime.save(tmp_path / "suffix", side="suffix")
