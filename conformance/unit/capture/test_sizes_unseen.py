"""What forward learns of its batch without an op or a comparison: in C, by a float, as text. It is right at every batch."""

from __future__ import annotations

import array
import bisect
import itertools
import json
import math
import operator
import random
import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference

TABLE = [0.5] * 6 + [2.0] * 11  # capture runs 2, 3, 5 and 1
LATER = [False] * 6 + [True] * 11
NUMBERS = list(range(17))


class Scaled(nn.Module):
    """(B, 4) -> (B, 4); the result is scaled by what `learns` makes of the input. `real`: only real runs tell."""

    def __init__(self, learns: Callable[[torch.Tensor], Any], real: bool) -> None:
        super().__init__()
        self.learns, self.real, self.a, self.b = learns, real, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.real and not bool((y * 0 == 0).all()):  # fake tensors stop here
            y = -y
        found = self.learns(x)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            found = 2.0 if found else 1.0
        return self.b(y) * found


def caught(n: Any) -> float:
    try:
        return TABLE[n]
    except Exception:
        return 1.0


def filled(text: str, n: Any) -> str:
    return text.format(n)


def modulo(text: str, n: Any) -> str:
    return text % n


# Each is one thing up to batch 5, and another at a larger one.
INDEX = {
    "an item of a list": lambda x: TABLE[x.shape[0]],
    "an item of a tuple": lambda x: tuple(TABLE)[x.size(0)],
    "an item of a range": lambda x: range(0, 100, 3)[x.shape[0]] > 16,
    "an item of a string": lambda x: "000000111111111111"[len(x)] == "1",
    "an item of an array": lambda x: np.array(TABLE)[x.shape[0]],
    "an item that is caught": lambda x: caught(x.shape[0]),
    "the last items of a list": lambda x: (
        sum(NUMBERS[x.shape[0] - 3 :]) if x.shape[0] * 1 != 99 and LATER[len(x)] else 1
    ),
    "a slice of a list": lambda x: len(NUMBERS[4 : x.shape[0] - 2]) + 1,
    "a slice of bytes": lambda x: len(bytes(99)[6 : x.shape[0]]) + 1,
    "islice": lambda x: max(itertools.islice(TABLE, x.shape[0])),
    "a list repeated": lambda x: len([0] * (x.shape[0] - 5)) + 1,
    "a string repeated": lambda x: len("ab" * (x.shape[0] - 5)) + 1,
    "itertools.repeat": lambda x: max(4, sum(1 for _ in itertools.repeat(0, x.shape[0]))),
    "bytes": lambda x: max(4, len(bytes(x.shape[0]))) > 5,
    "bytearray": lambda x: len(bytearray(x.shape[0])) > 5,
    "zeros of numpy": lambda x: np.zeros(x.shape[0]).size > 5,
    "arange of numpy": lambda x: np.arange(x.shape[0]).max() > 4,
    "an array of numpy": lambda x: np.array([x.shape[0], 5]).max() > 5,
    "a number of numpy": lambda x: np.int64(x.shape[0]) > 5,
    "a number of numpy that is larger": lambda x: np.int64(5) < x.shape[0],
    "operator.index": lambda x: operator.index(x.shape[0]) > 5,
    "math.comb": lambda x: math.comb(x.shape[0], 2) > 10,
    "math.factorial": lambda x: math.factorial(x.shape[0]) > 120,
    "math.gcd": lambda x: math.gcd(x.shape[0], 6) == 6,
    "struct": lambda x: struct.unpack("<i", struct.pack("<i", x.shape[0]))[0] > 5,
    "an array of Python": lambda x: array.array("i", [x.shape[0]])[0] > 5,
    "to_bytes": lambda x: x.shape[0].to_bytes(2, "little") > b"\x05\x00",
    "bit_length": lambda x: (x.shape[0] + 2).bit_length() > 3,
    "real": lambda x: x.shape[0].real > 5,
    "numerator": lambda x: x.shape[0].numerator > 5,
    "imag and denominator": lambda x: TABLE[x.shape[0] * x.shape[0].denominator + x.shape[0].imag],
    "as_integer_ratio": lambda x: x.shape[0].as_integer_ratio()[0] > 5,
    "conjugate": lambda x: x.shape[0].conjugate() > 5,
    "Fraction": lambda x: Fraction(x.shape[0], 2) > Fraction(5, 2),
    "a product of a Fraction": lambda x: Fraction(1, 2) * x.shape[0] > Fraction(5, 2),
    "Decimal": lambda x: Decimal(x.shape[0]) > 5,
    "a product of a Decimal": lambda x: Decimal("0.5") * x.shape[0] > Decimal("2.5"),
    "complex": lambda x: complex(x.shape[0]).real > 5,
    "a complex product": lambda x: (1j * x.shape[0]).imag > 5,
    "numel of a Size": lambda x: torch.Size((x.shape[0], 4)).numel() > 20,
    "numel of a shape": lambda x: x.shape.numel() > 20,
    "numel of a part of a shape": lambda x: x.shape[:1].numel() > 5,
    "bisect": lambda x: bisect.bisect_left(NUMBERS, x.shape[0]) > 5,
    "a count of items": lambda x: sum(1 for _ in zip(range(99), range(x.shape[0]), strict=False)) > 5,
    "a random number of that many bits": lambda x: random.Random(x.shape[0]).random(),
    "int": lambda x: int(x.shape[0]) > 5,
    "float": lambda x: float(x.shape[0]) > 5,
    "an and": lambda x: x.shape[0] & 6 == 6,
    "a shift": lambda x: (x.shape[0] << 1) > 10,
    "a shift by it": lambda x: (1 << x.shape[0]) > 32,
    "round": lambda x: round(x.shape[0] * 0.1, 0) > 0,
    "divmod": lambda x: divmod(x.shape[0], 6)[0],
    "a remainder": lambda x: x.shape[0] % 6 == 0,
    "a power of two": lambda x: 2 ** x.shape[0] > 32,
    "chr": lambda x: chr(x.shape[0]) > "\x05",
    "sum of a list with it": lambda x: math.fsum([x.shape[0], 1]) > 6,
    "a set": lambda x: x.shape[0] in {6, 7, 8, 9},
    "a dict": lambda x: {6: 2.0, 7: 3.0, 9: 4.0}.get(x.shape[0], 1.0),
}
FLOAT = {
    "a ramp": lambda x: min(1.0, 0.2 * x.shape[0]),
    "a ramp from the right": lambda x: min(1.0, x.shape[0] * 0.2),
    "a float that is compared": lambda x: 0.5 * x.shape[0] > 2.5,
    "a float from which it is taken": lambda x: 5.5 - x.shape[0] < 0,
    "a float that is added": lambda x: 0.5 + x.shape[0] > 5.5,
    "a float that is divided by it": lambda x: max(0.2, 1.0 / x.shape[0]),
    "a float to its power": lambda x: max(0.5 ** x.shape[0], 0.03125),
    "a float divided": lambda x: 11.0 // x.shape[0] < 2,
    "a float, rest": lambda x: 6.0 % x.shape[0] == 0.0,
    "a float on the left of a comparison": lambda x: x.shape[0] > 5.5,
    "a float of numpy": lambda x: np.float64(0.5) * x.shape[0] > 2.5,
    "a clamp of a float": lambda x: max(0.0, min(1.0, (x.shape[0] - 5) * 0.25)),
    "a rounded product": lambda x: int(0.19 * x.shape[0]) > 0,
    "ceil": lambda x: math.ceil(0.2 * x.shape[0]),
    "floor": lambda x: math.floor(x.shape[0] / 6),
    "a root": lambda x: math.sqrt(x.shape[0]) > 2.3,
    "a logarithm": lambda x: math.log2(x.shape[0]) > 2.4,
    "a square root by power": lambda x: x.shape[0] ** 0.5 > 2.3,
    "a mean of sizes": lambda x: sum(x.shape) / len(x.shape) > 4.6,
    "three factors": lambda x: 0.1 * x.shape[0] * 3 > 1.6,
    "three factors, near the border": lambda x: 0.1 * x.shape[0] * 3 > 2.1,
}
TEXT = {
    "an f-string": lambda x: {"7": 2.0}.get(f"{x.shape[0]}", 1.0),
    "str": lambda x: {"7": 2.0}.get(str(x.shape[0]), 1.0),
    "repr": lambda x: {"7": 2.0}.get(repr(x.shape[0]), 1.0),
    "format": lambda x: {"007": 2.0}.get(format(x.shape[0], "03d"), 1.0),
    "str.format": lambda x: {"n7": 2.0}.get(filled("n{}", x.shape[0]), 1.0),
    "percent": lambda x: {"7": 2.0}.get(modulo("%d", x.shape[0]), 1.0),
    "percent s": lambda x: {"7": 2.0}.get(modulo("%s", x.shape[0]), 1.0),
    "hex": lambda x: {"0x7": 2.0}.get(hex(x.shape[0]), 1.0),
    "bin": lambda x: {"0b111": 2.0}.get(bin(x.shape[0]), 1.0),
    "json": lambda x: json.dumps([x.shape[0]]) == "[7]",
    "a shape in words": lambda x: "[7" in str(x.shape),
    "a Size in words": lambda x: "[7" in repr(torch.Size((x.shape[0], 4))),
    "a join": lambda x: "-".join(map(str, x.shape)) == "7-4",
    "a float in words": lambda x: f"{x.shape[0] * 0.5:.1f}" == "3.5",
    "a tuple in words": lambda x: str((x.shape[0], 4)) == "(7, 4)",
    "an answer in words": lambda x: {"True": 2.0}[str(x.shape[0] > 5)] if x.shape[0] > 5 else 1.0,
}
TYPE = {
    "isinstance int": lambda x: isinstance(x.shape[0], int) and x.shape[0] > 5,
    "isinstance of several": lambda x: isinstance(x.shape[0], (str, int)) and x.shape[0] > 5,
    "isinstance of a number": lambda x: isinstance(x.shape[0], Integral) and x.shape[0] > 5,
    "the type": lambda x: type(x.shape[0]) is int and x.shape[0] > 5,
    "the type, compared": lambda x: type(x.shape[0]) == int and x.shape[0] > 5,  # noqa: E721
    "the class": lambda x: x.shape[0].__class__ is int and x.shape[0] > 5,
    "hasattr": lambda x: hasattr(x.shape[0], "numerator") and x.shape[0] > 5,
    "a float's type": lambda x: type(x.shape[0] / 2) is float and x.shape[0] > 5,
    "isinstance float": lambda x: isinstance(x.shape[0] * 0.5, float) and x.shape[0] > 5,
    "a match": lambda x: matched(x.shape[0]),
}


def matched(n: Any) -> float:
    match n:
        case 7:
            return 2.0
        case int() if n > 8:
            return 3.0
    return 1.0


KINDS = (("index", INDEX), ("float", FLOAT), ("text", TEXT), ("type", TYPE))
ALL = {f"{kind}: {name}": learns for kind, table in KINDS for name, learns in table.items()}


@pytest.mark.parametrize("real", [False, True], ids=["symbolic_first", "real_runs_alone"])
@pytest.mark.parametrize("what", sorted(ALL))
def test_what_is_learnt_of_the_batch_is_right_at_every_batch(what: str, real: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(ALL[what], real).eval()
    runtime = prepare_split(model, (torch.randn(2, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 12)))
    for batch in range(1, 13):
        x = torch.randn(batch, 4)
        found = runtime.run_suffix(runtime.run_prefix(x))
        assert difference(model(x), found) is None, (batch, runtime.plan)
