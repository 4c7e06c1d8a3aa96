"""Segments: one side of a cut as a callable.

A plan and a candidate flow in; a function flows out. The files, in import order::

    bindings       the fastest callable that means exactly an op
    codegen        one side as source, and the objects that it names
    functions      source as a callable that tracebacks and debuggers know
    interpreter    the same side, evaluated op by op; it shares nothing with the source
"""

from ariadne.segment.codegen import Halted, Source, emit
from ariadne.segment.functions import halting, load
from ariadne.segment.interpreter import Interpreter
