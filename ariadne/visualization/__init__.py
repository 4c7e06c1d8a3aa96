"""Pictures of a plan and of a split: from data that the plan holds, without running anything.

The files, in import order::

    fold, repeat          nested module calls; which are drawn open; which are alike and drawn once
    parts, fit            boxes, groups and arrows; how tall they will be
    labels, graph         the words; what is drawn of a plan
    dot, render           DOT text; the programs that make pictures
    table                 every cut, as rows
    curve, chart, page    the frontier profile, which `ariadne.check.profile.frontier_profile` draws
    interactive           a drawing as a page whose modules open and close

`trace_dot = export_trace_dot(runtime.trace_plan)` needs Python alone; pictures need the Graphviz program.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ariadne.cut import SplitCandidate
from ariadne.errors import SpecError
from ariadne.plan import TracePlan
from ariadne.visualization import dot, render
from ariadne.visualization.curve import Profile, Times, pareto, profile
from ariadne.visualization.fold import Depth
from ariadne.visualization.graph import graph
from ariadne.visualization.interactive import interactive
from ariadne.visualization.parts import Detail, Options
from ariadne.visualization.table import CandidatesTable, export_split_candidates_table

__all__ = [
    "CandidatesTable",
    "Depth",
    "Detail",
    "Profile",
    "Times",
    "View",
    "export_split_candidates_table",
    "export_split_dot",
    "export_trace_dot",
    "pareto",
    "profile",
    "visualize",
]

View = Literal["trace", "split"]


def export_trace_dot(
    trace_plan: TracePlan,
    *,
    view_detail: Detail = "module",
    max_module_depth: Depth = "auto",
    show_operation_targets: bool = False,
    show_debug_markers: bool = False,
    show_node_indices: bool = False,
    fold_repeats: bool = True,
) -> str:
    """A plan as DOT text; the options are those of `SplitRuntime.visualize`.

    >>> trace_dot = export_trace_dot(runtime.trace_plan)
    """
    options = _options(
        view_detail, max_module_depth, show_operation_targets, show_debug_markers, show_node_indices, fold_repeats
    )
    return dot.write(graph(trace_plan, None, options))


def export_split_dot(
    trace_plan: TracePlan,
    candidate: SplitCandidate,
    *,
    view_detail: Detail = "module",
    max_module_depth: Depth = "auto",
    show_operation_targets: bool = False,
    show_debug_markers: bool = False,
    show_node_indices: bool = False,
    fold_repeats: bool = True,
) -> str:
    """A plan, cut, as DOT text: prefix, what crosses, suffix; the options are those of `SplitRuntime.visualize`.

    >>> split_dot = export_split_dot(runtime.trace_plan, runtime.candidate)
    """
    if not isinstance(candidate, SplitCandidate):
        raise SpecError(
            f"candidate is a SplitCandidate such as runtime.candidate; found {type(candidate).__name__}. Take one from "
            "runtime.candidates"
        )
    if not 0 < candidate.cut < len(trace_plan.nodes):
        raise SpecError(
            f"{candidate.split_id} is not a cut of this plan, which has {len(trace_plan.nodes)} ops; take a candidate and a plan "
            "from the same runtime"
        )
    options = _options(
        view_detail, max_module_depth, show_operation_targets, show_debug_markers, show_node_indices, fold_repeats
    )
    return dot.write(graph(trace_plan, candidate, options))


def visualize(
    trace_plan: TracePlan,
    candidate: SplitCandidate | None,
    *,
    view: View = "trace",
    outpath: str | os.PathLike[str] | None = None,
    fileformat: str = "svg",
    return_dot: bool = False,
    view_detail: Detail = "module",
    max_module_depth: Depth = "auto",
    show_operation_targets: bool = False,
    show_debug_markers: bool = False,
    show_node_indices: bool = False,
    fold_repeats: bool = True,
) -> str | Path:
    """Draw a plan, or a plan cut at a candidate, which "trace" needs none of: what `SplitRuntime.visualize` does."""
    if view not in ("trace", "split"):
        raise SpecError(f"view must be 'trace' or 'split'; found {view!r}")
    if view == "split" and candidate is None:
        raise SpecError("view 'split' draws a cut, and there is none; pass a candidate, or view='trace'")
    formats = (*render.DOT_FORMATS, *render.TEXT_FORMATS, "html")
    if fileformat not in formats:  # before a drawing is made for nothing
        raise SpecError(f"fileformat must be one of {', '.join(map(repr, formats))}; found {fileformat!r}")
    options = _options(
        view_detail, max_module_depth, show_operation_targets, show_debug_markers, show_node_indices, fold_repeats
    )
    text = dot.write(graph(trace_plan, candidate if view == "split" else None, options))
    if return_dot and outpath is None:
        return text
    path = render.place(outpath, f"{view}_graph", fileformat, formats)
    if fileformat == "html":
        page = interactive(trace_plan, candidate if view == "split" else None, fold_repeats=options.fold_repeats)
        path.write_text(page, encoding="utf-8")
    elif fileformat in render.TEXT_FORMATS:
        path.write_text(text, encoding="utf-8")
    else:
        render.draw(text, path)
    return text if return_dot else path


def _options(detail: Detail, depth: Depth, targets: bool, markers: bool, indices: bool, repeats: bool) -> Options:
    if detail not in ("module", "operation"):
        raise SpecError(f"view_detail must be 'module' or 'operation'; found {detail!r}")
    whole = isinstance(depth, int) and not isinstance(depth, bool)
    if not (depth is None or depth == "auto" or (whole and int(depth) > 0)):
        raise SpecError(
            f"max_module_depth is how many modules deep a drawing goes: 1 or more, None for all, or 'auto'; found {depth!r}"
        )
    return Options(detail, depth, bool(targets), bool(markers), bool(indices), bool(repeats))
