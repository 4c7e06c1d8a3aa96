"""Programs from hypothesis. What it draws is a list of genes; each becomes a step that the meta tensors accept, or nothing.

So every program that comes out is valid by construction, and shrinks as a list of small numbers does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.random_networks import parts
from conformance.random_networks.compare import tensors
from conformance.random_networks.extent import EXTENT
from conformance.random_networks.program import Env, Network, Program, build, run_step
from conformance.random_networks.steps import STEPS, Frame

MOST_STEPS, MOST_ELEMENTS, MOST_DIMS = 12, 160, 4
# Where a program must be valid, as (batch, training); at other batches the whole model may raise.
PROBES = ((2, True), (3, True), (2, False))
ACCEPTS = {
    "f": lambda t: t.dtype is torch.float32,
    "i": lambda t: t.dtype in (torch.int64, torch.int32),
    "b": lambda t: t.dtype is torch.bool,
    "n": lambda t: t.dtype in (torch.float32, torch.float64, torch.int64),
    "a": lambda t: True,
}
FORMS = ("one", "tuple", "list", "dict", "nested", "pair", "constants")
DRAWN_SHAPES = (["B", 4], ["B", 3, 4], ["B", 1], ["B", 2, 3], ["B"], ["B", 0], ["B", 4, 1])
TIME_FIRST = ([3, "B", 4], [4, "B"])
STATIC_SHAPES = ([4], [5, 4], [1, 4], [])
# AssertionError: of the shape rules of torch 2.11, where a dim is out of range.
REFUSALS = (RuntimeError, ZeroDivisionError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError)
# What was silently wrong once, and random programs meet seldom.
NAMED = (
    "append", "note", "class_append", "class_bind", "by_class", "timed", "divided", "checkpointed", "marked", *["packed"] * 6,
    "by_reference", "by_first_call", "by_first_weight", "by_first_in_part", "by_held_function", "by_number",
    "by_teacher", "by_cache", "by_object", "by_keywords", "by_length", "hand_on", "by_beside", "by_shape_table", "by_kept_value",
    "grown", "functional_if", "slope",
    *(n for n in STEPS if n.startswith(("scripted", "opaque", "count_"))), "compress",
)  # fmt: skip
_KINDS = [*parts.KINDS, *["linear"] * 8, *["batch_norm"] * 3, "lookup", "dropout", "relu", "gain", "average", "delay"]
Gene = tuple[str, int, int, int, int]


def _weighted() -> list[str]:
    """The names of the steps as often as they should come. Shrinking goes towards the first, which adds nothing."""
    often = {"call": 20, "again": 10, "add": 3, "add_": 4, "relu_": 4, "scale_": 4, "mul_": 3, "put_": 4, "shift_": 3,
             "window": 5, "view": 4, "reshape": 3, "transpose": 5, "select": 2, "chunk": 3, "cat": 2, "detach": 4,
             "times_batch": 3, "arange": 2, "expand": 3, "dropout": 2, "scripted": 2, "append": 3, "note": 3,
             "by_function": 3, "by_setting": 3, "divided": 2, "checkpointed": 3, "opaque": 2, "class_append": 2,
             "class_bind": 2, "by_class": 2, "marked": 2, "by_reference": 2, "by_held_function": 2, "by_keywords": 2,
             "hand_on": 2, "by_beside": 2, "by_shape_table": 2}  # fmt: skip
    names = [n for n, s in STEPS.items() if not s.refusable]
    names.insert(1, "again")
    return ["skip", *(n for name in names for n in [name] * often.get(name, 1))]


class Meta:
    """A program under construction, run step by step on meta tensors, in each of the probes."""

    def __init__(
        self,
        inputs: Sequence[Mapping[str, Any]],
        probes: Sequence[tuple[int, bool]] = PROBES,
        parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        steps: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.inputs, self.probes, self.parts, self.steps = inputs, probes, dict(parts), list(steps)
        self.restart()

    def restart(self) -> None:
        """Run everything again, as a refused step may have written into what others hold."""
        program = self.program(None)
        with torch.device("meta"):
            self.net = Network(program)
        self.envs: list[tuple[Frame, bool, Env]] = []
        for batch, training in self.probes:
            args, _ = program.arguments(batch, device="meta")
            env = dict(zip((i["name"] for i in self.inputs), args, strict=True))
            self.envs.append((Frame(self.net, batch, meta=True), training, env))
            for step in self.steps:
                self._run(step, *self.envs[-1])

    def program(self, output: Any, **others: Any) -> Program:
        """The program as far as it is."""
        return Program(self.inputs, dict(self.parts), tuple(self.steps), output, **others)

    @property
    def values(self) -> Env:
        """The meta tensors by name, in the first probe."""
        return self.envs[0][2]

    @staticmethod
    def _run(step: Mapping[str, Any], frame: Frame, training: bool, env: Env) -> None:
        frame.net.train(training)
        with torch.device("meta"):
            run_step(frame, step, env)

    def accept(self, step: Mapping[str, Any], part: tuple[str, Mapping[str, Any]] | None = None) -> bool:
        """Take the step if it can run, if its results stay small, and if a backward pass is possible after it."""
        held = [tensors(env) for _, _, env in self.envs]
        versions = [[t._version for t in ts] for ts in held]
        try:
            if part is not None:
                with torch.device("meta"):
                    self.net.parts.update(parts.make({**self.parts, part[0]: part[1]}))
            for frame, training, env in self.envs:
                self._run(step, frame, training, env)
                for name in step["to"]:
                    t = env[name]
                    if t.numel() > MOST_ELEMENTS or t.dim() > MOST_DIMS:
                        raise ValueError(f"{name} is too large")
            if [[t._version for t in ts] for ts in held] != versions:
                self._backward()
                self._really(step, part)
        except REFUSALS:
            self.restart()
            return False
        self.steps.append(step)
        if part is not None:
            self.parts[part[0]] = part[1]
        return True

    def _really(self, step: Mapping[str, Any], part: tuple[str, Mapping[str, Any]] | None) -> None:
        """Raise what a write into memory that overlaps with itself raises, which meta tensors don't see."""
        declared = dict(self.parts) | (dict([part]) if part else {})
        whole = Program(self.inputs, declared, (*self.steps, step), step["to"][0])
        for batch, training in self.probes:
            args, kwargs = whole.arguments(batch)
            build(whole).train(training)(*args, **kwargs)

    def runs_at(self, batch: int) -> bool:
        """Whether the program as it is runs at another batch."""
        try:
            Meta(self.inputs, ((batch, True), (batch, False)), self.parts, self.steps)
        except REFUSALS:
            return False
        return True

    def _backward(self) -> None:
        """Raise what a backward pass from every value would: a write into what it needs."""
        for _, _, env in self.envs:
            roots = [t.sum() for t in tensors(env) if t.requires_grad and t.dtype.is_floating_point]
            if roots:
                torch.stack([r.float() for r in roots]).sum().backward(retain_graph=True)


