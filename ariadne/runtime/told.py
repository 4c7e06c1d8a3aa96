"""What a split tells of itself: its name, its sources, the parameters that its sides own; and how it is drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import nn

from ariadne.cut import SIDES, ends_of
from ariadne.errors import ModuleError, SpecError, named
from ariadne.guards import VERSION, stamp
from ariadne.imports import imported
from ariadne.plan import short_dtype
from ariadne.runtime.owners import Owned, SideSlots
from ariadne.runtime.paths import Paths
from ariadne.runtime.variant import Variant
from ariadne.segment import Source
from ariadne.units import size

if TYPE_CHECKING:
    from ariadne.visualization import Depth, Detail, View


@dataclass(frozen=True)
class RuntimeCacheKey:
    """What a prepared split depends on, the concrete batch left out.

    `non_batch_shapes` and `dtypes` are those of the tensor inputs, in order, the batch by its symbol: `(("B", 3, 224, 224),)`
    and `("f32",)`. `mode` is the execution mode.
    """

    plan_signature: str
    split_id: str
    mode: str
    non_batch_shapes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[str, ...]


class NotCalled:
    """What stands for a model, and is none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `SpecError`, which says what to call in its place."""
        raise SpecError(
            f"a {type(self).__name__} was called as a model is, but it is two halves: call "
            "runtime.run_suffix(runtime.run_prefix(...)); to train, run_training_prefix, train_suffix and backward_prefix"
        )


def _part(model: nn.Module, path: str) -> nn.Module | None:
    """The module of that path, if there is one."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class Told(NotCalled, Paths):
    """The plans of a split, and what there is to tell of them."""

    trace_plan = Paths.plan
    rest_reads: Callable[[], Sequence[nn.Parameter]] | None = (
        None  # of a suffix that goes on beyond the plan, as Python
    )

    @property
    def split_id(self) -> str:
        """The string that names the cut in use."""
        return self._main.candidate.split_id

    @property
    def prefix_source(self) -> str:
        """The prefix as Python source."""
        source: Source = self._now[self.settings.spec.trainable].prefix_source
        return source.text

    @property
    def suffix_source(self) -> str:
        """The suffix as Python source."""
        source: Source = self._now[self.settings.spec.trainable].suffix_source
        return source.text

    @property
    def cache_key(self) -> RuntimeCacheKey:
        """What this split depends on; runtimes with equal keys compute the same."""
        plan = self.plan
        inputs = [plan.values[name] for _, name in plan.inputs]
        return RuntimeCacheKey(
            plan.signature,
            self.split_id,
            self.settings.mode,
            tuple(tuple(d if isinstance(d, int) else d.source for d in v.shape) for v in inputs),
            tuple(short_dtype(v.dtype) for v in inputs if v.dtype is not None),
        )

    def prefix_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the prefix reads, each once: for the optimizer that `backward_prefix` steps.

        A `Parameter` that forward reads and `model.parameters()` lacks, in a plain list for one, is not among them.
        Where Python branches on data, those of all paths: what no known path reads is counted to one side now, and stays there.
        So with what the plans of other states of the model read, such as heads that a flag chooses between, once each has run.
        Raises `ModuleError` where a module was replaced whose parameters no call has met since.
        """
        return [*self._listed().prefix]

    def suffix_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the suffix reads, each once: for the optimizer of `train_suffix`, save the shared.

        Those that forward reads nowhere are among them, since the loss may.
        """
        return [*self._listed().suffix]

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that both sides read, as tied embeddings; `backward_prefix` completes their gradients."""
        return [*self._listed().shared]

    def _listed(self) -> Owned:
        """What the sides own, as it is told the user; note is taken of the parameters that neither reads."""
        now, owned = self._now[True], self._owned()
        if self.settings.on_change == "capture":
            for path in sorted({path for reads in now.reads.values() for path, _ in reads}):
                # Where Python branches, all that there are now is told.
                if now.prefix_moves is None and _part(self.model, path) is not now.modules[path]:
                    raise ModuleError(
                        f"{named(path)} was replaced since the last call with gradients, and which side has its parameters shows "
                        "at the next: run runtime.learn(example_inputs), and ask then"
                    )
            owned = self._with_further(owned)
            mine = {id(p) for p in (*owned.prefix, *owned.suffix)}
            self._unlisted = {id(p): ref(p) for p in self.model.parameters() if id(p) not in mine}
            self._listed_all = set()
        return owned.registered(self.model)

    def _with_further(self, owned: Owned) -> Owned:
        """With what other plans read that serve the model as it may be again, such as a head that a flag chooses."""
        further: dict[str, dict[int, nn.Parameter]] = {side: {} for side in SIDES}
        known = {id(p) for p in (*owned.prefix, *owned.suffix)}
        for variant in self._variants:
            for side, reads in variant.reads.items() if variant.serves(True) else ():
                for path, name in reads:
                    if path in variant.modules and _part(self.model, path) is variant.modules[path]:
                        p = variant.modules[path]._parameters.get(name)
                        if p is not None and id(p) not in known:
                            further[side][id(p)] = p
        before, after = (found.values() for found in further.values())
        return Owned.of((*owned.prefix, *before), (*owned.suffix, *after)) if before or after else owned

    def _owned(self) -> Owned:
        now = self._now[True]
        if now.prefix_moves is None:
            return now.owned()
        variants, dicts, total, slots = self._slots
        if VERSION is None or variants != self._variants or stamp(dicts) != total:
            sides, parts = self.sides(complete=True), dict(self.model.named_modules(remove_duplicate=False))
            slots = SideSlots(
                [[(parts[path]._parameters, key) for path, key in sides[side] if path in parts] for side in SIDES]
            )
            if VERSION is not None:
                dicts = [m._modules for m in self.model.modules()]
                self._slots = [*self._variants], dicts, stamp(dicts), slots
        return slots.owned()

    def _owned_by(self, variant: Variant, known: bool = False) -> Owned:
        """What the sides own in a round of one plan; the prefix, where Python branches, the parameters of all paths.

        `known`: both sides are said to share what they share on any path.
        """
        mine = variant.owned()
        if self.rest_reads is not None:
            mine = Owned.of(mine.prefix, (*mine.suffix, *self.rest_reads()))
        if variant.opaque:
            mine = replace(mine, guessed=True)
        if variant.prefix_moves is None:
            return mine
        every = self._owned()
        owned = replace(Owned.of(every.prefix, mine.suffix), guessed=mine.guessed)
        return replace(owned, shared=every.shared) if known else owned

    def _cast_twice(self, variant: Variant, owned: Owned) -> Sequence[str]:
        """The names of parameters that autocast may cast for ops on both sides, in a round of one plan."""
        if self.rest_reads is None:
            return variant.cast
        both = {id(p) for p in owned.shared}
        return [name for name, p in self.model.named_parameters() if id(p) in both] if both else []

    def __repr__(self) -> str:
        c, ends = self.candidate, ends_of(self.plan)
        return (
            f"SplitRuntime({type(self.model).__name__}, {c.split_id}{f' after {c.after}' if c.after else ''}, "
            f"{c.prefix_ops} + {c.suffix_ops} ops, {len(c.live)} value(s) across, {size(c.boundary_bytes)} per sample, "
            f"where the input has {size(ends.input_bytes)})"
        )

    def visualize(
        self,
        view: View = "trace",
        outpath: str | os.PathLike[str] | None = None,
        *,
        fileformat: str = "svg",
        return_dot: bool = False,
        view_detail: Detail = "module",
        max_module_depth: Depth = "auto",
        show_operation_targets: bool = False,
        show_debug_markers: bool = False,
        show_node_indices: bool = False,
        fold_repeats: bool = True,
    ) -> str | Path:
        """Draw the plan ("trace"), or the plan with the cut in use ("split"), and return the path of the picture.

        With `return_dot` the DOT text is returned instead, which needs no Graphviz; a picture is then drawn only if `outpath`
        is given. `outpath`: without the ending; None means "trace_graph" or "split_graph" here. `fileformat`: svg, pdf or
        png, by the Graphviz program; dot, the text itself; or html, a page whose modules open and close, all ops in it.

        `view_detail`: "module" draws each module as one box or, where it is open, as its parts with a line around them;
        "operation" draws every op. `max_module_depth`: modules that lie that many deep in others are drawn closed; None
        opens all; "auto" opens, from the largest, as many as fit on two screens. `fold_repeats`: blocks that follow one another
        and are alike are drawn once, as "× 12", save one that the cut falls into; False draws each. The `show_…` options add ATen
        targets; what is written, drawn, aliased and switched, with dtypes, bytes and buffers; and the numbers of the ops.

        Nothing is run or captured for it. Raises `SpecError` for options that have no meaning, and `VisualizationError` where
        Graphviz is missing or fails; the DOT text is then beside where the picture would be.

        >>> runtime.visualize(view="split", outpath="split_graph", fileformat="svg")
        PosixPath('split_graph.svg')
        """
        drawn: str | Path = imported("ariadne.visualization").visualize(
            self.plan,
            self.candidate,
            view=view,
            outpath=outpath,
            fileformat=fileformat,
            return_dot=return_dot,
            view_detail=view_detail,
            max_module_depth=max_module_depth,
            show_operation_targets=show_operation_targets,
            show_debug_markers=show_debug_markers,
            show_node_indices=show_node_indices,
            fold_repeats=fold_repeats,
        )
        return drawn
