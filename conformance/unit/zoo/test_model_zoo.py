"""The zoo keeps its promises: seeded, offline, and its weights hide no mistake."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import model_zoo
from model_zoo.losses import floating_leaves
from model_zoo.sampling import call, floats, integers, same
from model_zoo.values import leaves
from model_zoo.weights import randomise, settle_batch_norms

NAMES = model_zoo.names()
BATCH_NORM = nn.modules.batchnorm._BatchNorm
# The whole zoo is built and run by the conformance suite. Here: what is small, and of each library what builds quickly. CI has time
# for two of those.
IN_CI = ("timm/test_vit", "transformers/bert_tiny")
SAMPLE = """
    timm/test_convnext timm/test_efficientnet timm/test_nfnet timm/test_vit
    torchvision/googlenet torchvision/mobilenet_v3_small ultralytics/yolo11n
""".split()
# One of its outputs is a weight, which follows no row and no input: the suite trains it.
APART = {"toys/returns_a_weight"}
CHECKED = [
    *model_zoo.names("nn"),
    *(name for name in model_zoo.names("toys") if name not in APART),
    *(
        pytest.param(name, marks=[pytest.mark.zoo, *([] if name in IN_CI else [pytest.mark.variants])])
        for name in (*SAMPLE, *model_zoo.names("transformers"))
    ),
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
    gradients = [p.grad if p.grad is None else p.grad.to_dense() for p in model.parameters()]
    return found.detach(), gradients, list(model.buffers())


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
    for key, value in expected.items():  # packed weights are no tensor
        assert torch.equal(found[key], value) if isinstance(value, Tensor) else str(found[key]) == str(value)
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
            dims = [*entry.batch_dim.values()] if entry.batch_dim else [0] * len(tensors)
            assert all(t.shape[d] == batch for t, d in zip(tensors, dims, strict=True) if d is not None)
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
        model = built(name).train(mode == "train")  # which reads weights, if no test before has built it
        with DataReads() as ops, PythonReads() as methods:
            run(name, model, 3)
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
        if entry.batch_dim:
            dims = zip(inputs[0], entry.batch_dim.values(), strict=True)
            one = tuple(t if d is None else t.narrow(d, row, 1) for t, d in dims), {}
        else:
            one = tree_map(lambda leaf, row=row: leaf[row : row + 1] if isinstance(leaf, Tensor) else leaf, inputs)
        for a, b in zip(whole, doubles(model, one), strict=True):
            batched = [d for d in range(a.ndim) if a.ndim == b.ndim and (a.shape[d], b.shape[d]) == (3, 1)]
            mixed |= not batched or not torch.allclose(
                a.select(batched[0], row), b.select(batched[0], 0), rtol=1e-9, atol=1e-12
            )
    assert ("rows-mixed" in entry.tags) == mixed
