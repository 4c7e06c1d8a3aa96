"""The model that is meant: `package.module:factory`, `path/to/file.py:factory`, or a name of `model_zoo`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from ariadne import tree
from ariadne.capture import Captured, Example, batch_dims, called
from ariadne.check import Given, Inputs, Loss, seed_all, varied
from ariadne.cli import inputs
from ariadne.cli.options import FORM, FORMS, along, sizes
from ariadne.cli.output import ModelError, UsageError, progress
from ariadne.cut import SplitSpec
from ariadne.errors import AriadneError, nearest
from ariadne.plan import short_dtype
from ariadne.prepare import captured, prepare_split, refuse_wrapper
from ariadne.runtime import SplitRuntime

T = TypeVar("T")
_HINT = (
    "--input gives the sizes of one sample, before which the batch is put, in forward's order, and a type where it is not float32, "
    "such as 16:int64:0..1000"
)


@dataclass(frozen=True)
class Subject:
    """A model with example inputs, ready to be captured; `inputs` makes others, `loss` is its own or None."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Inputs
    loss: Loss | None
    options: Namespace

    @property
    def batch(self) -> int:
        """The batch of the example inputs."""
        return self.example.batch

    @property
    def example(self) -> Example:
        """The example inputs, as captures take them."""
        return _example(self.model, self.args, self.kwargs, self.options)

    def spec(self, boundary: str) -> SplitSpec:
        """What is asked for, cut there."""
        batches = self.options.dynamic_batch or (1, max(64, self.batch))
        return SplitSpec(boundary, dynamic_batch=batches, **sizes(self.options.dynamic, self.options.batch_dim))

    def captured(self) -> Captured:
        """The plan of its forward, uncut."""
        with progress(f"capturing {self.name} ..."):
            return self.owning(
                lambda: captured(self.model, self.args, spec=self.spec("auto"), example_kwargs=self.kwargs)
            )

    def prepared(self, boundary: str, **options: Any) -> SplitRuntime:
        """It, split."""
        with progress(f"splitting {self.name} at {boundary} ..."):
            given = {"split": self.spec(boundary), "example_kwargs": self.kwargs, **options}
            made: SplitRuntime = self.owning(lambda: prepare_split(self.model, self.args, **given))
            return made

    @property
    def given(self) -> str:
        """The example inputs in words: `i64[2, 24] from 0 to 4991, mask: f32[2, 8]`."""
        named = [("", t) for t in tree.leaves(self.args)]
        named += [(f"{name}: ", t) for name, value in self.kwargs.items() for t in tree.leaves(value)]
        return ", ".join(f"{name}{_shown(t)}" for name, t in named)

    def _misspelt(self) -> str:
        """Which keyword forward has no parameter for, and may have taken by its **kwargs."""
        known = [*inspect.signature(self.model.forward).parameters]
        name = next((name for name in self.kwargs if name not in known), None)
        near = "" if name is None else nearest(name, known)
        return "" if name is None else f"forward has no parameter {name!r}{f', nearest: {near}' if near else ''}; "

    def owning(self, run: Callable[[], T]) -> T:
        """Run what runs the model; what the model itself raises in it is told apart from what Ariadne says of it."""
        try:
            return run()
        except AriadneError:
            raise
        except Exception as error:
            hint = f". It got {self.given}; {self._misspelt()}{_HINT}" if self.options.input else ""
            raise ModelError(f"the model can't run on these inputs: {_words(error)}{hint}") from error


def load(options: Namespace) -> Subject:
    """The model that the options name, in the mode that they say, with its example inputs."""
    seed_all(options.seed)
    name: str = options.model
    with progress(f"building {name} ..."):
        found = _from_code(name) if ":" in name or name.endswith(".py") else _from_zoo(name, options.seed)
        refuse_wrapper(found.model)
        seed_all(options.seed)
        subject = _subject(name, found, options)
    subject.model.train(options.train)
    return subject


@dataclass(frozen=True)
class _Found:
    model: nn.Module
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    inputs: Inputs | None = None
    loss: Loss | None = None


def _subject(name: str, found: _Found, options: Namespace) -> Subject:
    """The model with the inputs that the options give; else those that came with it."""
    given = [inputs.parse(text) for text in options.input]
    first = next((t for ts in (found.model.parameters(), found.model.buffers()) for t in ts), None)
    device = torch.device("cpu") if first is None else first.device
    make: Inputs
    if given:

        def make(batch: int, seed: int) -> Given:
            return _placed(found.model, inputs.make(given, batch, seed, device), dict(options.batch_dim))

    elif found.inputs is not None:
        make = found.inputs
    elif found.args is not None:
        args, kwargs = found.args, found.kwargs or {}
        unbatched = along(options.batch_dim) == "none"
        if not any(isinstance(t, torch.Tensor) and (t.dim() or unbatched) for t in tree.leaves((args, kwargs))):
            raise UsageError(f"{name} came with inputs that hold no tensor with a batch; give --input {FORM}")
        example = _example(found.model, args, kwargs, options)
        if options.batch:
            args, kwargs = tree.unflatten(example.resized(options.batch), example.spec)
        return Subject(name, found.model, args, kwargs, varied(example), found.loss, options)
    else:
        raise UsageError(
            f"{name} needs example inputs: give --input for each, such as --input 3x224x224, or let the factory return "
            "(model, args) or (model, args, kwargs)"
        )
    args, kwargs = make(options.batch or 2, options.seed)
    return Subject(name, found.model, args, kwargs, make, found.loss, options)


