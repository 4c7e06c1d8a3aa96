"""For tests of the checks: a small model as an entry, and Ariadne with one method changed, as a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import model_zoo
from ariadne import prepare_split
from conformance import checks
from conformance.suite.bench import Bench
from conformance.suite.cases import Case
from conformance.suite.statuses import Finding
from model_zoo.sampling import Sampler, dense

PARAMETERS = {
    "forward": "cut=q50,bs=3,mode=train,backend=generated",
    "train": "cut=q50,bs=3,mode=train,backend=generated,steps=3",
    "debug": "cut=q50,bs=3,mode=train",
    "inputs": "cut=q50,mode=train",
    "twice": "cut=q50,mode=eval",
    "left": "mode=train",
    "payload": "cut=q50,bs=3",
    "guards": "mode=eval",
    "rows": "bs=3",
    "autocast": "cut=q50,mode=train",
}


class Small(nn.Module):
    """Statistics, random draws, a tied weight, a frozen one, an unused one; several outputs, one of them an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.25)
        self.second, self.last, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """(batch, 6) -> logits (batch, 6), their left half as a view, and where they are largest."""
        hidden = self.drop(self.norm(self.first(x)).sin())
        logits = self.last(self.second(hidden) + hidden)
        return {"logits": logits, "left": logits[:, :3], "top": logits.argmax(1)}


def entry(make: Callable[[], nn.Module] = Small, sample: Sampler | None = None) -> model_zoo.Entry:
    """An entry of no catalogue."""
    return model_zoo.Entry("tests/small", frozenset({"cheap", "features"}), make, sample or dense(6))


class Faulty:
    """A runtime with some of its methods replaced by functions that get the real runtime first."""

    def __init__(self, runtime: Any, methods: dict[str, Callable[..., Any]], mode: str | None = None) -> None:
        self._runtime, self._methods, self._mode = runtime, methods, mode

    def __getattr__(self, name: str) -> Any:
        if name in self._methods and self._mode in (None, self._runtime.cache_key.mode):
            return lambda *args, **kwargs: self._methods[name](self._runtime, *args, **kwargs)
        return getattr(self._runtime, name)

    def resplit(self, *cut: Any, **options: Any) -> Faulty:
        """The same fault at another cut, or in another mode."""
        return type(self)(self._runtime.resplit(*cut, **options), self._methods, self._mode)


def target(
    preparing: Callable[[nn.Module], None] | None = None, mode: str | None = None, **methods: Callable[..., Any]
) -> Callable[..., Any]:
    """Ariadne with these methods, in that mode only where one is given; `preparing` is done to the model while it prepares."""

    def prepare(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
        runtime = prepare_split(model, example_inputs, **options)
        if preparing is not None:
            preparing(model)
        return Faulty(runtime, methods, mode)

    return prepare


def salted(model: nn.Module, example_inputs: Any, **options: Any) -> Any:
    """Ariadne, but a name in its suffix depends on the process's hashes."""
    return Salted(prepare_split(model, example_inputs, **options), {})


class Salted(Faulty):
    """A runtime whose suffix source differs from process to process."""

    @property
    def suffix_source(self) -> str:
        """The source with the hash of a string in it."""
        return f"{self._runtime.suffix_source}# {hash('a string')}\n"


def run(
    check: str, prepare: Any = "ariadne:prepare_split", made: model_zoo.Entry | None = None, **given: Any
) -> Finding:
    """One case of a check on the small model."""
    case = Case.parse(f"{check}/tests/small/{PARAMETERS[check]}")
    case = Case.of(check, case.model, **{**dict(case.parameters), **given})
    return checks.run(case, Bench(made or entry(), prepare))


def after_suffix(act: Callable[[nn.Module], Any]) -> Any:
    """The suffix, and after it something done to the model or to the process."""

    def run_suffix(runtime: Any, boundary: Any) -> Any:
        output = runtime.run_suffix(boundary)
        act(runtime.model)
        return output

    return {"run_suffix": run_suffix}
