"""A half: one side of a split, loaded from a file, without the model's code and without the other side."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from ariadne import training
from ariadne.baseline import Baseline
from ariadne.boundary import BoundaryPayload
from ariadne.errors import HalfError, InputError, SpecError
from ariadne.frontier import SplitCandidate
from ariadne.halves.atoms import Classes, count, flag, items, mapped, need, text
from ariadne.halves.form import Side, SideReader
from ariadne.halves.save import FORMAT, VERSION
from ariadne.halves.weights import File, Row, parsed, row
from ariadne.part import SIDES
from ariadne.plan import TracePlan
from ariadne.runtime import SplitRuntime
from ariadne.spec import ExecutionMode, SplitSpec, parse_boundary
from ariadne.variant import Settings

_KEYS = frozenset("format ariadne torch part model weights digest ops state plans batches trainable".split())


class Half(nn.Module):
    """One side of a split, loaded from a file by `ariadne.load`: a module with that side's tensors under the model's own names.

    `part` is "prefix" or "suffix". A prefix has `run_prefix`, `run_training_prefix` and `backward_prefix`, a suffix `run_suffix` and
    `train_suffix`, which mean what they do on `SplitRuntime`; those of the side that is absent raise `SpecError`. `.parameters()`,
    `state_dict()`, `load_state_dict`, optimizers and `copy.deepcopy` work as on any module, and so does calling it: it runs its side
    without gradients.

    >>> half = ariadne.load("edge.safetensors")
    >>> boundary = half.run_prefix(torch.randn(8, 3, 224, 224))
    """

    def __init__(
        self, root: nn.Module, runtime: SplitRuntime, part: str, model: str, made_by: Mapping[str, str]
    ) -> None:
        super().__init__()
        # One set of tables, so that whatever goes through this module's tensors goes through those that the plans read.
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training
        self.__dict__.update(_root=root, runtime=runtime, part=part, model_name=model, made_by=dict(made_by))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this side without gradients."""
        runtime: SplitRuntime = self.runtime
        return runtime.run_prefix(*args, **kwargs) if self.part == SIDES[0] else runtime.run_suffix(*args, **kwargs)

    def run_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """As `SplitRuntime.run_prefix`."""
        return self._now().run_prefix(*args, **kwargs)

    def run_suffix(self, boundary: BoundaryPayload) -> Any:
        """As `SplitRuntime.run_suffix`."""
        return self._now().run_suffix(boundary)

    def run_training_prefix(self, *args: Any, **kwargs: Any) -> BoundaryPayload:
        """As `SplitRuntime.run_training_prefix`."""
        return self._now().run_training_prefix(*args, **kwargs)

    def train_suffix(
        self, boundary: BoundaryPayload, targets: Any = None, *, loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> tuple[torch.Tensor, training.Gradients]:  # fmt: skip
        """As `SplitRuntime.train_suffix`."""
        return self._now().train_suffix(boundary, targets, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler)

    def backward_prefix(
        self, boundary: BoundaryPayload, boundary_grads: Mapping[str, torch.Tensor | None], *,
        optimizer: torch.optim.Optimizer | None = None, scaler: Any = None,
    ) -> None:  # fmt: skip
        """As `SplitRuntime.backward_prefix`."""
        self._now().backward_prefix(boundary, boundary_grads, optimizer=optimizer, scaler=scaler)

    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that the other side reads too, such as tied embeddings: each half has a copy, and a share of the gradient."""
        return self._now().shared_parameters()

    def train(self, mode: bool = True) -> Half:
        """As `nn.Module.train`. What was captured holds for one mode only, and calls in the other raise `ModuleError`."""
        self._root.train(mode)
        super().train(mode)
        return self

    def _now(self) -> SplitRuntime:
        found: SplitRuntime = self.runtime
        return found

    def __repr__(self) -> str:
        runtime = self._now()
        held = sum(t.numel() * t.itemsize for t in (*self.parameters(), *self.buffers()))
        plans = f"{len(runtime._plans)} plan" + "s" * (len(runtime._plans) > 1)
        return f"Half({self.part} of {self.model_name}, {runtime.split_id}, {plans}, {held} bytes of weights)"


def load(
    path: str | os.PathLike[str],
    *,
    mode: ExecutionMode = "generated_eager",
    allow: Collection[str] = (),
    plain: bool = False,
    compile_options: Mapping[str, Any] | None = None,
) -> Half:
    """The half that `SplitRuntime.save` wrote to a file, ready to run; nothing that the file says is run, and no model code is needed.

    Tensors are mapped from the file, and read from the disk when they are first used. `allow`: the Python classes and functions that
    the file may name, as "module:qualname", and op libraries, as "library::*"; they are imported. `plain`: where containers of the
    output are of classes that are not allowed, give dicts and tuples. `mode` and `compile_options` are those of `prepare_split`.

    Raises `HalfError` for a file that is not a half, that names what is not allowed, or whose ops are not here as they were.

    >>> half = ariadne.load("edge.safetensors")
    >>> half
    Half(prefix of ResNet, cut:50, 1 plan, 11223344 bytes of weights)
    """
    file = File(path)
    data = parsed(file)
    need(data.keys() == _KEYS, "its data have other parts than expected")
    if data["format"] != FORMAT:
        raise HalfError(
            f"this half has format {str(data['format'])[:20]}, and this Ariadne ({VERSION}) reads format {FORMAT}. Save it with this "
            "version, or load it with the one that saved it"
        )
    part = text(data["part"], "the part")
    need(part in SIDES, f"its part is {part!r}")
    made_by = {"ariadne": text(data["ariadne"], "a version"), "torch": text(data["torch"], "a version")}
    state = _state(data["state"])
    spaces = frozenset(a.removesuffix("::*") for a in allow if a.endswith("::*"))
    known = {place: None for places, *_ in state for place in places}
    reader = SideReader(part, known, mapped(data["ops"], "the ops"), Classes(allow, plain), spaces)
    constants: dict[str, tuple[Row, str]] = {}
    sides = [reader.read(plan, constants, i) for i, plan in enumerate(items(data["plans"], "the plans"))]
    need(bool(sides) and len(sides) <= 64, "it has no plans")
    need(len({s.plan.training for s in sides}) == 1, "its plans are of two modes")
    _tell(made_by)
    root = _tree(state, file, sides[0].plan.training)
    for i, side in enumerate(sides):
        _fill(
            side.plan, {n.partition(" ")[2]: at for n, at in constants.items() if n.partition(" ")[0] == str(i)}, file
        )
    runtime = _runtime(root, sides, data, mode, compile_options)
    return Half(root, runtime, part, text(data["model"], "the model"), made_by)


def _tell(made_by: Mapping[str, str]) -> None:
    """Warn where another version made the file: ops are what they were, but kernels may round in another way."""
    here = {"ariadne": VERSION, "torch": torch.__version__}
    other = [f"{who} {made_by[who]} (here {here[who]})" for who in here if _minor(made_by[who]) != _minor(here[who])]
    if other:
        warnings.warn(
            f"this half was saved with {' and '.join(other)}; all its ops are here as they were, but results may differ in the last bits",
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
            kind, path, key = (text(p, "a place") for p in (*items(place, "a place"), None, None, None)[:3])
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


def _tree(state: list[tuple[list[tuple[str, str, str]], bool, bool, Row]], file: File, train: bool) -> nn.Module:
    """Plain modules with the tensors of the half under the model's own names."""
    root = nn.Module()
    tensors = dict(file.tensors({str(i): at for i, (*_, at) in enumerate(state)}))
    taken: set[tuple[str, str]] = {(path, key) for places, *_ in state for _, path, key in places}
    for i, (places, persistent, trains, _) in enumerate(state):
        t = tensors[str(i)]
        made: torch.Tensor = nn.Parameter(t, requires_grad=trains) if places[0][0] == "parameter" else t
        for kind, path, key in places:
            need((kind == "parameter") == isinstance(made, nn.Parameter), f"{key[:80]!r} is a parameter and a buffer")
            module = _module(root, path, taken)
            (module._parameters if kind == "parameter" else module._buffers)[key] = made  # type: ignore[index]
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
    lo, hi = (count(b, "a batch", 1, 2**31) for b in (*items(data["batches"], "the batches"), None, None)[:2])
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
        f"no plan in this half's file serves batch {example.batch} {'with' if train else 'without'} gradients, in the modes and with the "
        "dtypes of this call, and a half can't capture one. Run the split in such a way before it is saved, or name such inputs in "
        "save(..., examples=...)"
    )
