"""The zoo keeps its promises: named, seeded, offline, lazy; and its weights and losses hide no mistake."""

from __future__ import annotations

import copy
import dataclasses
import random
import subprocess
import sys
import warnings
from collections import OrderedDict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import model_zoo
from model_zoo.__main__ import main
from model_zoo.definition import Entry
from model_zoo.losses import floating_leaves, loss
from model_zoo.packages import package
from model_zoo.sampling import dense
from model_zoo.weights import randomise, settle_batch_norms

ROOT = Path(__file__).resolve().parent.parent
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
CHEAP = [
    pytest.param(name, marks=() if name.startswith("nn/") else pytest.mark.zoo) for name in model_zoo.names(tag="cheap")
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
    with torch.no_grad():
        return list(floating_leaves(model(*args, **kwargs)))


def train_step(name: str, model: nn.Module, batch: int) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    entry = model_zoo.entry(name)
    args, kwargs = entry.inputs(batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = entry.loss(model.train()(*args, **kwargs))
        found.backward()
    return found.detach(), [parameter.grad for parameter in model.parameters()], list(model.buffers())


def rng_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:])


def is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


# The table


def test_names_are_sorted_unique_and_all_there() -> None:
    assert list(NAMES) == sorted(set(NAMES))
    assert set(EXPECTED) <= set(NAMES)


def test_names_can_be_chosen_by_family_and_tag() -> None:
    assert set(model_zoo.FAMILIES) == {"nn", *LIBRARIES}
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


@pytest.mark.parametrize("name", CHEAP)
def test_building_twice_gives_the_same_state_and_touches_no_rng(name: str) -> None:
    first = original(name)
    with torch.random.fork_rng(devices=[]):
        for reseed in (torch.manual_seed, random.seed, np.random.seed):
            reseed(
                1234
            )  # so that a state which a build leaves behind, or starts from, is not by chance the one expected
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


@pytest.mark.parametrize("name", CHEAP)
def test_no_parameter_is_constant_and_no_two_are_equal(name: str) -> None:
    parameters = list(original(name).parameters())
    assert not any(is_constant(parameter) for parameter in parameters if parameter.numel() > 1)
    fingerprints = {(tuple(parameter.shape), parameter.detach().double().sum().item()) for parameter in parameters}
    assert len(fingerprints) == len(parameters)


@pytest.mark.parametrize("name", CHEAP)
def test_batchnorm_statistics_have_moved_and_variances_are_positive(name: str) -> None:
    for norm in (m for m in original(name).modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
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


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_inputs_have_the_batch_asked_for(name: str, batch: int) -> None:
    args, kwargs = model_zoo.entry(name).inputs(batch)
    values = [*args, *kwargs.values()]
    assert values
    assert all(isinstance(value, Tensor) and value.shape[0] == batch for value in values)
    assert bool(kwargs) == ("kwargs" in model_zoo.entry(name).tags)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_a_function_of_the_seed(name: str) -> None:
    before = rng_states()
    first, again, other = (model_zoo.entry(name).inputs(2, seed) for seed in (0, 0, 1))
    assert rng_states() == before

    def flat(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
        return [*inputs[0], *inputs[1].values()]

    assert all(torch.equal(a, b) for a, b in zip(flat(first), flat(again), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(flat(first), flat(other), strict=True) if a.is_floating_point())


@pytest.mark.parametrize("name", model_zoo.names("transformers"))
def test_every_row_of_tokens_is_padded(name: str) -> None:
    for batch in (1, 2, 3, 5):
        mask = model_zoo.entry(name).inputs(batch)[1]["attention_mask"]
        assert mask[:, 0].all()
        assert not mask[:, -1].any()


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="nn/mlp10x64: a batch has at least one row, not 0"):
        model_zoo.entry("nn/mlp10x64").inputs(0)


# Running


@pytest.mark.parametrize("name", CHEAP)
def test_eval_outputs_are_finite_and_depend_on_the_row(name: str) -> None:
    model = built(name).eval()
    for batch in (1, 2, 3, 5):
        for leaf in run(name, model, batch):
            assert torch.isfinite(leaf).all()
            assert not is_constant(leaf)
            if batch == 5:
                rows = leaf.movedim(leaf.shape.index(batch), 0)
                assert not any(torch.equal(a, b) for a, b in pairwise(rows))


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", CHEAP)
def test_a_training_step_is_finite_and_reaches_every_parameter(name: str, batch: int) -> None:
    model = built(name)
    found, gradients, _ = train_step(name, model, batch)
    assert torch.isfinite(found)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if parameter.requires_grad:
            assert gradient is not None
            assert torch.isfinite(gradient).all()
            assert gradient.any()


@pytest.mark.parametrize("name", CHEAP)
def test_two_equal_runs_are_bitwise_equal_unless_the_entry_says_otherwise(name: str) -> None:
    if model_zoo.entry(name).nondeterministic:
        pytest.skip(f"{name}: {model_zoo.entry(name).nondeterministic}")
    one, two = built(name), built(name)
    for a, b in zip(run(name, one.eval(), 3), run(name, two.eval(), 3), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(floating_leaves(train_step(name, one, 3)), floating_leaves(train_step(name, two, 3)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CHEAP)
def test_tags_tell_the_truth(name: str) -> None:
    model, tags = built(name).train(), model_zoo.entry(name).tags
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert ("batchnorm" in tags) == bool(norms)
    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    assert ("tied" in tags) == tied
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        run(name, model, 2)
        assert ("draws" in tags) == (not torch.equal(torch.get_rng_state(), before))


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
