"""A half: one side of a split, loaded from a file, without the model's code and without the other side."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ariadne.boundary import BoundaryPayload
from ariadne.cut import SIDES, CompileOptions, ExecutionMode, SplitCandidate, SplitSpec, parse_boundary
from ariadne.errors import BoundaryError, HalfError, InputError, SpecError, nearest
from ariadne.guards import Baseline
from ariadne.halves import (
    FORMAT,
    VERSION,
    Classes,
    File,
    Row,
    Side,
    SideReader,
    count,
    flag,
    items,
    mapped,
    need,
    parsed,
    row,
    text,
)
from ariadne.halves import weights as files
from ariadne.plan import TracePlan, Value
from ariadne.runtime import Settings, SplitRuntime, training

_KEYS = frozenset("format ariadne torch part model weights digest ops state plans batches trainable".split())
Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]


class Half(nn.Module):
    """One side of a split, loaded from a file by `ariadne.load`: a module with that side's tensors under the model's own names.

    `part` is "prefix" or "suffix", `made_by` the versions that saved it. A prefix has `run_prefix`, `run_training_prefix` and
    `backward_prefix`, a suffix `run_suffix` and `train_suffix`, which mean what they do on `SplitRuntime`; those of
    the side that is
    absent raise `SpecError`. `.parameters()`, `.to()`, `state_dict()`, `load_state_dict`, optimizers and `copy.deepcopy` work as on
    any module, and calling it runs its side without gradients. `other_weights`: whether a suffix takes boundaries whose prefix was
    saved with other weights; it does not, unless told to.

    >>> half = ariadne.load("edge.safetensors")
    >>> boundary = half.run_prefix(torch.randn(8, 3, 224, 224))
    """

    _root: nn.Module
    _data: dict[str, Any]
    part: str
    made_by: dict[str, str]
    other_weights: bool

    def __init__(self, root: nn.Module, runtime: SplitRuntime, data: dict[str, Any]) -> None:
        super().__init__()
        # One set of tables, so that whatever goes through this module's tensors goes through those that the plans read.
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training
        made_by = {who: data[who] for who in ("ariadne", "torch")}
        own = {
            "part": data["part"],
            "made_by": made_by,
            "other_weights": False,
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
        """As `SplitRuntime.run_training_prefix`."""
        boundary = self.runtime.run_training_prefix(*args, **kwargs)
        boundary.weights = self.digest
        return boundary

    def train_suffix(
        self, boundary: BoundaryPayload, targets: Any = None, *, loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> tuple[torch.Tensor, training.Gradients]:  # fmt: skip
        """As `SplitRuntime.train_suffix`."""
        self._refuse_others(boundary)
        return self.runtime.train_suffix(boundary, targets, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler)

    def backward_prefix(
        self, boundary: BoundaryPayload, boundary_grads: Mapping[str, torch.Tensor | None], *,
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> None:  # fmt: skip
        """As `SplitRuntime.backward_prefix`."""
        self.runtime.backward_prefix(boundary, boundary_grads, optimizer=optimizer, scaler=scaler)

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that the other side reads too, as tied embeddings: each half has a copy, and a share of the gradient."""
        return self.runtime.shared_parameters()

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """A digest of the whole model's weights when the half was saved; empty once a tensor of the half was written."""
        digest, tensors, versions = self.__dict__["_sealed"]
        if not digest or [t._version for t in tensors] != versions or [*map(id, _tensors(self))] != [*map(id, tensors)]:
            return ""
        return str(digest)

    def _seal(self, digest: str) -> None:
        tensors = _tensors(self)
        self.__dict__["_sealed"] = digest, tensors, [t._version for t in tensors]

    def _refuse_others(self, boundary: BoundaryPayload) -> None:
        theirs = getattr(boundary, "weights", "")
        if not theirs or self.other_weights:
            return
        mine = self.digest
        if mine and mine != theirs:
            raise BoundaryError(
                f"the prefix of this boundary was saved with other weights (of a model with digest {theirs}) than "
                f"this suffix ({mine}). "
                "Save both halves of one model; or set half.other_weights = True if it is meant so"
            )

    def replace_weights(self, weights: Weights) -> None:
        """Put other numbers into all parameters and buffers: those of a state dict, or of a safetensors file.

        The state dict may be the whole model's. All names, shapes and dtypes are looked at first: where one is
        missing or another, or
        two names of one tied tensor have two values, `HalfError` is raised and nothing has changed.

        >>> half.replace_weights(model.state_dict())
        """
        mine = self.state_dict(keep_vars=True)
        given = _given(weights, mine)
        _refuse_unfit(mine, given)
        with torch.no_grad():
            for name, t in mine.items():
                t.copy_(given[name])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the half to a file, as it is now."""
        data = json.loads(json.dumps(self._data))
        named: dict[str, torch.Tensor] = {}
        constants: dict[str, torch.Tensor] = {}
        for entry in data["state"]:
            kind, owner, key = entry[0][0]
            module = self._root.get_submodule(owner)
            tables: dict[str, Mapping[str, Any]] = {"parameter": module._parameters, "buffer": module._buffers}
            found: torch.Tensor = tables[kind][key]
            named[f"{owner}.{key}".removeprefix(".")] = found
            entry[2] = found.requires_grad
        plans = [*self.runtime._plans]
        for i, plan in enumerate(plans):
            constants |= {f"constant {i} {n}": t for n, t in plan.constants.items()}
        tensors, rows = files.gather({**named, **constants})
        for entry in data["state"]:
            entry[3:] = rows[f"{entry[0][0][1]}.{entry[0][0][2]}".removeprefix(".")].told()
        for i, (told, plan) in enumerate(zip(data["plans"], plans, strict=True)):
            told["constants"] = {
                n: [*rows[f"constant {i} {n}"].told(), str(t.device)] for n, t in plan.constants.items()
            }
        data["digest"], data["weights"] = self.digest, True
        files.write(path, json.dumps(data, separators=(",", ":")), tensors)

    # --- as a module ------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Half:
        """As `nn.Module.train`. What was captured holds for one mode only, and calls in the other raise `ModuleError`."""
        self._root.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Half:
        """What `.to()`, `.half()` and the like come to: the plans follow, where nothing in them names a dtype or a device."""
        moves = _Moves.of(self, fn)
        plans = {p: moves.plan(p) for p in self.runtime._plans}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if moves:
            old = self.runtime
            baseline = Baseline(self._root)
            again = {plans[p]: (candidates, baseline) for p, (candidates, _) in old._plans.items()}
            self.__dict__["_runtime"] = SplitRuntime(self._root, old.settings, again, _no_capture)
        return self

    def __repr__(self) -> str:
        runtime = self.runtime
        held = sum(t.numel() * t.itemsize for t in _tensors(self))
        plans = f"{len(runtime._plans)} plan" + "s" * (len(runtime._plans) > 1)
        return f"Half({self.part} of {self._data['model']}, {runtime.split_id}, {plans}, {held} bytes of weights)"


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@dataclass(frozen=True)
class _Moves:
    """What moving a half's tensors does to their dtypes and devices: from which to which."""

    dtypes: Mapping[torch.dtype, torch.dtype]
    devices: Mapping[str, str]

    @classmethod
    def of(cls, half: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> _Moves:
        dtypes, devices = {}, {}
        for t in _tensors(half):
            now = fn(torch.empty(0, dtype=t.dtype, device=t.device))
            if now.dtype != t.dtype:
                dtypes[t.dtype] = now.dtype
            if now.device.type != t.device.type:
                devices[t.device.type] = now.device.type
        return cls(dtypes, devices)

    def __bool__(self) -> bool:
        return bool(self.dtypes or self.devices)

    def plan(self, plan: TracePlan) -> TracePlan:
        """The plan for tensors of the other dtypes and devices; `HalfError` where it names some."""
        if not self:
            return plan
        written = any(v.kind == "constant" and v.shape for v in plan.values.values()) and bool(self.devices)
        if plan.assumption.dtypes or written or any(n.region.autocast for n in plan.nodes):
            what = ", ".join(f"{a} to {b}" for a, b in (*self.dtypes.items(), *self.devices.items()))
            raise HalfError(
                f"this half can't go from {what}: forward reads or names dtypes or devices, or makes tensors of its "
                f"own, and may run "
                "otherwise there. Move the model, prepare the split there, and save the half again"
            )

        def moved(value: Value) -> Value:
            if value.dtype is None or value.kind == "constant":
                return value
            kind = value.device.partition(":")[0]
            return replace(
                value,
                dtype=self.dtypes.get(value.dtype, value.dtype),
                device=self.devices.get(kind, value.device),
            )

        return replace(plan, values={n: moved(v) for n, v in plan.values.items()})


def _given(weights: Weights, wanted: Collection[str]) -> Mapping[str, torch.Tensor]:
    """The tensors of a state dict, or those of a safetensors file that are wanted."""
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise SpecError(f"weights are a state dict or the path of a safetensors file; found {type(weights).__name__}")
    file = File(weights)
    return {name: file.tensor(name) for name in wanted if name in file.keys}


def _refuse_unfit(mine: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Raise `HalfError` unless each of these tensors is given, of its shape and dtype, and tied ones with one value."""
    wrong = []
    first: dict[int, str] = {}
    for name, t in mine.items():
        found = given.get(name)
        if not isinstance(found, torch.Tensor):
            near = nearest(name, given, 1)
            wrong.append(f"{name!r} is missing" + (f" (there is {near})" if near else ""))
        elif (found.dtype, found.shape) != (t.dtype, t.shape):
            wrong.append(f"{name!r} is {found.dtype}{list(found.shape)}, the half has {t.dtype}{list(t.shape)}")
        elif first.setdefault(id(t), name) != name and not torch.equal(given[first[id(t)]], found):
            wrong.append(f"{first[id(t)]!r} and {name!r} are one tensor in the model, and are given with two values")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise HalfError(
            f"these weights don't fit the half, and nothing was replaced: {wrong[0]}{more}. Give the state dict of "
            f"the model that it is of"
        )


def load(
    path: str | os.PathLike[str],
    *,
    mode: ExecutionMode = "generated_eager",
    weights: Weights | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    allow: Collection[str] = (),
    plain: bool = False,
    compile_options: Mapping[str, Any] | None = None,
    trust_native_code: bool = False,
) -> Half:
    """The half that `SplitRuntime.save` wrote to a file, ready to run without the model's code; nothing that the file says is run.

    Tensors are mapped from the file, and read from the disk when they are first used. `weights`: others, from a
    state dict or another
    safetensors file, by the model's names; needed where the half was saved without. `device` and `dtype`: where to, as `.to()`.
    `allow`: the Python classes and functions that the file may name, as "module:qualname", and op libraries, as "library::*"; they
    are imported. `plain`: where containers of the inputs or outputs are of classes that are not allowed, take and give dicts and
    tuples. `mode` and `compile_options` are those of `prepare_split`; packages compiled ahead of time are native
    code, and are taken
    from a `cache_dir` only with `trust_native_code`.

    Raises `HalfError` for a file that is not a half, that names what is not allowed, or whose ops are not here as they were.

    >>> half = ariadne.load("edge.safetensors")
    >>> half
    Half(prefix of ResNet, cut:34, 1 plan, 2739968 bytes of weights)
    """
    if mode == "compiled" and CompileOptions.parse(compile_options).cache_dir is not None and not trust_native_code:
        raise SpecError(
            "cache_dir holds native code, which would be loaded and run: pass trust_native_code=True if you made it yourself"
        )
    file = File(path)
    data = parsed(file)
    need("format" in data, "it has no format")
    if data["format"] != FORMAT:
        raise HalfError(
            f"this half has format {str(data['format'])[:20]}, and this Ariadne ({VERSION}) reads format {FORMAT}. "
            f"Save it with this "
            "version, or load it with the one that saved it"
        )
    need(data.keys() - {"pipeline"} == _KEYS, "its data have other parts than expected")
    part = text(data["part"], "the part")
    need(part in SIDES, f"its part is {part!r}")
    for key in ("ariadne", "torch", "model", "digest"):
        text(data[key], key)
    state = _state(data["state"])
    spaces = frozenset(a.removesuffix("::*") for a in allow if a.endswith("::*"))
    known = {place: at for places, _, _, at in state for place in places}
    reader = SideReader(part, known, mapped(data["ops"], "the ops"), Classes(allow, plain), spaces)
    constants: dict[str, tuple[Row, str]] = {}
    sides = [reader.read(plan, constants, i) for i, plan in enumerate(items(data["plans"], "the plans"))]
    need(0 < len(sides) <= 64, "it has no plans, or too many")
    need(len({s.plan.training for s in sides}) == 1, "its plans are of two modes")
    _tell(data)
    kept = flag(data["weights"], "weights")
    if not kept and weights is None:
        raise HalfError(
            "this half was saved without weights; pass weights=, a state dict of its model or the path of a safetensors file"
        )
    root = _tree(state, dict(_read(state, file if kept else None, weights)), sides[0].plan.training)
    for i, side in enumerate(sides):
        mine = {n.partition(" ")[2]: at for n, at in constants.items() if n.partition(" ")[0] == str(i)}
        _fill(side.plan, mine, file)
    half = Half(root, _runtime(root, sides, data, mode, compile_options), data)
    if weights is not None:
        half._seal("")
    return half if device is None and dtype is None else half.to(device=device, dtype=dtype)


def _read(
    state: list[tuple[list[tuple[str, str, str]], bool, bool, Row]], file: File | None, weights: Weights | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a half by their number: from its file, or those of its state dict from elsewhere."""
    rows = {str(i): at for i, (*_, at) in enumerate(state)}
    if weights is None:
        assert file is not None
        yield from file.tensors(rows)
        return
    names = {
        str(i): [f"{p}.{k}".removeprefix(".") for _, p, k in places]
        for i, (places, keep, *_) in enumerate(state)
        if keep
    }
    given = _given(weights, {n for found in names.values() for n in found})
    wanted = {i: torch.empty(at.shape, dtype=at.dtype, device="meta") for i, at in rows.items()}
    _refuse_unfit({n: wanted[i] for i, found in names.items() for n in found}, given)
    others = {i: at for i, at in rows.items() if i not in names}
    if others and file is None:
        raise HalfError(
            "this half was saved without weights, and has tensors that no state dict holds; save it with them"
        )
    yield from file.tensors(others) if file is not None else ()
    for i, found in names.items():
        at, t = rows[i], given[found[0]].detach()
        fits = t.stride() == at.strides and t.device.type == "cpu" and not isinstance(weights, Mapping)
        yield i, t if fits else torch.empty_strided(at.shape, at.strides, dtype=at.dtype).copy_(t)


def _tell(made_by: Mapping[str, str]) -> None:
    """Warn where another version made the file: ops are what they were, but kernels may round in another way."""
    here = {"ariadne": VERSION, "torch": torch.__version__}
    other = [f"{who} {made_by[who]} (here {here[who]})" for who in here if _minor(made_by[who]) != _minor(here[who])]
    if other:
        warnings.warn(
            f"this half was saved with {' and '.join(other)}; all its ops are here as they were, but results may differ in the "
            "last bits",
            stacklevel=3,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _state(value: Any) -> list[tuple[list[tuple[str, str, str]], bool, bool, Row]]:
    """The tensors of the half: their places, whether state dicts have them, whether they train, and where they lie."""
    found = []
    seen: set[tuple[str, str]] = set()
    for entry in items(value, "the tensors"):
        parts = items(entry, "a tensor")
        need(len(parts) == 8, "a tensor is malformed")
        places = []
        for place in items(parts[0], "the places of a tensor"):
            where = [text(p, "a place") for p in items(place, "a place")]
            need(len(where) == 3, "a place is malformed")
            kind, path, key = where
            steps = path.split(".") if path else []
            need(kind in ("parameter", "buffer") and all(steps) and len(steps) <= 64, "a tensor is kept nowhere")
            need(key != "" and "." not in key and (path, key) not in seen, f"the name {key[:80]!r} is taken")
            seen.add((path, key))
            places.append((kind, path, key))
        at = row(parts[3:])
        trains = flag(parts[2], "requires_grad")
        need(
            bool(places) and (not trains or at.dtype.is_floating_point or at.dtype.is_complex), "a tensor is malformed"
        )
        need(not trains or places[0][0] == "parameter", "a buffer requires grad")
        found.append((places, flag(parts[1], "persistent"), trains, at))
    return found


def _tree(
    state: list[tuple[list[tuple[str, str, str]], bool, bool, Row]], tensors: Mapping[str, torch.Tensor], train: bool
) -> nn.Module:
    """Plain modules with the tensors of the half under the model's own names."""
    root = nn.Module()
    taken: set[tuple[str, str]] = {(path, key) for places, *_ in state for _, path, key in places}
    for i, (places, persistent, trains, _) in enumerate(state):
        t = tensors[str(i)]
        made: torch.Tensor = nn.Parameter(t, requires_grad=trains) if places[0][0] == "parameter" else t
        for kind, path, key in places:
            need((kind == "parameter") == isinstance(made, nn.Parameter), f"{key[:80]!r} is a parameter and a buffer")
            module = _module(root, path, taken)
            tables: dict[str, dict[str, Any]] = {"parameter": module._parameters, "buffer": module._buffers}
            tables[kind][key] = made
            if not persistent:
                module._non_persistent_buffers_set.add(key)
    root.train(train)
    return root


def _module(root: nn.Module, path: str, taken: set[tuple[str, str]]) -> nn.Module:
    at, above = root, ""
    for step in path.split(".") if path else []:
        need((above, step) not in taken, f"{step[:80]!r} is a tensor and a module")
        if step not in at._modules:
            need(not hasattr(nn.Module, step), f"a module is called {step[:80]!r}")
            at._modules[step] = nn.Module()
        child = at._modules[step]
        assert child is not None
        at, above = child, f"{above}.{step}".removeprefix(".")
    return at


def _fill(plan: TracePlan, rows: Mapping[str, tuple[Row, str]], file: File) -> None:
    """Read a plan's constants."""
    for name, t in file.tensors({n: at for n, (at, _) in rows.items()}):
        value = plan.values[name]
        need((value.dtype, value.shape) == (t.dtype, tuple(t.shape)), f"the constant {name!r} is another")
        plan.constants[name] = t.to(rows[name][1])  # type: ignore[index]


def _runtime(
    root: nn.Module, sides: list[Side], data: Mapping[str, Any], mode: ExecutionMode, options: Mapping[str, Any] | None
) -> SplitRuntime:
    ends = [count(b, "a batch", 1, 2**31) for b in items(data["batches"], "the batches")]
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
    baseline = Baseline(root)
    plans: dict[TracePlan, tuple[tuple[SplitCandidate, ...], Baseline]] = {
        s.plan: ((s.candidate,), baseline) for s in sides
    }
    return SplitRuntime(root, settings, plans, _no_capture)


def _no_capture(example: Any, train: bool, like: Any) -> Any:
    raise InputError(
        f"no plan in this half's file serves batch {example.batch} {'with' if train else 'without'} gradients, in the "
        f"modes and with the "
        "dtypes of this call, and a half can't capture one. Run the split in such a way before it is saved, or name such inputs in "
        "save(..., examples=...)"
    )
