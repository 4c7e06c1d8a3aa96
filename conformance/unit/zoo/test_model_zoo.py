"""The zoo keeps its promises: named, seeded, offline, lazy; and its weights and losses hide no mistake."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import model_zoo
from model_zoo.__main__ import main
from model_zoo.definition import Entry
from model_zoo.losses import floating_leaves, loss
from model_zoo.packages import package
from model_zoo.sampling import call, dense, floats, integers, same
from model_zoo.values import leaves
from model_zoo.weights import randomise, settle_batch_norms

ROOT = Path(__file__).resolve().parents[3]
BATCH_NORM = nn.modules.batchnorm._BatchNorm
LIBRARIES = ("torchvision", "timm", "ultralytics", "rfdetr", "transformers")

EXPECTED = """
    nn/lstm_classifier nn/mlp10x64 nn/transformer_encoder
    rfdetr/nano
    timm/levit_128s timm/mobilevit_s timm/resnet50 timm/swin_tiny_patch4_window7_224 timm/vit_tiny_patch16_224
    timm/xcit_nano_12_p16_224
    torchvision/convnext_tiny torchvision/deeplabv3_resnet50 torchvision/densenet121 torchvision/googlenet
    torchvision/mobilenet_v3_large torchvision/mobilenet_v3_small torchvision/r3d_18 torchvision/raft_small
    torchvision/resnet18 torchvision/shufflenet_v2_x1_0 torchvision/swin_t torchvision/swin_v2_t torchvision/vgg11
    torchvision/vit_b_16
    transformers/bert_tiny transformers/gpt2_tiny transformers/llama_tiny transformers/t5_tiny
    ultralytics/rtdetr-l ultralytics/yolo11n ultralytics/yolov8n ultralytics/yolov8n-seg
""".split()

NAMES = model_zoo.names()
# The whole zoo is built and run by the conformance suite. Here: what is small, and of each library what builds quickly.
SAMPLE = """
    timm/test_convnext timm/test_efficientnet timm/test_nfnet timm/test_vit
    torchvision/googlenet torchvision/mobilenet_v3_small ultralytics/yolo11n
""".split()
# One of its outputs is a weight, which follows no row and no input: the suite trains it.
APART = {"toys/returns_a_weight"}
CHECKED = [
    *model_zoo.names("nn"),
    *(name for name in model_zoo.names("toys") if name not in APART),
    *(pytest.param(name, marks=pytest.mark.zoo) for name in (*SAMPLE, *model_zoo.names("transformers"))),
]


@cache
def original(name: str) -> nn.Module:
    try:
        return model_zoo.entry(name).build()
    except model_zoo.MissingPackageError as error:
        pytest.skip(str(error))


def built(name: str) -> nn.Module:
    return copy.deepcopy(original(name))


def run(name: str, model: nn.Module, batch: int, seed: int = 0) -> list[Tensor]:
    args, kwargs = model_zoo.entry(name).inputs(batch, seed)
    with torch.no_grad(), kept_generators():
        reseed(2)
        return list(floating_leaves(model(*args, **kwargs)))


def reseed(seed: int) -> None:
    for seeded in (torch.manual_seed, random.seed, np.random.seed):
        seeded(seed)


def train_step(name: str, model: nn.Module, batch: int) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(batch)
    with kept_generators():
        reseed(3)
        found = entry.loss(model(*args, **kwargs))
        found.backward()
    return found.detach(), [parameter.grad for parameter in model.parameters()], list(model.buffers())


def rng_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:])


@contextmanager
def kept_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def state_of(model: nn.Module) -> list[str]:
    """All but parameters and BatchNorm's statistics: other buffers and plain attributes, as text."""
    modules = [(name, m) for name, m in model.named_modules() if not isinstance(m, BATCH_NORM)]
    buffers = [f"{name}.{key}={value}" for name, m in modules for key, value in m._buffers.items()]
    inherited = vars(nn.Module()).keys()
    plain = [
        f"{name}.{key}={said(value)}" for name, m in modules for key, value in vars(m).items() if key not in inherited
    ]
    return buffers + plain


def said(value: object) -> str:
    return str(value.get_state().sum()) if isinstance(value, torch.Generator) else str(value)


def floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def doubles(model: nn.Module, inputs: Any) -> list[Tensor]:
    args, kwargs = copy.deepcopy(inputs)
    with torch.no_grad():
        return [leaf for leaf in floating_leaves(model(*args, **kwargs)) if leaf.numel()]


class DataReads(TorchDispatchMode):
    """Notes the ops by which Python reads values out of tensors, and those whose sizes depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        masks = func.overloadpacket is torch.ops.aten.index and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if tags & set(func.tags) and (masks or func.overloadpacket is not torch.ops.aten.index):
            self.found.add(func.name())
        return func(*args, **(kwargs or {}))


class PythonReads(TorchFunctionMode):
    """Notes the methods by which Python reads values without an op."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            self.found.add(func.__name__)
        return func(*args, **(kwargs or {}))


def is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


# The table


def test_names_are_sorted_unique_and_all_there() -> None:
    assert list(NAMES) == sorted(set(NAMES))
    assert set(EXPECTED) <= set(NAMES)
    assert len(NAMES) >= 120
    assert all(name.count("/") == 1 for name in NAMES)


@pytest.mark.zoo
def test_timm_s_models_are_of_many_architectures() -> None:
    registry = pytest.importorskip("timm.models")
    chosen = [name.partition("/")[2] for name in model_zoo.names("timm")]
    assert len({registry.model_entrypoint(name).__module__ for name in chosen}) >= 45
    assert sum(name.startswith("test_") for name in chosen) >= 10


def test_every_toy_says_what_it_isolates() -> None:
    for name in model_zoo.names("toys"):
        entry = model_zoo.entry(name)
        assert {"toy", "cheap"} <= entry.tags
        about = entry.make.__doc__  # type: ignore[attr-defined]
        assert about, name
        assert about.strip().endswith(".")


def test_names_can_be_chosen_by_family_and_tag() -> None:
    assert set(model_zoo.FAMILIES) == {"nn", "toys", *LIBRARIES}
    assert sorted(n for family in model_zoo.FAMILIES for n in model_zoo.names(family=family)) == list(NAMES)
    assert all(model_zoo.entry(name).family == "timm" for name in model_zoo.names("timm"))
    both = model_zoo.names("torchvision", tag="cheap")
    assert set(both) == set(model_zoo.names("torchvision")) & set(model_zoo.names(tag="cheap"))


def test_an_entry_has_its_name_and_cannot_be_changed() -> None:
    entry = model_zoo.entry("torchvision/resnet18")
    assert entry.name == "torchvision/resnet18"
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "another"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("torchvision/resnet19", "torchvision/resnet18"),
        ("resnet18", "torchvision/resnet18"),
        ("YOLOv8n", "ultralytics/yolov8n"),
    ],
)
def test_an_unknown_name_lists_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(KeyError, match="no model named") as caught:
        model_zoo.entry(asked)
    assert isinstance(caught.value, model_zoo.UnknownNameError)
    assert caught.value.nearest[0] == nearest
    assert str(caught.value).startswith(f"no model named {asked!r} in the zoo. Nearest: {nearest!r}, ")
    assert str(caught.value).endswith("`python -m model_zoo list` shows all.")


def test_a_name_like_no_other_says_so() -> None:
    with pytest.raises(KeyError, match=r"no model named '#' in the zoo\. Nothing is near it\."):
        model_zoo.entry("#")


def test_an_unknown_family_or_tag_is_an_error_and_not_an_empty_answer() -> None:
    with pytest.raises(model_zoo.UnknownNameError, match=r"no family named 'tim' in the zoo\. Nearest: 'timm'"):
        model_zoo.names(family="tim")
    with pytest.raises(model_zoo.UnknownNameError, match=r"no tag named 'cheep' in the zoo\. Nearest: 'cheap'"):
        model_zoo.names(tag="cheep")


