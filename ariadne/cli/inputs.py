"""Example inputs as they are typed: `3x224x224`, `16:int64:0..1000`, `mask=16:bool`, `4x4:fixed`, `use_cache=False`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ariadne.check import Given
from ariadne.cli.options import FORM
from ariadne.cli.output import UsageError

_FORM = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>(?:\d+(?:x\d+)*)?)(?P<rest>(?::[^:]+)*)")
_WORD = re.compile(r"([A-Za-z_]\w*)=(True|False|None)")
_WORDS = {"True": True, "False": False, "None": None}
_NUMBER = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")


@dataclass(frozen=True)
class Input:
    """One input: its keyword or "", the sizes of a sample, dtype, range, and whether it has a batch."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float | None = None
    high: float | None = None
    fixed: bool = False

    def make(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """A tensor of so many samples, drawn from a generator."""
        shape = self.sizes if self.fixed else (batch, *self.sizes)
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            low, high = int(self.low or 0), 2 if self.high is None else int(self.high)
            return torch.randint(low, high, shape, generator=generator).to(self.dtype)
        if self.low is None or self.high is None:
            wide = self.dtype if self.dtype.is_complex else torch.float32
            return torch.randn(shape, generator=generator, dtype=wide).to(self.dtype)
        return (self.low + (self.high - self.low) * torch.rand(shape, generator=generator)).to(self.dtype)


@dataclass(frozen=True)
class Word:
    """A keyword whose value is no tensor: True, False or None."""

    name: str
    value: bool | None


def parse(text: str) -> Input | Word:
    """The meaning of one `--input`; `UsageError` where it has none.

    >>> parse("mask=16:bool")
    Input(name='mask', sizes=(16,), dtype=torch.bool, low=None, high=None, fixed=False)
    >>> parse("use_cache=False")
    Word(name='use_cache', value=False)
    """
    word = _WORD.fullmatch(text.strip())
    if word is not None:
        return Word(word[1], _WORDS[word[2]])
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"no input reads {text!r}; write {FORM}, such as 3x224x224, 16:int64:0..1000, "
            "mask=16:bool or use_cache=False"
        )
    sizes = tuple(int(n) for n in found["sizes"].split("x") if n)
    given: dict[str, Any] = {}
    for part in found["rest"].split(":")[1:]:
        dtype = getattr(torch, part, None)
        if part == "fixed":
            given["fixed"] = True
        elif bounds := _RANGE.fullmatch(part):
            given["low"], given["high"] = float(bounds[1]), float(bounds[2])
        elif isinstance(dtype, torch.dtype):
            given["dtype"] = dtype
        else:
            raise UsageError(
                f"input {text!r}: {part!r} is neither a dtype such as int64, nor a range LOW..HIGH, nor 'fixed'"
            )
    made = Input(found["name"] or "", sizes, **given)
    if made.low is not None and made.high is not None:
        whole = not (made.dtype.is_floating_point or made.dtype.is_complex)
        if made.dtype is torch.bool or made.dtype.is_complex:
            raise UsageError(f"input {text!r}: {made.dtype} takes no range; leave it out")
        if made.low >= made.high or (whole and (made.low % 1 or made.high % 1)):
            raise UsageError(f"input {text!r}: a range is LOW..HIGH with LOW below HIGH, whole numbers for integers")
    return made


def make(inputs: Sequence[Input | Word], batch: int, seed: int, device: torch.device) -> Given:
    """All inputs for one call, a function of batch and seed."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        (given.name, given.value if isinstance(given, Word) else given.make(batch, generator).to(device))
        for given in inputs
    ]
    return tuple(t for name, t in made if not name), {name: t for name, t in made if name}