def _candidates(values: Env, letter: str, start: int) -> Iterator[str]:
    """The values that fit an operand, from the `start`-th newest on."""
    fitting = [n for n, t in reversed(values.items()) if ACCEPTS[letter](t)]
    for i in range(len(fitting)):
        yield fitting[(start + i) % len(fitting)]


def _operands(values: Env, takes: str, a: int, b: int) -> Iterator[list[str]]:
    """Ways to fill the operands of a step: the drawn one first, then some others."""
    if takes == "m":
        pool = list(_candidates(values, "f", a))[: 2 + b % 2]
        if pool:
            yield pool
            yield [pool[0], pool[0]]
        return
    if not takes:
        yield []
        return
    letters = list(takes)
    for first in list(_candidates(values, letters[0], a))[:5]:
        rest = [list(_candidates(values, letter, b + i))[:3] for i, letter in enumerate(letters[1:])]
        if not all(rest):
            return
        for k in range(max(map(len, rest), default=1)):
            yield [first, *(pool[k % len(pool)] for pool in rest)]


def grow(meta: Meta, gene: Gene) -> None:
    """Add the step that a gene stands for, if any choice of operands makes it valid."""
    name, a, b, c, how = gene
    if name == "skip":
        return
    if name in ("call", "again"):
        _grow_call(meta, name == "again", a, c, how)
        return
    step = STEPS[name]
    ways = list(_operands(meta.values, step.takes, a, b))
    if step.writes and how < 6:
        ways = _worth_writing(meta, ways)
    for k, operands in enumerate(ways):
        chosen = {key: of[((c >> 2 * i) + k) % len(of)] for i, (key, of) in enumerate(step.settings.items())}
        for count in range(1, 4):
            found: dict[str, Any] = {"do": name, "of": operands, "to": _fresh(meta, count)}
            if chosen:
                found["with"] = chosen
            if how in (1, 2):
                found["under"] = ("no_grad", "autocast")[how - 1]
            if meta.accept(found):
                return
            if name not in ("chunk", "split", "unbind", "topk", "sort", "minimum_at", "var_mean"):
                break