@pytest.mark.parametrize(
    ("tags", "reason", "complaint"),
    [
        ({"classification"}, None, "exactly one of the tags"),
        ({"cheap", "heavy"}, None, "exactly one of the tags"),
        ({"cheap", "nondeterministic"}, None, "its reason go together"),
        ({"cheap"}, "atomics", "its reason go together"),
    ],
)
def test_an_entry_with_contradictory_tags_is_refused(tags: set[str], reason: str | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Entry("nn/x", frozenset(tags), nn.Identity, dense(1), reason)


# Libraries: imported late, missing politely, leaving nothing behind


def test_importing_the_zoo_imports_no_library() -> None:
    script = f"import model_zoo, sys; model_zoo.names(); print(sorted(set({LIBRARIES!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_a_missing_library_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(model_zoo.MissingPackageError, match=r"'timm', which is not installed") as caught:
        model_zoo.entry("timm/resnet50").build()
    assert isinstance(caught.value, ImportError)
    assert "pip install ariadne-runtime[zoo]" in str(caught.value)


def test_a_library_that_is_installed_but_broken_speaks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo_broken.py").write_text("import zoo_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'zoo_absent'"):
        package("zoo_broken")


def test_a_library_that_rearranges_torch_as_it_is_imported_does_not_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "import torch, warnings",
        "torch.set_float32_matmul_precision('high')",
        "torch.save = None",
        "warnings.warn('I am deprecated')",
    ]
    (tmp_path / "zoo_rude.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.get_float32_matmul_precision(), torch.save, torch.load
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package("zoo_rude")
    assert (torch.get_float32_matmul_precision(), torch.save, torch.load) == before


# Building


@pytest.mark.parametrize("name", CHECKED)
def test_building_twice_gives_the_same_state_and_touches_no_rng(name: str) -> None:
    first = original(name)
    with kept_generators():
        reseed(1234)  # so that a state which a build leaves behind, or starts from, is not by chance the one expected
        before = rng_states()
        second = model_zoo.entry(name).build()
        assert rng_states() == before
    expected, found = first.state_dict(), second.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert second.training


def test_another_seed_gives_other_weights() -> None:
    entry = model_zoo.entry("nn/mlp10x64")
    pairs = zip(entry.build(0).parameters(), entry.build(1).parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", CHECKED)
def test_no_parameter_is_constant_and_no_two_are_equal(name: str) -> None:
    parameters = list(original(name).parameters())
    assert not any(is_constant(parameter) for parameter in parameters if parameter.numel() > 1)
    fingerprints = {(tuple(parameter.shape), parameter.detach().double().sum().item()) for parameter in parameters}
    assert len(fingerprints) == len(parameters)


@pytest.mark.parametrize("name", CHECKED)
def test_batchnorm_statistics_have_moved_and_variances_are_positive(name: str) -> None:
    for norm in (m for m in original(name).modules() if isinstance(m, BATCH_NORM) and m.track_running_stats):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked == 1
        assert (norm.running_var > 0).all()
        assert not is_constant(norm.running_mean)
        assert not is_constant(norm.running_var)


def test_randomise_leaves_no_zero_one_or_clone() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.zeros_(layer[0].bias)
    model = nn.Sequential(layer, copy.deepcopy(layer))
    model.scale = nn.Parameter(torch.full((4,), 1e-6))
    model.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
    randomise(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert not any(is_constant(parameter) for parameter in trainable)
    pairs = zip(model[0].parameters(), model[1].parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(model.frozen, torch.arange(4.0))


def test_settling_fits_the_statistics_to_the_inputs_and_leaves_no_other_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=0.3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(x)

    model = Counting().eval()
    settle_batch_norms(model, (5 + 2 * torch.randn(1000, 3),), {})
    assert torch.allclose(model.norm.running_mean, torch.full((3,), 5.0), atol=1.5)
    assert torch.allclose(model.norm.running_var, torch.full((3,), 4.0), atol=2)
    assert (model.calls, model.norm.momentum, model.norm.training) == (0, 0.3, False)


# Inputs


@pytest.mark.parametrize("name", NAMES)
def test_inputs_have_the_batch_asked_for_and_are_what_the_tags_say(name: str) -> None:
    entry = model_zoo.entry(name)
    for batch in (1, 2, 3, 5):
        args, kwargs = entry.inputs(batch)
        given = [leaf for _, leaf in leaves((args, kwargs))]
        tensors, others = tensors_of(given), [leaf for leaf in given if not isinstance(leaf, Tensor)]
        if "list-input" in entry.tags:
            assert all(isinstance(value, list) and len(value) == batch for value in args)
        else:
            assert tensors
            assert all(tensor.shape[0] == batch for tensor in tensors)
        assert ("kwargs" in entry.tags) == any(isinstance(value, Tensor | dict) for value in kwargs.values())
        assert ("none-input" in entry.tags) == (None in others)
        assert ("plain-input" in entry.tags) == any(value is not None for value in others)
        assert ("half" in entry.tags) == any(tensor.dtype == torch.bfloat16 for tensor in tensors)
        assert ("int-input" in entry.tags) == (not all(tensor.is_floating_point() for tensor in tensors))


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_a_function_of_the_seed(name: str) -> None:
    before = rng_states()
    first, again, other = (tensors_of(model_zoo.entry(name).inputs(2, seed)) for seed in (0, 0, 1))
    assert rng_states() == before
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.is_floating_point())


@pytest.mark.parametrize("name", model_zoo.names("transformers", "language"))
def test_every_row_of_tokens_is_padded(name: str) -> None:
    for batch in (1, 2, 3, 5):
        mask = model_zoo.entry(name).inputs(batch)[1]["attention_mask"]
        assert mask[:, 0].all()
        assert not mask[:, -1].any()


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="nn/mlp10x64: a batch has at least one row, not 0"):
        model_zoo.entry("nn/mlp10x64").inputs(0)


def test_draws_come_in_the_order_of_the_call_and_rows_differ() -> None:
    sampler = call(floats(3, 2), integers(2, 9, 4), late=floats(), flag=same(None))
    (image, numbers), kwargs = sampler(5, torch.Generator().manual_seed(0))
    assert (image.shape, numbers.shape, kwargs["late"].shape) == ((5, 3, 2), (5, 4), (5,))
    assert numbers.min() >= 2
    assert numbers.max() < 9
    assert list(kwargs) == ["late", "flag"]
    assert kwargs["flag"] is None
    assert not any(torch.equal(a, b) for a, b in pairwise(image))


# Running


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CHECKED)
def test_outputs_are_finite_and_depend_on_the_row_and_on_the_input(name: str, mode: str) -> None:
    for batch in (1, 2, 3, 5) if mode == "eval" else (2, 3):
        found, other = (run(name, built(name).train(mode == "train"), batch, seed) for seed in (0, 1))
        assert found
        for leaf in filter(Tensor.numel, found):
            assert torch.isfinite(leaf).all()
            assert leaf.numel() == 1 or not is_constant(leaf)
            if batch == 5 and 5 in leaf.shape:
                rows = leaf.movedim(leaf.shape.index(batch), 0)
                assert not any(torch.equal(a, b) for a, b in pairwise(rows))
        for a, b in zip(found, other, strict=True):
            assert a.numel() == 0 or not torch.equal(a, b)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CHECKED)
