"""Mutants of preparation: what it leaves behind on the model and in the process, and sources that are not stable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ariadne.runtime import SplitRuntime
from ariadne.runtime.variant import Variant
from conformance.mutants.planted import Planted


class _Careless(Planted):
    """Does something to the model once it is prepared."""

    @classmethod
    def prepare(cls, model: nn.Module, example_inputs: Sequence[Any], **options: Any) -> Planted:
        found = super().prepare(model, example_inputs, **options)
        cls.leave(model)
        return found

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        """What stays behind."""
        raise NotImplementedError


class LeftGradients(_Careless):
    """Preparation leaves gradients of zero on the parameters."""

    piece = "prepare"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)


class LeftStatistics(_Careless):
    """Preparation moves floating buffers, as a forward in train mode would."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        for b in model.buffers():
            if b.is_floating_point():
                b.mul_(1.01)


class LeftDraws(_Careless):
    """Preparation draws from torch's generator."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        torch.rand(())


class LeftPythonDraws(_Careless):
    """Preparation draws from Python's generator and from numpy's."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        random.random()
        np.random.random()


class LeftAttribute(_Careless):
    """Preparation leaves an attribute on a submodule."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        last = list(model.modules())[-1]
        last.captured_shape = (2, 8)


class LeftFlag(_Careless):
    """Preparation leaves one submodule in the other mode."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        last = list(model.modules())[-1]
        last.training = not last.training


class LeftHook(_Careless):
    """Preparation leaves a forward hook behind."""

    piece = "capture.recorder"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        model.register_forward_hook(lambda module, args, output: None)


class LeftFrozen(_Careless):
    """Preparation leaves a parameter that no longer requires grad."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


class LeftUntied(_Careless):
    """Preparation leaves every slot with a parameter of its own: weights that were tied are so no more."""

    piece = "capture.state"

    @classmethod
    def leave(cls, model: nn.Module) -> None:
        seen: set[int] = set()
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) in seen:
                    module._parameters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
                seen.add(id(p))


class SourceInHashOrder(Planted):
    """The source ends in a list of the values that cross, in the order of a set."""

    piece = "segment.codegen"

    def in_variant(self, variant: Variant) -> None:
        for side in ("prefix", "suffix"):
            source = getattr(variant, f"{side}_source")
            names = " ".join({f"{side}_{name}_{i}" for name in variant.candidate.live for i in range(8)})
            self.recode(variant, side, replace(source, text=f"{source.text}    # {names}\n"))


class SignatureByHash(Planted):
    """A plan's signature is Python's own hash of it, which another process salts anew."""

    piece = "plan.trace"

    @classmethod
    def planted_in(cls, plain: SplitRuntime) -> Planted:
        found = super().planted_in(plain)
        for plan in found._plans:
            plan.__dict__["signature"] = f"{abs(hash(str(plan))):016x}"
        return found
