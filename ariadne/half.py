"""A half: one side of a split, loaded from a file, without the model's code and without the other side."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ariadne.boundary import BoundaryPayload
from ariadne.cut import SIDES, CompileOptions, ExecutionMode, SplitCandidate, SplitSpec, parse_boundary
from ariadne.errors import BoundaryError, HalfError, InputError, SpecError, TrainingError
from ariadne.guards import Baseline
from ariadne.halves import (
    Moves,
    Schema,
    Seal,
    Side,
    Weights,
    copy_kept,
    count,
    empty,
    export,
    flag,
    gathered,
    given,
    items,
    known,
    left,
    need,
    read,
    read_flags,
    refuse_others,
    refuse_unfit,
    replace_by,
    state_of,
    tensors_of,
    told_packed,
)
from ariadne.halves import weights as files
from ariadne.plan import Store, TracePlan, sizes_in
from ariadne.runtime import Settings, SplitRuntime, Variant, taps


class Half(nn.Module):
    """One side of a split, loaded from a file by `ariadne.load`: a module with that side's tensors under the model's own names.

    `part` is "prefix" or "suffix", `made_by` the versions that saved it. A prefix has `run_prefix`, `run_training_prefix` and
    `backward_prefix`, a suffix `run_suffix` and `train_suffix`, which mean what they do on `SplitRuntime`; those of
    the side that is
    absent raise `SpecError`. `.parameters()`, `.to()`, `state_dict()`, `load_state_dict`, optimizers and `copy.deepcopy` work as on
    any module, and calling it runs its side without gradients. `other_weights`: whether a suffix takes boundaries whose prefix was
    saved with other weights; it does not, unless told to. `adds_shares`: whether who trains it adds up what both halves give to
    the gradients of `shared_parameters()`; where there are any, training is refused until it is set.

    >>> half = ariadne.load("edge.safetensors")
    >>> boundary = half.run_prefix(torch.randn(8, 3, 224, 224))
    """

    _root: nn.Module
    _data: dict[str, Any]
    part: str
    made_by: dict[str, str]
    other_weights: bool
    adds_shares: bool

    def __init__(self, root: nn.Module, runtime: SplitRuntime, data: dict[str, Any]) -> None:
        super().__init__()
        # One set of tables, so that whatever goes through this module's tensors goes through those that the plans read.
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training
        made_by = {who: data[who] for who in ("ariadne", "torch")}
        own: dict[str, Any] = {
            "part": data["part"],
            "made_by": made_by,
            "other_weights": False,
            "adds_shares": False,
            "_handed": [],
        }  # by no name can a tensor be in the way
        self.__dict__.update(own, _root=root, _runtime=runtime, _data=data)
        self._seal(data["digest"])

    @property
    def runtime(self) -> SplitRuntime:
        """What runs it: a split runtime whose other side is absent."""
        found: SplitRuntime = self.__dict__["_runtime"]
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this side without gradients."""
        return self.run_prefix(*args, **kwargs) if self.part == SIDES[0] else self.run_suffix(*args, **kwargs)

    def run_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """As `SplitRuntime.run_prefix`."""
        boundary = self.runtime.run_prefix(*args, **kwargs)
        boundary.weights = self.digest
        return boundary

    def run_suffix(self, boundary: BoundaryPayload) -> Any:
        """As `SplitRuntime.run_suffix`; `BoundaryError` also where the prefix was saved with other weights."""
        self._refuse_others(boundary)
        return self.runtime.run_suffix(boundary)

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """As `SplitRuntime.run_training_prefix`; `TrainingError` where a parameter is tied to one of the other half."""
        self._refuse_tied()
        boundary = self.runtime.run_training_prefix(*args, **kwargs)
        boundary.weights = self.digest
        return boundary

    def train_suffix(
        self, boundary: BoundaryPayload, targets: Any = None, *, loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> tuple[torch.Tensor, taps.Gradients]:  # fmt: skip
        """As `SplitRuntime.train_suffix`; `TrainingError` where a parameter is tied to one of the other half."""
        self._refuse_tied()
        self._refuse_others(boundary)
        return self.runtime.train_suffix(boundary, targets, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler)

    def backward_prefix(
        self, boundary: BoundaryPayload, boundary_grads: Mapping[str, torch.Tensor | None], *,
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> None:  # fmt: skip
        """As `SplitRuntime.backward_prefix`."""
        self.runtime.backward_prefix(boundary, boundary_grads, optimizer=optimizer, scaler=scaler)

    @property
    def attributes(self) -> dict[str, Any]:
        """What this side's forward has left in plain attributes, by the names that the model has for them.

        A list or a dict that forward fills is one of the half's own: it is empty when the half is loaded, and has what this side
        puts into it. Clear it as you would the model's; a server does so before each call, since nobody else would.

        >>> half.attributes["losses"]
        [tensor(0.2871)]
        """
        return left(self._root, self._stores())

    def _stores(self) -> list[Store]:
        return [store for plan in self.runtime._plans for store in plan.stores]

    def _empty(self) -> None:
        """Empty the lists to which forward appends."""
        empty(self._root, self._stores())

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that the other side reads too, as tied embeddings: each half has a copy, and a share of the gradient."""
        return self.runtime.shared_parameters()

    def places(self) -> dict[nn.Parameter, int]:
        """Where each parameter stands in `model.parameters()` of the whole model, as the file says; empty in older files."""
        named = dict(self.named_parameters(remove_duplicate=False))
        return {named[n]: i for n, i in self._data.get("order", {}).items() if n in named}

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """A digest of the whole model's weights when the half was saved; empty once a tensor of the half was written."""
        digest, seal = self.__dict__["_sealed"]
        return str(digest) if digest and seal.holds() else ""

    @property
    def origin(self) -> str:
        """The digest that the half was loaded with, whatever was written since; empty where it had none."""
        return str(self.__dict__["_sealed"][0])

    def _seal(self, digest: str) -> None:
        self.__dict__["_sealed"] = digest, Seal(self)

    def _refuse_others(self, boundary: BoundaryPayload) -> None:
        theirs = getattr(boundary, "weights", "")
        if not theirs or self.other_weights:
            return
        mine = self.digest
        if mine and mine != theirs:
            raise BoundaryError(
                f"the prefix of this boundary was saved with other weights (of a model with digest {theirs}) than this suffix "
                f"({mine}). Save both halves of one model; or set half.other_weights = True if it is meant so"
            )

    def _refuse_tied(self) -> None:
        tied = [] if self.adds_shares else [p for p in self.shared_parameters() if p.requires_grad]
        if not tied:
            return
        names = [n for n, p in self.named_parameters() if any(p is t for t in tied)]
        raise TrainingError(
            f"{names[0]!r} is one parameter for both halves of the model, and each half has a copy: trained apart they would "
            "drift from each other. Freeze it, cut so that one half has it alone, or train both sides in one process; or add up "
            "both gradients before each step, in the order of the whole model, and set half.adds_shares = True"
        )

    def replace_weights(self, weights: Weights) -> None:
        """Put other numbers into all parameters and buffers: those of a state dict, or of a safetensors file.

        The state dict may be the whole model's, and its tensors may be the half's own. All of them are looked at and read first:
        where one is missing, has no data or is of another shape or dtype, or two names of one tied tensor have two values,
        `HalfError` is raised and nothing has changed.

        >>> half.replace_weights(model.state_dict())
        """
        mine = self.state_dict(keep_vars=True)
        found = self._given(weights, mine)
        refuse_unfit(mine, found)
        digest = self._digest_of(found)
        with torch.no_grad():
            replace_by(mine, found)
        self._seal(digest)

    def _given(self, weights: Weights, wanted: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """The tensors that are given of those that are wanted, and of the whole model's where the file says which these are."""
        whole = known(self._data.get("whole"))
        found = given(weights, {*wanted, *(n for each in (whole.names if whole else ()) for n in each)})
        refuse_others(whole.packed if whole else {}, found, self.runtime._plans)
        return found

    def _digest_of(self, found: Mapping[str, torch.Tensor]) -> str:
        """The digest of weights given anew: that of their whole model where they are all of it, else empty."""
        whole = known(self._data.get("whole"))
        return whole.given(found, self) if whole else ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the half to a file, as it is now."""
        data = json.loads(json.dumps(self._data))
        named: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        for entry in data["state"]:
            kind, owner, key = entry[0][0]
            module = self._root.get_submodule(owner)
            found = (module._parameters if kind == "parameter" else module._buffers)[key]
            assert found is not None
            named[f"{owner}.{key}".removeprefix(".")] = found
            entry[2] = found.requires_grad
        plans = [*self.runtime._plans]
        for i, plan in enumerate(plans):
            constants |= {f"constant {i} {n}": t for n, t in plan.constants.items()}
        packed, packs = gathered(plans)
        tensors, rows = files.gather({**named, **constants, **packed})
        for entry in data["state"]:
            entry[3:] = rows[f"{entry[0][0][1]}.{entry[0][0][2]}".removeprefix(".")].told()
        for i, (told, plan) in enumerate(zip(data["plans"], plans, strict=True)):
            for entry, value in zip(told["values"], plan.values.values(), strict=True):
                entry[3:5] = None if value.dtype is None else str(value.dtype), value.device
            for n, thing in plan.objects.items():
                if isinstance(thing, torch.Generator):
                    told["objects"][n][2] = state_of(thing)
            told["objects"] |= {n: told_packed(at, rows) for n, at in packs[i].items()}
            told["constants"] = {
                n: [*rows[f"constant {i} {n}"].told(), str(t.device)] for n, t in plan.constants.items()
            }
        data["digest"], data["weights"] = self.digest, True
        files.write(path, json.dumps(data, separators=(",", ":")), tensors)

    @property
    def boundary_key(self) -> dict[str, str]:
        """What names its boundary, for `ReplayBoundary.from_tensors`: the cut, the plan, and the weights' digest, if known."""
        variant = self._exportable()
        return {"split_id": variant.key[1], "plan_signature": variant.key[0], "weights": self.digest}

    def _exportable(self) -> Variant:
        """Of the variants for inference, the one that serves the most batches."""
        found = [v for p in self.runtime._plans if (v := self.runtime.variant_of(p)).serves(False)]
        if not found:
            raise HalfError("no plan of this half serves calls without gradients; name such examples when it is saved")
        return max(found, key=lambda v: max(b - a for a, b in v.plan.batches.ranges))

    def export(self, path: str | os.PathLike[str]) -> Schema:
        """Write the half for another runtime, as the path's ending says: `.onnx`, torch's `.pt2`, or `.pte` for ExecuTorch.

        The file has this half's weights alone, and takes every batch that its widest plan serves. Its inputs and outputs go by
        the names of forward's inputs, and of the values that cross; the schema that is returned has them in order. An ONNX
        model has these in its metadata too, with what `ReplayBoundary.from_tensors` needs. The half must be of a model in eval
        mode. Raises `HalfError` for what an exporter can't take, naming the op, and where its package is missing: `.onnx` needs
        `ariadne-runtime[export]`, `.pte` executorch.

        >>> half.export("edge.onnx")
        Schema(inputs=('x',), outputs=('relu_6',), batches=(1, 4096))
        """
        variant = self._exportable()
        for guard in variant.guards:
            if not guard():
                guard.explain()
        return export(path, variant.plan, variant.parts[self.part], self._root, self.boundary_key)

    # --- as a module ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Half:
        """As `nn.Module.train`. What was captured holds for one mode only, and calls in the other raise `ModuleError`."""
        self._root.train(mode)
        for module in self.__dict__["_handed"]:
            module.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Half:
        """What `.to()`, `.half()` and the like come to: the plans follow, where nothing in them names a dtype or a device."""
        moves, digest = Moves.of(self, fn, self.runtime._plans), self.digest
        plans = {p: moves.plan(p, self._root) for p in self.runtime._plans}
        self._root._apply(fn, recurse)
        if moves:
            self._run_on(plans)
            self._seal(moves.digest(digest))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Half:
        memo[id(self)] = new = type(self).__new__(type(self))
        for plan in self.runtime._plans:
            copy_kept(plan, memo)
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def _run_on(self, plans: Mapping[TracePlan, TracePlan]) -> None:
        """Run other plans in the place of those that it has."""
        old, baseline = self.runtime, _baseline(self._root, self._data)
        again = {plans[p]: (candidates, baseline) for p, (candidates, _) in old._plans.items()}
        self.__dict__["_runtime"] = SplitRuntime(self._root, old.settings, again, _no_capture)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HalfError("a half isn't pickled: write it with half.save(path), and read it with ariadne.load(path)")

    def __repr__(self) -> str:
        runtime = self.runtime
        held = sum(t.numel() * t.itemsize for t in tensors_of(self))
        plans = f"{len(runtime._plans)} plan" + "s" * (len(runtime._plans) > 1)
        return f"Half({self.part} of {self._data['model']}, {runtime.split_id}, {plans}, {held} bytes of weights)"


def load(
    path: str | os.PathLike[str],
    *,
    mode: ExecutionMode = "generated_eager",
    weights: Weights | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    allow: Collection[str] = (),
    plain: bool = False,
    modules: Mapping[str, Any] | None = None,
    compile_options: Mapping[str, Any] | None = None,
    trust_native_code: bool = False,
) -> Half:
    """The half that `SplitRuntime.save` wrote to a file, ready to run without the model's code; nothing that the file says is run.

    Tensors are mapped from the file, and read from the disk when they are first used. `weights`: others, from a state dict or
    another safetensors file, by the model's names; needed where the half was saved without. `device` and `dtype`: where to, as
    `.to()`. `allow`: the Python classes and functions that the file may name, as "module:qualname", and op libraries, as
    "library::*"; they are imported. `plain`: where containers of the inputs or outputs are of classes that are not allowed,
    take and give dicts and tuples. `modules`: what the file calls of its model and can't hold, modules and methods of
    modules, by the names that they have there ("" is the model itself); they run as they are, on the half's tensors. `mode` and
    `compile_options` are those of `prepare_split`; packages compiled ahead of time are native code, and are taken from a
    `cache_dir` only with `trust_native_code`.

    Raises `HalfError` for a file that is not a half, that names what is not allowed, or whose ops are not here as they were.

    >>> half = ariadne.load("edge.safetensors")
    >>> half
    Half(prefix of ResNet, cut:34, 1 plan, 2739968 bytes of weights)
    """
    if mode == "compiled" and CompileOptions.parse(compile_options).cache_dir is not None and not trust_native_code:
        raise SpecError(
            "cache_dir holds native code, which would be loaded and run: pass trust_native_code=True if you made it yourself"
        )
    _refuse_target(device, dtype)
    with torch.inference_mode(False):  # tensors made within can't be written to, or trained, outside
        data, root, sides, handed = read(path, weights, allow, plain, modules)
        half = Half(root, _runtime(root, sides, data, mode, compile_options), data)
        half.__dict__["_handed"] = handed
        if weights is not None:
            half._seal(half._digest_of(half._given(weights, ())))
        return half if device is None and dtype is None else half.to(device=device, dtype=dtype)


def _refuse_target(device: str | torch.device | None, dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise SpecError(f"dtype is a dtype of floating or complex numbers, such as torch.bfloat16; found {dtype!r}")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            raise SpecError(
                f"device={device!r} is no device that this process can use: {str(error).splitlines()[0][:120]}"
            ) from None


def _runtime(
    root: nn.Module, sides: list[Side], data: Mapping[str, Any], mode: ExecutionMode, options: Mapping[str, Any] | None
) -> SplitRuntime:
    ends = [count(b, "a batch", 0, 2**31) for b in items(data["batches"], "the batches")]
    need(len(ends) == 2, "the batches are malformed")
    lo, hi = ends
    first = sides[0]
    try:
        spec = SplitSpec(
            first.candidate.split_id, first.plan.batch_symbol, (lo, hi), flag(data["trainable"], "trainable")
        )
    except SpecError as error:
        raise HalfError(
            f"this is not a half as Ariadne writes it: {error}. Save it again, or refuse who sent it"
        ) from None
    settings = Settings(spec, parse_boundary(spec.boundary), mode, None, options)
    baseline = _baseline(root, data)
    plans: dict[TracePlan, tuple[tuple[SplitCandidate, ...], Baseline]] = {
        s.plan: ((s.candidate,), baseline) for s in sides
    }
    return SplitRuntime(root, settings, plans, _no_capture)


def _baseline(root: nn.Module, data: Mapping[str, Any]) -> Baseline:
    """What guards compare a half with: its own structure, and the training flags that its model was captured with."""
    found = Baseline(root)
    found.training = dict(read_flags(data["flags"]))
    return found


def _no_capture(example: Any, train: bool, like: Any) -> Any:
    sizes = "".join(f", {symbol} {size}" for symbol, size in sizes_in(example.sizes, example.leaves).items())
    raise InputError(
        f"no plan in this half's file serves batch {example.batch}{sizes} {'with' if train else 'without'} gradients, in the modes "
        "and with the dtypes of this call, and a half can't capture one. Run the split in such a way before it is saved, or "
        "name such inputs in save(..., examples=...)"
    )