def test_a_step_is_finite_and_reaches_every_parameter(name: str, mode: str) -> None:
    model = built(name).train(mode == "train")
    found, gradients, _ = train_step(name, model, 2)
    assert torch.isfinite(found)
    trainable = [(p, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.requires_grad]
    assert all(gradient is None or torch.isfinite(gradient).all() for _, gradient in trainable)
    reached = [gradient is not None and bool(gradient.any()) for _, gradient in trainable]
    assert any(reached)
    if mode == "train":
        assert ("unused" in model_zoo.entry(name).tags) == (not all(reached))


@pytest.mark.parametrize("name", CHECKED)
def test_two_equal_runs_are_bitwise_equal_unless_the_entry_says_otherwise(name: str) -> None:
    if model_zoo.entry(name).nondeterministic:
        pytest.skip(f"{name}: {model_zoo.entry(name).nondeterministic}")
    one, two = built(name).eval(), built(name).eval()
    for a, b in zip(run(name, one, 3), run(name, two, 3), strict=True):
        assert torch.equal(a, b)
    one, two = one.train(), two.train()
    for a, b in zip(floating_leaves(train_step(name, one, 3)), floating_leaves(train_step(name, two, 3)), strict=True):
        assert torch.equal(a, b)


# The tags


@pytest.mark.parametrize("name", CHECKED)
def test_tags_about_parameters_and_state_tell_the_truth(name: str) -> None:
    model, tags = built(name).train(), model_zoo.entry(name).tags
    norms = [m for m in model.modules() if isinstance(m, BATCH_NORM) and m.track_running_stats]
    assert ("batchnorm" in tags) == bool(norms)
    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    assert ("tied" in tags) == tied
    if model_zoo.entry(name).family == "toys":  # YOLO freezes a table, and some libraries count their calls
        assert ("frozen" in tags) == any(not parameter.requires_grad for parameter in model.parameters())
        before = state_of(model)
        run(name, model, 2)
        assert ("state" in tags) == (state_of(model) != before)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CHECKED)
