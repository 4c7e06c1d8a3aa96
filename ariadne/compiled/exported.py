"""What a program that `torch.export` made says of itself: where it draws, and for which batches it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ariadne.plan import Batches, Expr, bind


def draws(node: torch.fx.Node) -> bool:
    """Whether an op of an exported program draws random numbers: one that drops out, only at a rate and while it trains."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    bound = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    given = dict(zip((a.name for a in arguments), bound, strict=True))
    never = any(given.get(rate) == 0 for rate in ("dropout", "dropout_p"))
    return not never and not any(given.get(flag) is False for flag in ("train", "training"))


def linear(size: Expr, symbol: str, dim: Any, served: Batches) -> Any:
    """`size` in terms of an export dim where it is `a*B + b` at every batch that is served; else a dim of its own."""
    one, two = (size.evaluate({symbol: b}) for b in (1, 2))
    a, b = two - one, 2 * one - two
    if a <= 0 or any(size.evaluate({symbol: n}) != a * n + b for n in served):
        return torch.export.Dim.AUTO
    scaled = dim if a == 1 else a * dim
    return scaled if b == 0 else scaled + b


def symbols(
    program: Any, sizes: Sequence[Sequence[int | Expr]], batch: str, served: Batches
) -> tuple[dict[Any, Expr], list[Any], Any]:
    """What each symbol of an exported program stands for, in terms of the batch; what each size stands for that follows data; and
    the program's shape environment.

    An input has a symbol of its own for each dim that grows with the batch, or one for the batch in all of them.
    """
    found: dict[Any, Expr] = {}
    free: list[Any] = []
    env = None
    fakes = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"]
    for fake, given in zip(fakes, sizes, strict=False):
        for there, size in zip(fake.shape, given, strict=True):
            if not isinstance(there, torch.SymInt) or not isinstance(size, Expr):
                continue
            expression, env = there.node.expr, fake.fake_mode.shape_env
            if size.names != {batch}:
                free.append(expression)
                continue
            (symbol,) = expression.free_symbols if len(expression.free_symbols) == 1 else (None,)
            if expression == symbol:
                found.setdefault(symbol, size)
            elif symbol is not None and all(expression.subs(symbol, b) == size.evaluate({batch: b}) for b in served):
                found.setdefault(symbol, Expr(batch))
    return found, free, env


def admitted(env: Any, symbols: Mapping[Any, Expr], batch: str, served: Batches, free: Sequence[Any] = ()) -> Batches:
    """The batches for which everything holds that export and inductor took for granted; `free` are sizes that follow data.

    None where they took such a size for a number, for the batch, or for another such size.
    """
    # Symbols that were found to be the same are written as one in the program, and not in the guard that says so. What one that
    # stands for a size was found to be is a condition itself: a number, where the compiler took the example's size for all.
    replaced = env.replacements if env is not None else {}
    if len({*free, *symbols}) < len(free) + len(symbols) or any(not s.is_Symbol or s in replaced for s in free):
        return Batches(())
    others = {symbol: found for symbol, found in replaced.items() if symbol not in symbols}
    conditions = [guard.expr.subs(others) for guard in env.guards] if env is not None else []
    apart = [symbol - replaced[symbol].subs(others) for symbol in symbols if symbol in replaced]
    if not symbols or any(c.free_symbols - set(symbols) for c in (*conditions, *apart)):
        return Batches(())

    def holds(b: int) -> bool:
        values = {s: size.evaluate({batch: b}) for s, size in symbols.items()}
        within = all(v <= env.var_to_range[s].upper for s, v in values.items() if s in env.var_to_range)
        return within and all(d.subs(values) == 0 for d in apart) and all(bool(c.subs(values)) for c in conditions)

    return Batches.of(b for b in served if holds(b))
