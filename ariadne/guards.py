"""Guards: what a plan relies on, checked at every call by code that was made for it, and explained where it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from ariadne import tree
from ariadne.errors import BatchError, InputError, ModuleError
from ariadne.expr import Expr
from ariadne.plan import TracePlan, layout, short_dtype

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(nn.modules.module, name)
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


def entrance(plan: TracePlan, model: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]:
    """A function from (args, kwargs) to (batch, leaves...), or to None where any condition on the call does not hold.

    It checks structure, type, rank, dims, dtype and device type of every input, the batch range, and the modes and
    parameter types that the plan looked at; `explain` says which one it was.
    """
    names = dict(plan.inputs)
    literals = dict(plan.literals)
    env: dict[str, Any] = {"Tensor": torch.Tensor, "flatten": tree.flatten, "spec": plan.input_spec}
    lines = ["def enter(args, kwargs):", "  try:"]
    count = plan.input_spec.size
    leaf = [f"leaf{i}" for i in range(count)]
    positional, keyword = plan.input_spec.children
    flat = all(c.kind == tree.LEAF for c in (*positional.children, *keyword.children))
    if flat:
        n = len(positional.children)
        lines.append(f"    if len(args) != {n} or len(kwargs) != {count - n}: return None")
        if n:
            lines.append(f"    {', '.join(leaf[:n])}, = args")
        lines += [f"    {name} = kwargs[{key!r}]" for name, key in zip(leaf[n:], keyword.keys, strict=True)]
    else:
        lines += [
            f"    leaves, found = flatten((args, {{k: kwargs[k] for k in {keyword.keys!r}}}))",
            f"    if found != spec or len(kwargs) != {len(keyword.keys)}: return None",
            f"    {', '.join(leaf)}, = leaves",
        ]
    first = True
    for i in range(count):
        if i in literals:
            env[f"literal{i}"] = literals[i]
            lines.append(f"    if {leaf[i]} != literal{i} or type({leaf[i]}) is not type(literal{i}): return None")
            continue
        value = plan.values[names[i]]
        if value.kind == "object":
            env[f"captured{i}"] = None
            continue
        lines.append(f"    if not isinstance({leaf[i]}, Tensor): return None")
        dims = [f"d{i}_{k}" for k in range(len(value.shape))]
        lines.append(
            f"    {', '.join(dims)}, = {leaf[i]}.shape" if dims else f"    if {leaf[i]}.dim() != 0: return None"
        )
        checks = []
        for name, dim in zip(dims, value.shape, strict=True):
            if isinstance(dim, int):
                checks.append(f"{name} != {dim}")
            elif first:
                lines.append(f"    B = {name}")
                first = False
            else:
                checks.append(f"{name} != B")
        env[f"dtype{i}"] = value.dtype
        checks.append(f"{leaf[i]}.dtype is not dtype{i}")
        kind = value.device.split(":")[0]
        checks.append(f"not {leaf[i]}.is_{kind}" if kind in ("cpu", "cuda") else f"{leaf[i]}.device.type != {kind!r}")
        lines.append(f"    if {' or '.join(checks)}: return None")
    if first:
        lines.append(f"    B = {plan.traced_batch}")
    within = " or ".join(f"{lo} <= B <= {hi}" if lo != hi else f"B == {lo}" for lo, hi in plan.batches.ranges)
    lines.append(f"    if not ({within or 'False'}): return None")
    for name, line, thing in _assumed(plan, model):
        env[name] = thing
        lines.append(f"    {line}")
    lines += ["  except (AttributeError, ValueError, KeyError, TypeError):", "    return None"]
    lines.append(f"  return (B, {''.join(leaf[i] + ', ' for i, _ in plan.inputs)})")
    exec("\n".join(lines), env)
    found: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None] = env["enter"]
    return found


def _assumed(plan: TracePlan, model: nn.Module) -> list[tuple[str, str, Any]]:
    """The conditions that only some plans have, as (name, source line, the object that the name stands for)."""
    found: list[tuple[str, str, Any]] = []
    assumed = plan.assumption
    if assumed.autocast is not None:
        found.append(("autocast_now", "if autocast_now() != autocast_then: return None", autocast_state))
        found.append(("autocast_then", "pass", assumed.autocast))
    if assumed.layouts is not None:
        names = [f"leaf{i}" for i, name in plan.inputs if plan.values[name].kind == "input"]
        found.append(("layout", f"if tuple(map(layout, ({', '.join(names)},))) != layouts: return None", layout))
        found.append(("layouts", "pass", assumed.layouts))
    if assumed.requires_grad is not None and assumed.grad:
        tables = [
            (model.get_submodule(path.rpartition(".")[0])._parameters, path.rpartition(".")[2])
            for path, _ in assumed.requires_grad
        ]
        found.append(("flag_tables", "if [t[k].requires_grad for t, k in flag_tables] != flags: return None", tables))
        found.append(("flags", "pass", [flag for _, flag in assumed.requires_grad]))
    if assumed.dtypes:
        state = [v for v in plan.values.values() if v.kind in ("parameter", "buffer") and v.dtype is not None]
        slots = [
            (getattr(model.get_submodule(v.origin[0]), f"_{v.kind}s"), v.origin[1], v.dtype, v.device.split(":")[0])
            for v in state
        ]
        found.append(("slots", "for t, k, dtype, device in slots:", slots))
        found.append(("_", "  if t[k].dtype is not dtype or t[k].device.type != device: return None", None))
    tied = _tied(plan, model)
    if tied:
        found.append(("tied", "if any(t[k] is not u[l] for t, k, u, l in tied): return None", tied))
    return found


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Autocast as it is now, per device type: (device type, enabled, dtype)."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _tied(plan: TracePlan, model: nn.Module) -> list[tuple[Any, str, Any, str]]:
    """Slots that hold one and the same parameter, in pairs with the slot that the plan reads."""
    read = {v.origin for v in plan.values.values() if v.kind in ("parameter", "buffer")}
    homes: dict[int, list[tuple[str, str, Any]]] = {}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, t in table.items():
                if t is not None:
                    homes.setdefault(id(t), []).append((path, name, table))
    pairs = []
    for slots in homes.values():
        chosen = next((s for s in slots if (s[0], s[1]) in read), None)
        if chosen is not None:
            pairs += [(chosen[2], chosen[1], s[2], s[1]) for s in slots if s is not chosen]
    return pairs


def explain(
    plan: TracePlan, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batches: range
) -> None:
    """Raise the error that says which condition on the inputs does not hold; return where none is at fault."""
    try:
        ordered = {k: kwargs[k] for k in plan.input_spec.children[1].keys} if len(kwargs) else {}
    except KeyError:
        ordered = dict(kwargs)
    extra = {k: v for k, v in kwargs.items() if k not in ordered}
    leaves, spec = tree.flatten((args, {**ordered, **extra}))
    if spec != plan.input_spec:
        call = f"args {plan.input_spec.children[0]}, kwargs {plan.input_spec.children[1]}"
        raise InputError(
            f"the inputs have another structure than at capture: expected {call}; found args {spec.children[0]}, kwargs "
            f"{spec.children[1]}. Pass them as example_inputs and example_kwargs had them, or prepare again"
        )
    where = [p for p, _ in tree.paths((args, ordered))]
    literals = dict(plan.literals)
    batch = None
    for i, leaf in enumerate(leaves):
        name = where[i].removeprefix("[0]") if where[i].startswith("[0]") else where[i].removeprefix("[1]")
        if i in literals:
            if leaf != literals[i] or type(leaf) is not type(literals[i]):
                raise InputError(
                    f"input {name} was {literals[i]!r} at capture, now it is {leaf!r}; a value that is no tensor is part of "
                    "the plan. Prepare again for another one"
                )
            continue
        value = plan.values[dict(plan.inputs)[i]]
        if value.kind == "object":
            continue
        if not isinstance(leaf, torch.Tensor):
            raise InputError(f"input {name} must be a tensor {value.describe()}; found {type(leaf).__name__}")
        found = f"{short_dtype(leaf.dtype)}{list(leaf.shape)} on {leaf.device.type}"
        if leaf.dim() != len(value.shape):
            raise InputError(f"input {name} must be {value.describe()}, of rank {len(value.shape)}; found {found}")
        for d, dim in enumerate(value.shape):
            if isinstance(dim, Expr):
                if batch is None:
                    batch = leaf.shape[d]
                elif leaf.shape[d] != batch:
                    raise BatchError(
                        f"inputs must share one batch: the first has {batch}, input {name} has {leaf.shape[d]}"
                    )
            elif leaf.shape[d] != dim:
                raise InputError(
                    f"input {name} must be {value.describe()}: dim {d} is {dim} in the plan; found {found}. Only the batch may "
                    "change; prepare again for other sizes"
                )
        if leaf.dtype is not value.dtype:
            raise InputError(f"input {name} must be {value.describe()}; found {found}. Convert it, or prepare again")
        if leaf.device.type != value.device.split(":")[0]:
            raise InputError(f"input {name} was captured on {value.device}; found {found}. Move it, or prepare again")
    if batch is not None and batch not in batches:
        raise BatchError(
            f"batch {batch} lies outside dynamic_batch ({batches.start}, {batches.stop - 1}); prepare with a range that holds it"
        )


class ModuleGuard:
    """Whether the modules that some ops came from are as they were: flags, attributes read, children, hooks.

    Called without arguments, it returns True if so. It covers the modules whose calls ran any of the given ops, and all
    that contain them. `explain` raises the error that names the difference.
    """

    def __init__(self, plan: TracePlan, model: nn.Module, nodes: range) -> None:
        paths = {""}
        for call in plan.calls:
            overlaps = call.start < nodes.stop and call.end > nodes.start
            if overlaps or (call.start == call.end and call.start in nodes):
                parts = call.path.split(".") if call.path else []
                paths |= {".".join(parts[:i]) for i in range(len(parts) + 1)}
        self.modules = {p: model.get_submodule(p) for p in sorted(paths)}
        read: dict[str, dict[str, Any]] = {p: {"training": m.training} for p, m in self.modules.items()}
        for path, name, value in plan.attributes:
            if path in read and name in self.modules[path].__dict__:
                read[path][name] = value
        self.read = read
        self.children = {p: list(m._modules.values()) for p, m in self.modules.items() if m._modules}
        self.hooks = {(p, h): list(m.__dict__[h].values()) for p, m in self.modules.items() for h in _HOOKS}
        self._arm()

    def _arm(self) -> None:
        self._expected = [
            (
                itemgetter(*names),
                self.modules[p].__dict__,
                tuple(names.values()) if len(names) > 1 else names["training"],
            )
            for p, names in self.read.items()
        ]
        self._children = [(self.modules[p]._modules, children) for p, children in self.children.items()]
        silent = [self.modules[p].__dict__[h] for (p, h), found in self.hooks.items() if not found]
        self._silent = [*silent, *_GLOBAL_HOOKS]
        self._loud = [(self.modules[p].__dict__[h], found) for (p, h), found in self.hooks.items() if found]
        self._dicts = [m.__dict__ for m in self.modules.values()]
        self._sizes = list(map(len, self._dicts))

    def __call__(self) -> bool:
        try:
            for get, attributes, expected in self._expected:
                if get(attributes) != expected:
                    return False
        except KeyError:
            return False
        for modules, children in self._children:
            if [*modules.values()] != children:
                return False
        for hooks, expected_hooks in self._loud:
            if [*hooks.values()] != expected_hooks:
                return False
        return not any(self._silent) and list(map(len, self._dicts)) == self._sizes

    def explain(self) -> None:
        """Raise `ModuleError` with the first difference; where there is none that matters, take note of the new state."""
        again = "; undo that, or call prepare_split again"
        for path, names in self.read.items():
            where = repr(path) if path else "the model"
            module = self.modules[path]
            for name, was in names.items():
                now = module.__dict__.get(name, "nothing")
                if now == was:
                    continue
                if name == "training":
                    old, new = ("train", "eval") if was else ("eval", "train")
                    raise ModuleError(
                        f"{where} was captured in {old} mode and is now in {new} mode; call .{old}() on it, or prepare again in "
                        f"{new} mode"
                    )
                raise ModuleError(
                    f"attribute {name!r} of {where} was {was!r} when forward read it, now it is {now!r}{again}"
                )
            if "forward" in module.__dict__ and len(module.__dict__) != self._sizes[list(self.modules).index(path)]:
                raise ModuleError(f"{where} has a new forward of its own{again}")
        for path, children in self.children.items():
            now_children = list(self.modules[path]._modules.items())
            if [m for _, m in now_children] != children:
                name = next((n for n, m in now_children if m not in children), "a submodule")
                raise ModuleError(f"{(path + '.' if path else '') + name!r} was replaced, added or removed{again}")
        for (path, hooks), was in self.hooks.items():
            if list(self.modules[path].__dict__[hooks].values()) != was:
                raise ModuleError(f"the hooks of {path or 'the model'!r} ({hooks.strip('_')}) changed{again}")
        if any(_GLOBAL_HOOKS):
            raise ModuleError("a global module hook was added, which a captured plan does not run; remove it")
        self._arm()


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of the model's forward."""
    return inspect.signature(model.forward)


def state_types(model: nn.Module) -> tuple[tuple[torch.dtype, str], ...]:
    """The dtype and device type of every parameter and buffer: what `.to(...)` changes."""
    tensors: Sequence[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return tuple((t.dtype, t.device.type) for t in tensors)
