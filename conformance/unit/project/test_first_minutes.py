"""What a new user runs into in the first minutes is named, with the way out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split
from ariadne.cli import main
from ariadne.cli.inputs import Word, parse
from ariadne.cli.output import UsageError
from ariadne.errors import SpecError, UnsupportedError

X = torch.randn(2, 4)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        h = self.a(hidden["image"] if isinstance(hidden, dict) else hidden)
        return self.b(h if attention_mask is None else h * attention_mask + kwargs.get("bias", 0))


class Wrapper(nn.Module):
    """As ultralytics' YOLO: a module that holds the network, and whose `train` is a training run."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Named()

    def train(self, trainer: Any = None, **kwargs: Any) -> Any:
        raise AssertionError("a training run was started")


class Cache:
    """As transformers' DynamicCache."""


class Caches(Named):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), Cache()


def test_inputs_have_the_names_that_forward_gives_them() -> None:
    mask, bias = torch.ones(2, 4), torch.zeros(2, 4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], list[str]]] = [
        ((X, mask), {}, ["hidden", "attention_mask"]),
        ((), {"hidden": X, "attention_mask": mask}, ["hidden", "attention_mask"]),
        (({"image": X},), {"attention_mask": mask, "bias": bias}, ["hidden_image", "attention_mask", "bias"]),
    ]
    for args, kwargs, names in calls:
        runtime = prepare_split(Named(), args, split="50%", example_kwargs=kwargs)
        assert [name for _, name in runtime.plan.inputs] == names
        assert f"def forward({names[0]}: f32[B, 4]" in str(runtime.plan)


class HandingOn(torch.nn.Module):
    """Takes whatever the model within takes."""

    def __init__(self) -> None:
        super().__init__()
        self.within = Named()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("remark", None)
        found: torch.Tensor = self.within(*args, **kwargs)
        return found


def test_a_model_that_hands_on_what_it_is_given_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    prepare_split(HandingOn(), (X,), split="50%", example_kwargs={"remark": torch.ones(2, 4)})
    assert not [w for w in recwarn if "misspelt" in str(w.message)]


def test_an_input_that_only_kwargs_take_and_no_op_reads_is_named() -> None:
    with pytest.warns(UserWarning, match=r"takes 'attn_mask' by its \*\*kwargs, and no op reads it.*attention_mask"):
        prepare_split(Named(), (X,), split="50%", example_kwargs={"attn_mask": torch.ones(2, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_split(Named(), (X, torch.ones(2, 4)), split="50%", example_kwargs={"bias": torch.zeros(2, 4)})


def test_a_compiled_model_is_named_with_what_to_pass_in_its_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for fallback in ("refuse", "python"):
        with pytest.raises(
            SpecError, match=r"a compiled model was given.*pass the model inside of it, model\._orig_mod"
        ):
            prepare_split(torch.compile(model), (X,), split="50%", fallback=fallback)


@pytest.mark.compiler
@pytest.mark.parametrize("how", ["in place", "a part"])
def test_a_compiled_part_is_named_with_the_way_out(how: str) -> None:
    inner: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if how == "in place":
        inner.compile(backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), inner if how == "in place" else torch.compile(inner, backend="eager"))
    with pytest.raises(UnsupportedError, match=r"'1' (was compiled in place|is what torch.compile made)"):
        prepare_split(model, (X,), split="50%")


@pytest.mark.compiler
@pytest.mark.parametrize("how", ["disabled", "told to run eagerly"])
def test_a_compiled_part_that_runs_eagerly_is_named_too(how: str) -> None:
    inner: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    part: Any = torch.compiler.disable(inner) if how == "disabled" else torch.compile(inner, backend="eager")
    with torch.compiler.set_stance("default" if how == "disabled" else "force_eager"):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"'1' is what torch\.compile made of a module, or"):
                prepare_split(nn.Sequential(nn.Linear(4, 4), part), (X,), split="50%")


def test_a_wrapper_whose_train_is_a_training_run_is_refused_before_anything_of_it_is_called(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"this is a wrapper. Pass the network inside of it, \.network"):
        prepare_split(Wrapper(), (X,), split="50%")
    (tmp_path / "wrapped.py").write_text(
        "from conformance.unit.project.test_first_minutes import Wrapper\n\n\ndef make():\n    return Wrapper()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["cuts", "wrapped.py:make", "--input", "4"]) == 2
    assert "Pass the network inside of it" in capsys.readouterr().err


def test_a_cache_in_the_output_is_refused_with_the_switch_that_leaves_it_out() -> None:
    with pytest.raises(UnsupportedError, match="pass use_cache=False"):
        prepare_split(Caches(), (X,), split="50%")


FILE = """
import torch
from torch import nn
from conformance.unit.project.test_first_minutes import Cache, Named


class Model(Named):
    def forward(self, hidden, use_cache=True):
        out = super().forward(hidden)
        return (out, Cache()) if use_cache else out


class Tolerant(Named):
    def forward(self, hidden=None, **kwargs):
        return super().forward(hidden)


def broken():
    raise ValueError("no weights here")


def narrow():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 8))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def test_a_command_passes_the_switch_on(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", f"{file}:Model", "--input", "4"]) == 3
    assert "to a command, --input use_cache=False" in capsys.readouterr().err
    assert main(["cuts", f"{file}:Model", "--input", "4", "--input", "use_cache=False"]) == 0
    assert parse("flag=True") == Word("flag", True)
    assert parse("mask=None") == Word("mask", None)
    with pytest.raises(UsageError, match="mask=16:bool or use_cache=False"):
        parse("use_cache=no")


def test_what_a_factory_raises_is_told_and_nothing_else(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", f"{file}:broken", "--input", "4"]) == 3
    assert capsys.readouterr().err == "ariadne: mine.py:broken() failed: ValueError: no weights here\n"


def test_a_misspelt_input_is_named(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", f"{file}:Tolerant", "--input", "hiden=4"]) == 3
    assert "forward has no parameter 'hiden', nearest: 'hidden'; " in capsys.readouterr().err


def test_the_cuts_stand_beside_input_and_output(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", f"{file}:narrow", "--input", "4"]) == 0
    words = "The input is 16 B per sample, the output 32 B: 1 of the safe cuts sends less than the input."
    assert words in capsys.readouterr().out