def test_tags_about_draws_tell_the_truth(name: str, mode: str) -> None:
    tag = "draws" if mode == "train" else "draws-in-eval"
    model = built(name).train(mode == "train")
    args, kwargs = model_zoo.entry(name).inputs(2)
    with kept_generators(), torch.no_grad():
        before = rng_states()
        model(*args, **kwargs)
        assert (tag in model_zoo.entry(name).tags) == (rng_states() != before)


@pytest.mark.parametrize("name", CHECKED)
def test_tags_about_inputs_and_outputs_tell_the_truth(name: str) -> None:
    entry, model = model_zoo.entry(name), built(name).eval()
    (args, kwargs), fresh = entry.inputs(3), tensors_of(entry.inputs(3))
    with torch.no_grad():
        output = model(*args, **kwargs)
    written = not all(torch.equal(a, b) for a, b in zip(tensors_of((args, kwargs)), fresh, strict=True))
    assert ("writes-input" in entry.tags) == written
    args, kwargs = entry.inputs(3)
    for t in tensors_of((args, kwargs)):
        t.requires_grad_(t.is_floating_point())
    with contextlib.nullcontext() if "no-input-gradients" not in entry.tags else pytest.raises(RuntimeError):
        if not written:
            built(name).train()(*args, **kwargs)
    assert ("int-output" in entry.tags) == any(not t.is_floating_point() for t in tensors_of(output))


@pytest.mark.parametrize("name", CHECKED)
def test_tags_about_control_tell_the_truth(name: str) -> None:
    tags, read = model_zoo.entry(name).tags, set()
    for mode in ("eval", "train"):
        with DataReads() as ops, PythonReads() as methods:
            run(name, built(name).train(mode == "train"), 3)
        read |= ops.found | methods.found
    assert ("data-dependent" in tags) == bool(read), read
    with torch.enable_grad():
        args, kwargs = model_zoo.entry(name).inputs(3)
        recorded = [leaf.detach() for leaf in floating_leaves(built(name).eval()(*args, **kwargs))]
    if any(not torch.equal(a, b) for a, b in zip(run(name, built(name).eval(), 3), recorded, strict=True)):
        assert {"grad-mode", "draws-in-eval"} & tags  # not the other way round: on another CPU the bits may agree


@pytest.mark.parametrize("name", CHECKED)
def test_rows_are_mixed_only_where_the_tags_say_so(name: str) -> None:
    entry, model = model_zoo.entry(name), built(name).eval().double()
    inputs = tree_map(lambda leaf: leaf.double() if floating(leaf) else leaf, entry.inputs(3))
    if "no-double" in entry.tags:
        with pytest.raises(RuntimeError, match=r"Double|double"):
            doubles(model, inputs)
        return
    whole = doubles(model, inputs)
    mixed = False
    for row in range(3):
        one = tree_map(lambda leaf, row=row: leaf[row : row + 1] if isinstance(leaf, Tensor) else leaf, inputs)
        for a, b in zip(whole, doubles(model, one), strict=True):
            batched = [d for d in range(a.ndim) if a.ndim == b.ndim and (a.shape[d], b.shape[d]) == (3, 1)]
            mixed |= not batched or not torch.allclose(
                a.select(batched[0], row), b.select(batched[0], 0), rtol=1e-9, atol=1e-12
            )
    assert ("rows-mixed" in entry.tags) == mixed


