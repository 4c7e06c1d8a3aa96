"""A half as a file: what it holds, how it is written, and how it is read without running anything that it says.

A plan and its cut flow in, or a file; out flow a file, or plans of one side and their tensors. The files, in import order::

    atoms       arguments, sizes and nested structures as data, and back
    ops         which ops a file may name, and with what arguments
    weights     tensors in a file, by memory map
    form        a plan of one side as data, and back
    writing     a side of a split becomes a file
"""

from ariadne.halves.atoms import Classes, count, flag, items, mapped, need, text
from ariadne.halves.form import Side, SideReader
from ariadne.halves.weights import File, Row, digest, parsed, row
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
    "digest",
    "Row",
    "parsed",
    "row",
    "FORMAT",
    "VERSION",
    "Cut",
    "save",
    "side_of",
    "slots",
]
