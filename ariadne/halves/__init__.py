"""A half as a file: what it holds, how it is written, and how it is read without running anything that it says.

A plan and its cut flow in, or a file; out flow a file, or plans of one side and their tensors. The files, in import order::

    atoms       arguments, sizes and nested structures as data, and back
    weights     tensors in a file, by memory map
    packed      packed weights of quantized layers, as plain tensors
    ops         which ops a file may name, and with what arguments
    given       weights from elsewhere, held against a half's
    known       which weights a half has, as a digest
    parameters  what forward calls its inputs
    skeleton    the modules of a half
    called      Python that a half calls
    containers  what forward puts into containers
    sized       the sizes beside the batch that a half serves
    together    whether the parts of a side go together
    form        a plan of one side as data, and back
    whole       all that a file says, looked at
    moves       a half on another device or in another dtype
    writing     a side of a split becomes a file
    reading     a file becomes plans and the modules that hold its tensors
    export      a side for other runtimes: ONNX, torch's exported programs, ExecuTorch
"""

from ariadne.halves.atoms import count, flag, items, mapped, need, text
from ariadne.halves.called import copy_kept, state_of
from ariadne.halves.containers import empty, left
from ariadne.halves.export import Schema
from ariadne.halves.export import write as export
from ariadne.halves.form import Side
from ariadne.halves.given import Weights, given, refuse_unfit
from ariadne.halves.given import replace as replace_by
from ariadne.halves.known import known
from ariadne.halves.moves import Moves, Seal, tensors_of
from ariadne.halves.packed import gathered, refuse_others, told_packed
from ariadne.halves.reading import read
from ariadne.halves.skeleton import read_flags
from ariadne.halves.weights import File, Row, digest, parsed, row
from ariadne.halves.whole import VERSION
from ariadne.halves.writing import Cut, save, side_of, slots
