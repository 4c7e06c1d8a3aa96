"""The cuts of a plan as a table: rows of plain data, which print as aligned text."""

from __future__ import annotations

from typing import Any, final

from ariadne.cut import frontiers
from ariadne.plan import TracePlan

COLUMNS = ("split_id", "after", "safe", "boundary_bytes", "values", "prefix_ops", "suffix_ops", "trainable", "reason")


@final
class CandidatesTable(tuple[dict[str, Any], ...]):
    """One row for each cut, in order, with the keys of `COLUMNS`; `print(table)` shows them aligned."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [COLUMNS, *([_cell(row[key]) for key in COLUMNS] for row in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        right = [
            all(isinstance(row[key], (int, float)) and not isinstance(row[key], bool) for row in self)
            for key in COLUMNS
        ]
        return "\n".join(
            "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
            for row in rows
        )


def export_split_candidates_table(trace_plan: TracePlan) -> CandidatesTable:
    """Every cut of a plan with what crosses it, and why it is not safe where it is not.

    Each row has `split_id`, `after` (the module that ends there), `safe`, `boundary_bytes` (per sample), `values`
    (how many cross), `prefix_ops`, `suffix_ops`, `trainable` (the suffix) and `reason`.

    >>> table = export_split_candidates_table(runtime.trace_plan)
    >>> [row["split_id"] for row in table if row["safe"]][:2]
    ['cut:1', 'cut:2']
    """
    return CandidatesTable(
        {
            "split_id": c.split_id,
            "after": c.after,
            "safe": c.safe,
            "boundary_bytes": c.boundary_bytes,
            "values": len(c.live),
            "prefix_ops": c.prefix_ops,
            "suffix_ops": c.suffix_ops,
            "trainable": c.trainable,
            "reason": c.reason,
        }
        for c in frontiers(trace_plan)
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, float) else str(value)
