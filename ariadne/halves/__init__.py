"""A half as a file: what it holds, how it is written, and how it is read without running anything that it says.

A plan and its cut flow in, or a file; out flow a file, or plans of one side and their tensors. The files, in import order::

    atoms       arguments, sizes and nested structures as data, and back
    ops         which ops a file may name, and with what arguments
    weights     tensors in a file, by memory map
    given       weights from elsewhere, held against a half's
    skeleton    the modules of a half
    form        a plan of one side as data, and back
    writing     a side of a split becomes a file
    export      a side for other runtimes: ONNX, torch's exported programs, ExecuTorch
"""

from ariadne.halves.atoms import Classes, count, flag, items, mapped, need, text
from ariadne.halves.export import Schema
from ariadne.halves.export import write as export
from ariadne.halves.form import Side, SideReader
from ariadne.halves.given import Weights, given, refuse_unfit
from ariadne.halves.given import replace as replace_by
from ariadne.halves.skeleton import Held, known_places, named, plain_tensors, read_flags, read_state, skeleton
from ariadne.halves.weights import File, Row, blank, parsed
from ariadne.halves.writing import FORMAT, VERSION, Cut, save, side_of, slots

__all__ = [
    "Classes",
    "count",
    "flag",
    "items",
    "mapped",
    "need",
    "text",
    "Side",
    "SideReader",
    "File",
    "Row",
    "parsed",
    "Weights",
    "given",
    "refuse_unfit",
    "replace_by",
    "Held",
    "blank",
    "known_places",
    "named",
    "plain_tensors",
    "read_flags",
    "read_state",
    "skeleton",
    "Schema",
    "export",
    "FORMAT",
    "VERSION",
    "Cut",
    "save",
    "side_of",
    "slots",
]
