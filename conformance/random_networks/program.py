"""A program: plain data that JSON can hold, the module that it stands for, and inputs for that module.

    {"inputs": [{"name": "x", "shape": ["B", 4]}],
     "parts": {"m0": {"kind": "linear", "args": [4, 4]}},
     "steps": [{"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"]},
               {"do": "relu_", "of": ["v0"], "to": ["v1"]}],
     "output": {"dict": {"a": "v1", "b": ["x", {"value": null}]}}}

An input also has a `dtype`, a `layout` (plain, transposed, strided), `grad`, and `same`, the name of another input that is
the very same tensor; `call` says how forward takes them (positional, keywords, list, dict), `batch` the size of the
example, and `least` the smallest batch that is to be served. A step may run `under` no_grad, enable_grad or autocast. An output
is a value's name, `{"value": constant}`, `{"batch": true}`, a list, or `{"tuple" | "dict" | "pair": ...}` of outputs. With a
`script`, a program is not cut everywhere but used as a session says: `[["trace", 0], ["flip", 0], ["run", 3]]`.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from conformance.random_networks import given_steps, outside, parts
from conformance.random_networks.python_steps import MAY_WRITE
from conformance.random_networks.steps import DTYPES, STEPS, UNDER, Frame

CALLS = ("positional", "keywords", "list", "dict")
LAYOUTS = ("plain", "transposed", "strided")
READ_THE_BATCH = {"by_table", "by_float", "by_text", "by_bytes"}  # where torch does not see it
Env = dict[str, Any]
Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Program:
    """What a random network is; `inputs`, `parts`, `steps` and `output` as in the module's docstring."""

    inputs: Sequence[Mapping[str, Any]]
    parts: Mapping[str, Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    output: Any
    call: str = "positional"
    batch: int = 2
    least: int = 1  # the smallest batch that its split is prepared for: 1, or 0
    about: str = ""
    script: Sequence[Sequence[Any]] = ()

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program that a JSON text holds; ValueError where it holds none."""
        found = json.loads(text)
        if not isinstance(found, dict) or not {"inputs", "parts", "steps", "output"} <= found.keys():
            raise ValueError("a program is an object with inputs, parts, steps and output")
        program = cls(**found)
        program.check()
        return program

    def check(self) -> None:
        """Raise ValueError for a word outside the vocabulary, or a value that nothing made before it was used."""
        known = {str(i["name"]) for i in self.inputs}
        if not self.inputs or self.call not in CALLS:
            raise ValueError(f"a program has inputs, and its call is one of {', '.join(CALLS)}; found {self.call!r}")
        for i in self.inputs:
            if i.get("layout", "plain") not in LAYOUTS or i.get("dtype", "float32") not in DTYPES:
                raise ValueError(f"no such layout or dtype: {i}")
        for name, part in self.parts.items():
            if "same" not in part and part.get("kind") not in parts.KINDS:
                raise ValueError(f"part {name!r} is of no known kind: {part}")
        for step in self.steps:
            if step.get("do") not in STEPS or step.get("under", "") not in UNDER:
                raise ValueError(f"no such step: {step}")
            missing = [n for n in step.get("of", ()) if n not in known]
            if missing or step.get("with", {}).get("module", "") not in {"", *self.parts}:
                raise ValueError(f"a step uses what nothing made: {step}")
            known |= set(step["to"])
        for leaf in names_in(self.output):
            if leaf not in known:
                raise ValueError(f"the output names {leaf!r}, which nothing made")

    def to_json(self) -> str:
        """The program as text, one line per input, part and step."""

        def block(found: Sequence[str], ends: str) -> str:
            return f"{ends[0]}\n  " + ",\n  ".join(found) + f"\n {ends[1]}" if found else ends

        fields = {
            "about": json.dumps(self.about),
            "batch": json.dumps(self.batch),
            "call": json.dumps(self.call),
            "inputs": block([json.dumps(i) for i in self.inputs], "[]"),
            "parts": block([f"{json.dumps(n)}: {json.dumps(p)}" for n, p in self.parts.items()], "{}"),
            "steps": block([json.dumps(s) for s in self.steps], "[]"),
            "output": json.dumps(self.output),
        }
        if self.least != 1:
            fields["least"] = json.dumps(self.least)
        if self.script:
            fields["script"] = json.dumps(self.script)
        return "{\n" + ",\n".join(f' "{k}": {v}' for k, v in fields.items()) + "\n}\n"

    def __str__(self) -> str:
        return self.to_json()

    def with_script(self, script: Sequence[Sequence[Any]]) -> Program:
        """The same program with a session to replay: (action, number) pairs, as in `session.ACTIONS`."""
        return replace(self, script=tuple(script))

    @property
    def _takes_whole(self) -> bool:
        steps = any(s["do"].startswith("opaque") for s in self.steps)
        return steps or any(p.get("kind") == "opaque" for p in self.parts.values())

    @property
    def refusable(self) -> str:
        """Why a capture may be refused, if any step allows it."""
        done = {s["do"] for s in self.steps}
        keeps = bool(done & {"append", "note", "class_append", "class_bind"}) or self.fills or self.records
        if self._takes_whole and keeps:
            return "what is in a container before a part that is taken as it is, that part may read"
        if "marked" in done and keeps:
            return "a plan keeps plain tensors in containers, and none of a class of the user's own"
        if "marked" in done and any(s["do"] == "checkpointed" and not s["with"]["reentrant"] for s in self.steps):
            return "a plan keeps plain tensors in buffers, and none of a class of the user's own"
        if sum(s["do"] == "checkpointed" and not s["with"]["reentrant"] for s in self.steps) > 1:
            return "two parts that the backward pass runs again put another buffer in one place"
        if "slope" in done and any("layout" in i for i in self.inputs):
            return "a gradient that forward takes asks for the strides of its inputs, and no guard sees what they were cut from"
        return next((r for s in self.steps if (r := STEPS[s["do"]].refusable)), "")

    @property
    def fills(self) -> bool:
        """Whether forward puts something into the container that holds its inputs, which the prefix alone is given."""
        return self.call in ("list", "dict") and any(s["do"] == "hand_on" for s in self.steps)

    @property
    def records(self) -> bool:
        """Whether a hook of a part writes down what it gives."""
        return any(p.get("kind") == "recorded" for p in self.parts.values())

    @property
    def along(self) -> list[int | None]:
        """For each input the dim along which its batch lies; None where it has none."""
        return [i["shape"].index("B") if "B" in i["shape"] else None for i in self.inputs]

    @property
    def one_path(self) -> bool:
        """Whether data decide how it goes on: a suffix over a wire knows one path.

        So it is with `torch.cond`; and with a packed sequence where the example has one row, where a part is taken as it is, and
        where Python looks the batch up in something that torch does not see (each batch has a plan of a real run then): there no
        size of the plan follows data.
        """
        done = {s["do"] for s in self.steps}
        real = self.batch == 1 or self._takes_whole or not done.isdisjoint(READ_THE_BATCH)
        return "functional_if" in done or (real and "packed" in done)

    @property
    def in_turn(self) -> bool:
        """Whether a call reads what the one before left in a buffer, so that of two in flight the second has to be refused."""
        return any(s["do"] == "by_length" for s in self.steps)

    @property
    def writes(self) -> bool:
        """Whether anything in it writes in place or keeps a cast, so that a cut may have a reason to be unsafe."""
        steps = any(STEPS[s["do"]].writes or s["do"] in MAY_WRITE or s.get("under") == "autocast" for s in self.steps)
        return steps or self.fills or any("kind" in p and parts.KINDS[p["kind"]].writes for p in self.parts.values())

    def arguments(
        self, batch: int, seed: int = 0, device: str = "cpu", beside: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a forward over `batch` rows, the same numbers for the same seed.

        Where a step asks for it, `beside` is what comes beside tensors: by keyword, as the last.
        """
        generator = torch.Generator().manual_seed(1000 * seed + batch)
        made: dict[str, Any] = {}
        for i in self.inputs:
            made[i["name"]] = made[i["same"]] if "same" in i else _input(i, batch, generator, device)
        asks = any(s["do"] == "by_beside" for s in self.steps)
        more = {"beside": beside or given_steps.beside()} if asks else {}
        if self.call == "keywords":
            first, *others = made
            return (made[first],), {n: made[n] for n in others} | more
        if self.call == "list":
            return (list(made.values()),), more
        return ((made,), more) if self.call == "dict" else (tuple(made.values()), more)


def _input(spec: Mapping[str, Any], batch: int, generator: torch.Generator, device: str) -> Tensor:
    shape = [batch if d == "B" else d for d in spec["shape"]]
    dtype = DTYPES[spec.get("dtype", "float32")]
    layout = spec.get("layout", "plain")
    if layout == "transposed" and len(shape) > 1:
        laid = [*shape[:-2], shape[-1], shape[-2]]
    elif layout == "strided" and shape:
        laid = [*shape[:-1], 2 * shape[-1]]
    else:
        laid = shape
    if device == "meta":
        t = torch.empty(laid, dtype=dtype, device="meta")
    elif dtype is torch.bool:
        t = torch.rand(laid, generator=generator) > 0.5
    elif not dtype.is_floating_point:
        t = torch.randint(0, 5, laid, generator=generator, dtype=dtype)
    else:
        t = torch.randn(laid, generator=generator).to(dtype)
    if layout == "transposed" and len(shape) > 1:
        t = t.transpose(-1, -2)
    elif layout == "strided" and shape:
        t = t[..., ::2]
    return t.requires_grad_() if spec.get("grad") else t


def run_step(frame: Frame, step: Mapping[str, Any], env: Env) -> None:
    """Run one step on the values in `env`, and put there what it makes."""
    kind = STEPS[step["do"]]
    operands = [env[n] for n in step.get("of", ())]
    with UNDER[step.get("under", "")]():
        run = kind.shaped if kind.shaped and frame.meta else kind.run
        made = run(frame, *operands, **step.get("with", {}))
    found = made if isinstance(made, (tuple, list)) else [made]
    if len(found) != len(step["to"]):
        raise ValueError(f"{step['do']} made {len(found)} values, not {len(step['to'])}")
    env.update(zip(step["to"], found, strict=True))


def output_of(template: Any, env: Env, batch: Any) -> Any:
    """The nested output that a template stands for."""
    if isinstance(template, str):
        return env[template]
    if isinstance(template, list):
        return [output_of(t, env, batch) for t in template]
    ((kind, inner),) = template.items()
    if kind == "value":
        return inner
    if kind == "batch":
        return batch
    if kind == "dict":
        return {k: output_of(t, env, batch) for k, t in inner.items()}
    found = [output_of(t, env, batch) for t in inner]
    return Pair(*found) if kind == "pair" else tuple(found)


def names_in(template: Any) -> Iterator[str]:
    """The values that an output template names."""
    if isinstance(template, str):
        yield template
    elif isinstance(template, list):
        for inner in template:
            yield from names_in(inner)
    else:
        ((kind, inner),) = template.items()
        if kind in ("dict", "tuple", "pair"):
            yield from names_in(list(inner.values()) if kind == "dict" else list(inner))


class Network(nn.Module):
    """The module that a program stands for. Steps use what stands on its class, too: `apart` gives one a class of its own."""

    seen: ClassVar[list[Tensor]] = []
    latest: ClassVar[Tensor | None] = None
    scale: ClassVar[float] = 1.0
    turned = staticmethod(outside.softened)

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("passed", torch.zeros(()))  # of what a checkpoint runs
        self.register_buffer("total", torch.zeros(()))
        if any(step["do"] == "by_length" for step in program.steps):
            self.register_buffer("rows", torch.ones(2, 2))
        self.parts = parts.make(program.parts)
        self.records: list[Tensor] = []  # what steps put there stays
        self.notes: dict[str, Tensor] = {}
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.anchored: tuple[int, ...] = ()
        first = [p for p in self.parts.parameters() if p.is_floating_point()][:1]
        self.referred: list[Any] = [*first, *({"weight": p} for p in first)]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As torch's own, also where the buffer that grows has another length there."""
        if "rows" in state_dict:
            self.rows = state_dict["rows"].clone()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "records": [], "notes": {}}  # torch copies no tensors that have a graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program, held = self.program, None
        beside = kwargs.pop("beside", None)
        if program.call == "list":
            held = args[0]
            args = tuple(held)
        elif program.call == "dict":
            held = args[0]
            args = tuple(held.values())
        given = [*args, *(kwargs[i["name"]] for i in program.inputs[len(args) :])]
        env: Env = {i["name"]: t for i, t in zip(program.inputs, given, strict=True)}
        frame = Frame(self, given[0].shape[program.along[0] or 0], keywords=(*kwargs,), given=held, beside=beside)
        for step in program.steps:
            run_step(frame, step, env)
        return output_of(program.output, env, frame.batch)


def apart(network: Network) -> Network:
    """The same network, of a class of its own, on which nothing was left yet."""
    left = {"seen": [], "latest": None, "scale": 1.0, "turned": staticmethod(outside.softened)}
    network.__class__ = type("Network", (Network,), left)
    return network


def build(program: Program) -> Network:
    """The program's module, with the same numbers each time; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        network = Network(program)
    parts.randomise(network)
    return apart(network)
