"""The plan: a forward as frozen data, the one language that all stages speak.

Nothing flows in: this is the ground of the pipeline. Out go the words that the other rooms are written in. The files,
in import order::

    strided    copies that keep their strides
    schema     what an op's schema says of a call
    expr       sizes as expressions in the batch
    names      the one owner of names
    batches    batch sizes as closed ranges
    sized      sizes beside the batch, as they were declared
    atoms      arguments of ops: walked, replaced, shown, told as data
    trace      values, ops, output; `check(plan)`; how a plan prints
    solve      at which batches a question about sizes has a given answer
    pruning    a plan without ops that nothing can tell from not having run
"""

from ariadne.plan.atoms import Ref, substitute, uses
from ariadne.plan.batches import Batches
from ariadne.plan.expr import FUNCTIONS, Expr
from ariadne.plan.names import HELPERS, Namespace, one_line
from ariadne.plan.pruning import Disjoint, Groups, prune, reached, without
from ariadne.plan.schema import WHOLE, bind, may_draw, tensors_in, writes_silently, written_arguments
from ariadne.plan.sized import MOST, Size, sizes_at, sizes_in
from ariadne.plan.solve import where
from ariadne.plan.strided import as_bytes, layout, other_layout, own, storage_of
from ariadne.plan.trace import (
    PLAIN,
    Apart,
    Assumption,
    Dim,
    ModuleCall,
    Region,
    Store,
    TraceNode,
    TracePlan,
    Value,
    check,
    short_dtype,
)