def _example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Namespace) -> Example:
    return Example.of(args, kwargs, along=batch_dims(model, args, kwargs, along(options.batch_dim)))


def _placed(model: nn.Module, given: Given, dims: Mapping[str, int | None]) -> Given:
    """Inputs that were made with the batch in front, with it at the dims that were asked for."""
    leaves, spec = tree.flatten(given)
    names = called(model, spec)
    moved = [
        t.movedim(0, dim).contiguous() if (dim := dims.get(name)) else t for t, name in zip(leaves, names, strict=True)
    ]
    args, kwargs = tree.unflatten(moved, spec)
    return args, kwargs


def _from_zoo(name: str, seed: int) -> _Found:
    _from_here()
    try:
        zoo = importlib.import_module("model_zoo")
    except ModuleNotFoundError as error:
        if error.name != "model_zoo":
            raise
        raise UsageError(
            f"no model reads {name!r}: write {FORMS}; and model_zoo is only in a checkout of Ariadne, in its root folder"
        ) from None
    try:
        entry = zoo.entry(name)
        model = entry.build(seed)
    except zoo.UnknownNameError as error:
        raise UsageError(f"{error} Models of your own are written package.module:factory or file.py:factory") from None
    except zoo.MissingPackageError as error:
        raise ModelError(str(error)) from None
    return _Found(model, inputs=entry.inputs, loss=entry.loss)


def _from_code(name: str) -> _Found:
    where, _, path = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    module = _from_file(where) if where.endswith(".py") else _from_module(where)
    if not path:
        raise UsageError(f"{name!r} does not say which model: write {where}:NAME{_choices(module)}")
    thing: Any = module
    for part in path.split("."):
        if not hasattr(thing, part):
            own = [n for n in vars(thing) if not n.startswith("_")] if isinstance(thing, ModuleType) else []
            near = nearest(part, own)
            hint = f". Nearest: {near}" if near else _choices(module)
            raise UsageError(f"there is no {path!r} in {where}{hint}")
        thing = getattr(thing, part)
    if not isinstance(thing, nn.Module):
        if not callable(thing):
            raise UsageError(f"{name} is of type {type(thing).__name__}; name a model, or a function that returns one")
        try:
            thing = thing()
        except Exception as error:
            way_out = "; it is called without arguments: name a function that makes the model"
            hint = way_out if isinstance(error, TypeError) else ""
            raise ModelError(f"{name}() failed: {_words(error)}{hint}") from error
    model, *rest = thing if isinstance(thing, (tuple, list)) and thing else (thing,)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        raise UsageError(
            f"{name} gave {_shape(thing)}; it must be, or return, a torch.nn.Module, (model, args) or (model, args, kwargs)"
        )
    if rest and not isinstance(rest[0], (tuple, list)):
        raise UsageError(f"{name} gave args of type {type(rest[0]).__name__}; return (model, (x,))")
    if len(rest) == 2 and not isinstance(rest[1], dict):
        raise UsageError(f"{name} gave kwargs of type {type(rest[1]).__name__}; return (model, args, {{'mask': m}})")
    return _Found(model, tuple(rest[0]) if rest else None, rest[1] if len(rest) == 2 else None)


def _from_file(where: str) -> ModuleType:
    path = Path(where).expanduser()
    if not path.is_file():
        raise UsageError(f"there is no file {where!r}")
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does, for what lies beside it
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_ariadne_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{where!r} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _imported(where, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _from_module(where: str) -> ModuleType:
    _from_here()
    try:
        known = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        known = None
    if known is None:
        raise UsageError(f"no module {where!r} is installed, or in this folder; a model is written {FORMS}")
    module: ModuleType = _imported(where, lambda: importlib.import_module(where))
    return module


def _from_here() -> None:
    """Let modules of the current folder be imported, as `python -m` does."""
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())


def _imported(where: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        raise ModelError(f"{where} can't be imported: {_words(error)}") from error


def _choices(module: ModuleType) -> str:
    """What a module defines that may be meant, for an error message."""
    own = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (isinstance(thing, nn.Module) or (callable(thing) and getattr(thing, "__module__", "") == module.__name__))
    ]
    return f". It has {', '.join(own[:8])}" if own else ""


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    drawn = ""
    if value.numel() and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
        drawn = f" from {value.min().item()} to {value.max().item()}"
    return f"{short_dtype(value.dtype)}{list(value.shape)}{drawn}"


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _shape(thing: Any) -> str:
    if isinstance(thing, (tuple, list)):
        return f"({', '.join(type(v).__name__ for v in thing)})"
    return f"a {type(thing).__name__}"