# The loss


@dataclasses.dataclass
class Answer:
    boxes: Tensor
    count: int


def nested() -> tuple[Any, list[Tensor]]:
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(5)]
    output = {
        "a": (leaves[0], [leaves[1], None, 3, "words", True, 0.5]),
        "b": Answer(leaves[2], 4),
        "c": OrderedDict(x=leaves[3], indices=torch.arange(3)),
        "d": leaves[4],
    }
    return output, leaves


def test_the_loss_reaches_every_floating_tensor_with_a_weight_of_its_own() -> None:
    output, leaves = nested()
    assert [id(leaf) for leaf in floating_leaves(output)] == [id(leaf) for leaf in leaves]
    loss(output).backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None and gradient.all() for gradient in gradients)
    assert len({tuple(gradient.flatten().tolist()) for gradient in gradients if gradient is not None}) == len(leaves)


def test_the_loss_sees_swapped_leaves_and_swapped_rows() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    assert loss((a, b)) != loss((b, a))
    assert loss(a) != loss(a.flip(0))


def test_the_loss_goes_through_a_batchnorm_at_the_end() -> None:
    x = torch.randn(8, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(nn.BatchNorm1d(3)(x).mean(), x)
    assert gradient.abs().max() < 1e-6, "a plain mean would do, and the loss could be simpler"
    (gradient,) = torch.autograd.grad(loss(nn.BatchNorm1d(3)(x)), x)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_taken_in_float32_at_least(dtype: torch.dtype) -> None:
    found = loss((torch.ones(3, dtype=dtype), torch.ones(2, dtype=torch.float16)))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_loss_refuses_what_it_cannot_look_into() -> None:
    with pytest.raises(TypeError, match="cannot look for tensors in a object"):
        loss((torch.ones(1), object()))
    assert loss((torch.ones(1), torch.ones(0, 2))) == loss(torch.ones(1)), "the mean of nothing is nan"
    with pytest.raises(ValueError, match=r"the output \(dict\) holds no floating tensor"):
        loss({"indices": torch.arange(3), "none": None})


# The command line


def test_list_shows_names_and_tags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--family", "nn", "--tag", "draws"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["nn/lstm_classifier", "cheap", "classification", "draws", "grad-mode"],
        ["nn/transformer_encoder", "cheap", "draws", "features", "grad-mode"],
    ]


def test_show_describes_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "nn/lstm_classifier"]) == 0
    shown = capsys.readouterr().out
    assert "parameters  15,178 in 10 tensors" in shown
    assert "args[0]            float32 (2, 12, 16)" in shown
    assert "lstm               LSTM" in shown


def test_show_describes_nested_inputs_and_what_a_toy_isolates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "toys/kwargs_nested"]) == 0
    shown = capsys.readouterr().out
    assert "isolates    Keyword inputs, one of them a dict" in shown
    assert "  context['pair'][1][0] float32 (2, 8)" in shown
    assert "  context['mask']       None" in shown
    assert "  context['scale']      0.5" in shown


@pytest.mark.zoo
def test_show_describes_lists_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    assert main(["show", "torchvision/ssdlite320_mobilenet_v3_large"]) == 0
    shown = capsys.readouterr().out
    assert "  args[0][1]           float32 (3, 128, 128)" in shown
    assert "  args[1][1]['labels'] int64 (2,)" in shown


def test_leaves_are_named_by_the_path_to_them() -> None:
    found = dict(leaves({"a": (1, [None]), "b": Answer(torch.ones(1), 2), "c": [], 3: b"x"}, "given"))
    assert list(found) == ["given['a'][0]", "given['a'][1][0]", "given['b'].boxes", "given['b'].count", "given[3]"]
    with pytest.raises(TypeError, match="cannot look for tensors in a set"):
        list(leaves([{1}]))


@pytest.mark.parametrize("arguments", [["show", "nn/mlp10x65"], ["list", "--tag", "cheep"], ["list", "--family", "m"]])
def test_an_unknown_name_on_the_command_line_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("model_zoo: no ")
    assert "Traceback" not in captured.err


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "model_zoo", "list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(NAMES)
    assert done.stderr == ""
