"""Compiled segments: the same functions as native code, and an account of what was compiled.

A plan and its source flow in; callables and reports of them flow out. The files, in import order::

    lift          a segment as a kernel of tensors and a shell of Python
    compilable    kernels in one piece, with sizes and strides stated
    tracing       torch's settings while a kernel is traced
    modes         what of torch's modes decides which code runs
    graphs        CUDA graphs of a kernel, recorded and played
    rows          whether each sample is computed from that sample alone
    buckets       a batch padded to the next of a few sizes
    kept          packages in a folder of the user's: who may write there, and which are thrown away first
    package       native code of one kernel, and what is checked before each call of it
    named         what tells one package from another beside its kernel
    exported      what an exported program draws, and which batches it serves
    builds        the C++ of packages, put off and run in threads, so that both sides are compiled at once
    ahead         AOTInductor packages: made, kept, loaded
    jit           `torch.compile` over kernels, and an account of it
    progress      a line on a terminal, while sides are compiled
"""

from ariadne.compiled.builds import Start
from ariadne.compiled.jit import CompileReport, SegmentReport, compiled, cuda_graphs
from ariadne.compiled.kept import Kept
from ariadne.compiled.progress import Progress
from ariadne.compiled.rows import Along, Mixed, rows
