"""The zoo's table and its commands: names, tags, libraries that come late."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import model_zoo
from model_zoo.__main__ import main
from model_zoo.definition import Entry
from model_zoo.packages import package
from model_zoo.sampling import dense
from model_zoo.values import leaves

ROOT = Path(__file__).resolve().parents[3]
NAMES = model_zoo.names()
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


@dataclasses.dataclass
class Answer:
    boxes: Tensor
    count: int


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