def _worth_writing(meta: Meta, ways: list[list[str]]) -> list[list[str]]:
    """Without those that write into an input, after which hardly a cut is safe; first those into what another value views."""
    memory = {name: t.untyped_storage()._cdata for name, t in meta.values.items()}
    given = {memory[i["name"]] for i in meta.inputs}
    views = Counter(memory[name] for name, t in {id(t): (n, t) for n, t in meta.values.items()}.values())
    return sorted((w for w in ways if memory[w[0]] not in given), key=lambda w: views[memory[w[0]]] < 2)


def _grow_call(meta: Meta, again: bool, a: int, c: int, how: int) -> None:
    kind = _KINDS[c % len(_KINDS)]
    for operand in list(_candidates(meta.values, "a", a))[:5]:
        t: Tensor = meta.values[operand]
        if not (ACCEPTS["i"](t) if kind in ("lookup", "sparse") else ACCEPTS["f"](t)):
            continue
        name, part = f"m{len(meta.parts)}", None
        if again:
            if not meta.parts:
                return
            name = list(meta.parts)[c % len(meta.parts)]
        else:
            args = parts.KINDS[kind].fit(tuple(t.shape), a + c // len(_KINDS))
            if args is None:
                continue
            declared: dict[str, Any] = {"kind": kind, "args": list(args)}
            alike = [n for n, p in meta.parts.items() if p["kind"] == kind and p["args"][:1] == declared["args"][:1]]
            if alike and kind in ("linear", "lookup"):
                declared |= {"args": meta.parts[alike[0]]["args"], "tied": alike[0]} if how % 2 else {}
            elif how == 4 and kind == "linear":
                declared["frozen"] = ["weight"]
            part = (name, declared)
        for count in (1, 2, 3):
            step = {"do": "call", "of": [operand], "with": {"module": name}, "to": _fresh(meta, count)}
            if how in (1, 2):
                step["under"] = ("no_grad", "autocast")[how - 1]
            if meta.accept(step, part):
                return


def _fresh(meta: Meta, count: int) -> list[str]:
    first = sum(len(s["to"]) for s in meta.steps)
    return [f"v{first + i}" for i in range(count)]


def _template(meta: Meta, form: str, picks: Sequence[int]) -> Any:
    """A nested output: the newest values, some older ones, and what is no tensor."""
    names = list(reversed(meta.values))
    used = {n for s in meta.steps for n in s["of"]}
    ends = [n for n in names if n not in used and n.startswith("v")] or names[:1]
    if form == "one":
        return ends[0]
    chosen = list(dict.fromkeys([*ends[: 1 + len(picks)], *(names[p % len(names)] for p in picks)]))
    if form == "nested":
        return {"dict": {"first": chosen[0], "rest": [{"tuple": chosen[1:]}, {"dict": {"again": chosen[0]}}]}}
    if form == "constants":
        return {"tuple": [*chosen, {"value": None}, {"value": 3}, {"value": "text"}, {"batch": True}]}
    if form == "pair":
        return {"pair": [chosen[0], chosen[1:]]}
    if form == "dict":
        return {"dict": {f"k{i}": n for i, n in enumerate(chosen)}}
    return chosen if form == "list" else {"tuple": chosen}


def _inputs() -> st.SearchStrategy[list[dict[str, Any]]]:
    """One to four inputs; the first is a batch of floats, or of ints."""
    batched = st.sampled_from((*DRAWN_SHAPES * 2, *TIME_FIRST))
    first = st.builds(_spec, batched, st.sampled_from(("float32", "float32", "int64")), st.integers(0, 7))
    shapes = st.one_of(batched, st.sampled_from(STATIC_SHAPES))
    other = st.builds(
        _spec, shapes, st.sampled_from(("float32", "float32", "int64", "bool", "float64")), st.integers(0, 9)
    )
    return st.tuples(first, st.lists(other, max_size=3)).map(_named)


def _spec(shape: list[Any], dtype: str, how: int) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": shape, "dtype": dtype}
    if how in (1, 2) and dtype.startswith("float"):
        found["grad"] = True
    if how in (3, 4):
        found["layout"] = ("transposed", "strided")[how - 3]
    if how == 9:
        found["same"] = True
    return found


def _named(drawn: tuple[dict[str, Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    first, others = drawn
    made = [{"name": "x", **first}]
    for i, other in enumerate(others):
        spec = {"name": f"y{i}", **other}
        if spec.pop("same", False):
            spec = {**made[-1], "name": f"y{i}", "same": made[-1].get("same", made[-1]["name"])}
        made.append(spec)
    return made


_TRAINED = [i for i, k in enumerate(parts.KINDS) if k in ("linear", "layer_norm", "prelu", "lookup", "block", "gain")]

_MODAL: list[Gene] = [("skip", 0, 0, 0, 0), ("if_training", 0, 0, 0, 0), ("dropout", 0, 0, 0, 0)]
_MODAL += [
    ("call", 0, 0, i, 0)
    for i, k in enumerate(parts.KINDS)
    if k in ("batch_norm", "dropout", "average", "delay", "tick")
]


@st.composite
def programs(draw: Any, most: int = MOST_STEPS, refusable: bool = True, named: bool = False) -> Program:
    """Random programs that hold at least one step; their shapes were validated on meta tensors.

    Those that are `named` hold one of the steps in `NAMED`, the first from a drawn one on that fits; or none, if none does.
    """
    newest = st.sampled_from((0, 0, 0, 0, 1, 2, 3, 5))  # mostly what was made last, so that networks are deep
    gene = st.tuples(st.sampled_from(_weighted()), newest, st.integers(0, 5), st.integers(0, 63), st.integers(0, 7))
    meta = Meta(draw(_inputs()))
    grow(meta, ("call", 0, 0, draw(st.sampled_from(_TRAINED)), 0))
    grow(meta, draw(st.sampled_from(_MODAL)))
    for one in draw(st.lists(gene, min_size=min(6, most - 1), max_size=most - 1)):
        grow(meta, one)
    if named:
        first, before = draw(st.integers(0, len(NAMED) - 1)), len(meta.steps)
        for name in (*NAMED[first:], *NAMED[:first]):
            if len(meta.steps) == before:
                grow(meta, (name, draw(newest), 0, draw(st.integers(0, 3)), 0))
    if refusable and draw(st.sampled_from((*[False] * 11, True))):
        grow(meta, (draw(st.sampled_from([n for n, s in STEPS.items() if s.refusable])), 0, 0, 0, 0))
    output = _template(meta, draw(st.sampled_from(FORMS)), draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    call = draw(st.sampled_from(("positional", "positional", "keywords", "list", "dict")))
    # An input that has the example's batch as its first size counts as batched, so no other may have it.
    leading = {i["shape"][0] for i in meta.inputs if i["shape"]}
    batch = draw(st.sampled_from([b for b in (2, 2, 3, 1) if b not in leading and (b > 1 or meta.runs_at(b))]))
    least = draw(st.sampled_from(EXTENT.least)) if len(EXTENT.least) > 1 else EXTENT.least[0]
    return meta.program(output, call=call, batch=batch, least=least)
