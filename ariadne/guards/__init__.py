"""Guards: what forward looked at, and whether that is still so when a plan is used again.

Recordings and the model flow in; checks that run at each call, in microseconds, flow out. The files, in import
order::

    contents      what a container holds, by the methods of Python's own class
    attributes    what Python keeps behind a module's attribute
    whole         parts of a model that are taken as they are
    versions      numbers that change when a dict is written
    at_once       many things held against what they were in one call
    classes       what a class gives for a name
    functions     which Python functions are reached from what forward reads
    kept          what a guard holds of things that can change by themselves
    remembered    what functions had kept that forward asked again
    steps         what a function reads, by the instructions in its code
    readers       what classes tell of each read of their objects
    opened        what things hold that are no plain containers
    facts         dtypes, devices and shapes of tensors, compared in one call
    marks         what stands on tensors beside their values: attributes, strides
    first_calls   what a first call makes and keeps
    last_size     what is kept for the batch of a call
    stood         what earlier calls put into attributes, where a plan makes it anew
    told          what stands in a thing, as plain values
    outside       one thing outside of the model, as it was
    ties          which tensors in containers are which
    switches      settings of torch that forward asks for
    kinds         what abstract classes say is derived from them
    instructions  the few in a function's code that tell what it loads and assigns outside of itself
    links         what one step of such a read leads to
    codes         the code that a function may run, as far as names lead
    world         what forward asks the machine that it runs on
    around        what forward's own functions read outside of the model
    profiled      the block in which these functions are looked at as they start
    searched      what a search through Python objects read, as it was
    roots         the variables and objects outside of a model that forward reaches
    effects       what forward puts into containers
    left          what a first call leaves, and what another one would have left
    given         inputs that are no tensors, and what they held
    recording     what was seen of one forward
    counted       what counts of an attribute that forward read
    referred      further references to the model's tensors by which forward reached them
    within        what stands in Python modules, on functions and on tensors that others lead to
    baseline      the model's structure, flags, hooks and Python state at capture
    tensors       which of them a plan rests on; which are tied
    watched       what stands in dicts, compared again only after one was written
    sizes         whether the sizes of a call are those that a plan serves
    bound         a call in the example's form
    explained     what a model that is refused has otherwise than at capture
    calls         what is checked at each call
    further       what one of these checks asks beyond another
"""

from ariadne.guards.attributes import (
    BOOKKEEPING,
    DEPTH,
    LEAVES,
    MISSING,
    SIMPLE,
    Attribute,
    Slots,
    bound_to,
    follow,
    held,
    is_a,
    is_array,
    is_followed,
    is_iterator,
    is_opaque,
    is_ours,
    is_raw,
    is_torchs_own,
    lasts,
    may_get_fields,
    own_of,
    place,
    simple,
    slot_of,
    slots_of,
    strays,
    variables,
)
from ariadne.guards.baseline import GLOBAL_HOOKS, Baseline, copied_model, global_hooks, shown, state_types
from ariadne.guards.bound import as_before, differ_in_keys_alone, in_order, matched, signature_of
from ariadne.guards.calls import ModuleGuard, entrance, explain, references_hold
from ariadne.guards.classes import own_dict
from ariadne.guards.codes import codes_of
from ariadne.guards.contents import contents_of, refill
from ariadne.guards.counted import owner_of
from ariadne.guards.effects import (
    Change,
    Containers,
    Effects,
    Place,
    Put,
    Rule,
    attributes_of,
    effects_of,
    refusal,
    refused,
    stores_beside_caches,
    stores_of,
)
from ariadne.guards.explained import other_structure
from ariadne.guards.facts import alike
from ariadne.guards.first_calls import MadeOf, Spot, calls_of, not_called, undisturbed
from ariadne.guards.further import Further, enter_alike
from ariadne.guards.given import Given
from ariadne.guards.kept import has_grown
from ariadne.guards.last_size import telling_batch
from ariadne.guards.left import Elsewhere, Left, Site, told_entries
from ariadne.guards.opened import SHOWING, referent
from ariadne.guards.profiled import hearing, surroundings
from ariadne.guards.recording import Effect, Event, Flag, Recording
from ariadne.guards.remembered import Memories, refuse_pushed_out
from ariadne.guards.roots import Reached, outside_of, outside_with_code
from ariadne.guards.searched import Code, searched_once
from ariadne.guards.switches import (
    SETTERS,
    SWITCHES,
    TORCH,
    Switched,
    caches_parametrizations,
    function_modes,
    no_weights_cached,
)
from ariadne.guards.tensors import StateGuard, found_alike, sizes_count, unread_alike
from ariadne.guards.told import told_of, without_content
from ariadne.guards.versions import VERSION, stamp
from ariadne.guards.whole import MARK, Taken, looked_into, opaque
from ariadne.guards.world import Question, asker
