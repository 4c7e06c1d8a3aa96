"""Solving: at which batches a question about sizes has a given answer, exactly, over ranges of any length."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from ariadne.plan.batches import Batches
from ariadne.plan.expr import Expr

_CHUNK = 1 << 20
_SAFE = 1 << 62
_MONOTONE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def where(question: Expr, symbol: str, answer: bool, batches: Batches) -> Batches:
    """Those of `batches` at which `question`, which reads `symbol` alone, is true, or false if `answer` is.

    Comparisons of numbers that are linear in the batch are solved, whatever the range; others are evaluated at every batch.
    A question that divides by zero, or asks for the root of a negative number, has no answer.

    >>> where(Expr("2*B > 100"), "B", False, Batches(((1, 10**9),)))
    Batches(ranges=((1, 50),))
    """
    node = ast.parse(question.source, mode="eval").body
    line = _difference(node)

    def at(batch: int) -> bool:
        try:
            return bool(question.evaluate({symbol: batch})) == answer
        except (ArithmeticError, ValueError, TypeError):  # TypeError: a complex number compares with none
            return False

    found: list[tuple[int, int]] = []
    for lo, hi in batches.ranges:
        if line is None:
            vector = _bound(node, hi) < _SAFE
            found += _one_by_one(question, symbol, answer, at, lo, hi, vector)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], _MONOTONE):
            found += _switching_once(at, lo, hi)
        else:
            slope, offset = line
            root = -offset // slope if slope else lo
            cuts = sorted({lo, hi + 1, *(b for b in (root, root + 1) if lo < b <= hi)})
            found += [(a, b - 1) for a, b in pairwise(cuts) if at(a)]
    return Batches.joined(found)


def _switching_once(at: Callable[[int], bool], lo: int, hi: int) -> Iterator[tuple[int, int]]:
    first = at(lo)
    if first == at(hi):
        if first:
            yield lo, hi
        return
    a, b = lo, hi
    while b - a > 1:
        middle = (a + b) // 2
        a, b = (middle, b) if at(middle) == first else (a, middle)
    yield (lo, a) if first else (b, hi)


def _one_by_one(
    question: Expr, symbol: str, answer: bool, at: Callable[[int], bool], lo: int, hi: int, vector: bool
) -> Iterator[tuple[int, int]]:
    for start in range(lo, hi + 1, _CHUNK):
        stop = min(start + _CHUNK, hi + 1)
        holds = torch.tensor([False])
        if vector:
            try:
                holds = question.evaluate({symbol: torch.arange(start, stop)}).bool() == answer
            except RuntimeError:  # a division by zero, at some batch
                vector = False
        if not vector:
            holds = torch.tensor([at(b) for b in range(start, stop)])
        around = torch.nn.functional.pad(holds.to(torch.int8), (1, 1))
        edges = torch.diff(around)
        firsts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
        for a, b in zip(firsts.tolist(), ends.tolist(), strict=True):
            yield start + a, start + b - 1


def _difference(node: ast.expr) -> tuple[int, int] | None:
    """Slope and offset of left minus right, where the node compares two numbers that are linear in one name."""
    if not (isinstance(node, ast.Compare) and len(node.ops) == 1):
        return None
    left, right = _line(node.left), _line(node.comparators[0])
    return None if left is None or right is None else (left[0] - right[0], left[1] - right[1])


def _line(node: ast.expr) -> tuple[int, int] | None:
    if isinstance(node, ast.Name):
        return 1, 0
    if isinstance(node, ast.Constant):
        return (0, node.value) if type(node.value) is int else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _line(node.operand)
        return inner and (-inner[0], -inner[1])
    if not isinstance(node, ast.BinOp):
        return None
    a, b = _line(node.left), _line(node.right)
    if a is None or b is None:
        return None
    if isinstance(node.op, ast.Add):
        return a[0] + b[0], a[1] + b[1]
    if isinstance(node.op, ast.Sub):
        return a[0] - b[0], a[1] - b[1]
    if isinstance(node.op, ast.Mult) and 0 in (a[0], b[0]):
        return a[0] * b[1] + a[1] * b[0], a[1] * b[1]
    return None


def _bound(node: ast.expr, largest: int) -> float:
    """No integer met while evaluating is larger than this; infinite where a tensor of batches could not stand for the name."""
    if isinstance(node, ast.Name):
        return largest
    if isinstance(node, ast.Constant):
        return abs(node.value) if type(node.value) is int else float("inf")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _bound(node.operand, largest)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return max(_bound(node.left, largest), _bound(node.comparators[0], largest))
    if not isinstance(node, ast.BinOp):
        return float("inf")
    a, b = _bound(node.left, largest), _bound(node.right, largest)
    if isinstance(node.op, (ast.Add, ast.Sub)):
        return a + b
    if isinstance(node.op, ast.Mult):
        return a * b
    return max(a, b) + 1 if isinstance(node.op, (ast.FloorDiv, ast.Mod)) else float("inf")
