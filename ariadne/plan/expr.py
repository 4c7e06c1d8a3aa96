"""Integers (and floats) that depend on the batch: Python expressions over a closed vocabulary."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

FUNCTIONS = {"min": min, "max": max, "int": int, "float": float, "abs": abs, "round": round, "math": math}
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Constant, ast.Name, ast.Load, ast.Call,
    ast.Attribute, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd, ast.Not,
    ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.IfExp,
)  # fmt: skip


@lru_cache(maxsize=4096)
def _compiled(source: str) -> tuple[CodeType, frozenset[str]]:
    node = ast.parse(source, mode="eval")
    names = set()
    for part in ast.walk(node):
        if not isinstance(part, _NODES):
            raise ValueError(f"{source!r} is not a size expression: it holds {type(part).__name__}")
        if isinstance(part, ast.Attribute) and not (isinstance(part.value, ast.Name) and part.value.id == "math"):
            raise ValueError(f"{source!r} is not a size expression: it reads an attribute")
        if isinstance(part, ast.Name) and part.id not in FUNCTIONS:
            names.add(part.id)
    return compile(node, f"<size {source}>", "eval"), frozenset(names)


@dataclass(frozen=True, slots=True)
class Expr:
    """A number computed from the batch, and perhaps from scalar values of the plan: `Expr("4*B")`.

    `source` is Python limited to numbers, names, arithmetic, comparisons and min, max, abs, round, int, float and `math`.
    """

    source: str

    def __post_init__(self) -> None:
        _compiled(self.source)

    @property
    def names(self) -> frozenset[str]:
        """The symbols that it reads."""
        return _compiled(self.source)[1]

    def evaluate(self, env: Mapping[str, Any]) -> Any:
        """Its value where each name has the value that `env` gives.

        >>> Expr("(B + 1) // 2").evaluate({"B": 5})
        3
        """
        return eval(_compiled(self.source)[0], {"__builtins__": {}, **FUNCTIONS}, dict(env))

    def holds(self, env: Mapping[str, Any]) -> bool:
        """Whether it is true there; not so where it has no answer, as by a division by zero."""
        try:
            return bool(self.evaluate(env))
        except (ArithmeticError, ValueError):
            return False

    def __str__(self) -> str:
        return self.source
