"""A bench: one model in one process, with all that its cases share and none of what they leave behind.

Every case starts from one state: the whole model is a fresh copy of a model that never ran, and the split's model, which
its prepared runtimes hold on to, is put back to what it was.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import model_zoo
from ariadne import PythonSplit, SplitRuntime, SplitSpec
from conformance.suite import device
from conformance.suite.cases import Case
from conformance.suite.compare import ABSENT, difference, leaves, mapped, model_difference, moved_attributes
from conformance.suite.cuts import cut_facts, resolve, usable
from conformance.suite.oracle import deterministic, hold_informative, is_out_of_memory, live_gradients
from conformance.suite.state import Snapshot, seed_all, undisturbed
from conformance.suite.statuses import Status, Stop

Target = Callable[..., Any]
CAPTURED, REFERENCE, LARGEST = 2, 3, 8  # batches: of the example, of the oracle's verdict, the largest served


@dataclass
class Split:
    """A prepared runtime at one cut, with its model in the state that every case starts from."""

    runtime: Any
    model: nn.Module
    facts: dict[str, Any] = field(default_factory=dict)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Prefix and suffix, one after the other."""
        return self.runtime.run_suffix(self.runtime.run_prefix(*args, **kwargs))

    def afar(self, *args: Any, **kwargs: Any) -> Any:
        """The same, with the boundary sent as bytes."""
        boundary = self.runtime.run_prefix(*args, **kwargs)
        return self.runtime.run_suffix(type(boundary).from_bytes(boundary.to_bytes(), device=device.chosen()))

    @property
    def ways(self) -> list[Callable[..., Any]]:
        """How its halves can be run: a forward that waits goes on here, or runs again elsewhere with its beginning skipped.

        A suffix that is generated code is one and the same here and elsewhere.
        """
        return [self.forward, self.afar] if self.leaves else [self.forward]

    @property
    def leaves(self) -> bool:
        """Whether it splits the model's own Python, and a boundary can be sent."""
        return isinstance(self.runtime, PythonSplit) and not self.runtime.stays


@dataclass
class _Side:
    """The split's own model in one mode, how it was before anything ran, and the runtimes prepared on it."""

    model: nn.Module
    before: Snapshot
    prepared: dict[str, Any] = field(default_factory=dict)


def load(target: str) -> Target:
    """The target that `package.module:name` names."""
    module, mark, name = target.partition(":")
    if not mark:
        raise ValueError(f"a target is written package.module:name, such as ariadne:prepare_split; found {target!r}")
    found: Target = getattr(importlib.import_module(module), name)
    return found


# What a runtime is asked for by the name of a backend; any other name is one of torch.compile.
_AS_ASKED: dict[str, dict[str, Any]] = {
    "debug": {"mode": "debug_interpreter"},
    "refusing": {"on_change": "refuse"},
}


class Bench:
    """One model, of the zoo by its name or any other as an entry, against one target.

    `facts` collects what the checks of the current case find out on their way; `conformance.checks.run` has it cleared first
    and puts it into the finding.

    >>> bench = Bench("nn/mlp10x64")
    >>> conformance.checks.run(Case.parse("forward/nn/mlp10x64/cut=q50,bs=3,mode=eval,backend=generated"), bench).status
    <Status.PASS: 'pass'>
    """

    def __init__(self, model: str | model_zoo.Entry, target: str | Target = "ariadne:prepare_split") -> None:
        self._entry = None if isinstance(model, str) else model
        self.model_name = model if isinstance(model, str) else model.name
        self.target = load(target) if isinstance(target, str) else target
        self.target_name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        self.facts: dict[str, Any] = {}
        self._pristine: nn.Module | None = None
        self._sides: dict[bool, _Side] = {}
        self._takes_gradients: dict[bool, bool] = {}
        self._order: dict[bool, bool] = {}
        self._last_counts: dict[bool, bool] = {}
        self._caches: dict[bool, dict[tuple[str, str], Any]] = {}
        self._rates: dict[bool, float] = {}
        self._verdicts: dict[tuple[bool, bool, int], Stop | None] = {}
        self._last: tuple[Any, Any] = (None, None)
        self._check = ""

    # --- the whole model --------------------------------------------------------------------------------------------

    @property
    def entry(self) -> model_zoo.Entry:
        """The model's entry in the zoo."""
        if self._entry is None:
            self._entry = model_zoo.entry(self.model_name)
        return self._entry

    def whole(self, training: bool) -> nn.Module:
        """A new copy of the model, in the state that every case starts from."""
        return copy.deepcopy(self._built()).train(training)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that every case starts from, by name; they are not to be written."""
        return dict(self._built().named_parameters())

    def _built(self) -> nn.Module:
        if self._pristine is None:
            try:
                self._pristine = device.moved(self.entry.build())
            except model_zoo.MissingPackageError as error:
                raise Stop(Status.NOT_INSTALLED, str(error)) from error
            except Exception as error:
                status = Status.OOM if is_out_of_memory(error) else Status.ERROR_BUILD
                raise Stop(status, f"{type(error).__name__}: {error}"[:1000]) from error
        return self._pristine

    def inputs(self, batch: int, seed: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New inputs, a function of the batch and a seed, which is the batch itself unless given."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = self.entry.inputs(batch, seed=batch if seed is None else seed)
        return device.moved(found)  # type: ignore[no-any-return]

    def judge(self, training: bool, *, gradients: bool = False, batch: int = REFERENCE) -> None:
        """Whether the whole model can be held against: raises the Stop that says why not.

        It must run, twice alike, and to an informative end; with `gradients`, so must a training step.
        """
        key = (training, gradients, batch)
        if key not in self._verdicts:
            try:
                self._judge_step(*key) if gradients else self._judge_forward(training, batch)
                self._verdicts[key] = None
            except Stop as stop:
                self._verdicts[key] = stop
        verdict = self._verdicts[key]
        if verdict is not None:
            raise verdict

    def trainable(self, training: bool) -> bool:
        """Whether the whole model can be trained, for a check in which training is only a part; if not, a fact says why."""
        try:
            self.judge(training, gradients=True)
        except Stop as stop:
            if stop.finding.status is Status.NONDETERMINISTIC:
                raise
            self.facts["not_trained"] = f"{stop.finding.status}: {stop.finding.reason}"[:300]
            return False
        return True

    def _judge_forward(self, training: bool, batch: int) -> None:
        def run(seed: int) -> Any:
            model = self.whole(training)
            args, kwargs = self.inputs(batch, seed)
            seed_all(batch)
            with torch.no_grad():
                return model(*args, **kwargs)

        with undisturbed():
            output = eager(lambda: deterministic(lambda: run(batch), "the whole model, run"))
            hold_informative(output, eager(lambda: run(batch + 1)))

    def _judge_step(self, training: bool, _: bool, batch: int) -> None:
        """Two steps, since some models keep something of the first that breaks the second; then the first counts by itself."""

        def run() -> tuple[list[dict[str, Any]], str]:
            model = self.whole(training)
            found: list[dict[str, Any]] = []
            for step in range(2):
                args, kwargs = self.inputs(batch, step)
                seed_all(step)
                model.zero_grad()
                try:
                    self.entry.loss(model(*args, **kwargs)).backward()
                except Exception as error:
                    if not found or is_out_of_memory(error):
                        raise
                    return found, f"{type(error).__name__}: {error}"
                found.append({name: p.grad for name, p in model.named_parameters()})
            return found, ""

        with undisturbed():
            steps, error = eager(lambda: deterministic(run, "the whole model, trained"))
            for gradients in steps:
                live_gradients(gradients)
        self._rates[training] = learning_rate(self.parameters(), steps[0])
        if error:
            raise Stop(Status.ERROR_EAGER, f"the whole model, in its second step, raises {error}"[:1000])

    def rate(self, training: bool) -> float:
        """The learning rate by which a step of SGD moves the whole model's parameters by a hundred-thousandth of their size."""
        self.judge_first_step(training)
        return self._rates[training]

    def judge_first_step(self, training: bool) -> None:
        """Whether one step of training can be held against, whatever becomes of a second: raises the Stop that says why not."""
        try:
            self.judge(training, gradients=True)
        except Stop:
            if training not in self._rates:
                raise

    def takes_gradients(self, training: bool) -> bool:
        """Whether the whole model runs on inputs that require a gradient; it need not where its tags say so."""
        if training not in self._takes_gradients:
            model, (args, kwargs) = self.whole(training), mapped(wanting_gradient, self.inputs(CAPTURED))
            with undisturbed():
                try:
                    model(*args, **kwargs)
                    self._takes_gradients[training] = True
                except RuntimeError as error:
                    if not self.entry.tags & {"writes-input", "no-input-gradients"}:
                        raise Stop(Status.ERROR_EAGER, f"on inputs that require gradients: {error}"[:1000]) from error
                    self._takes_gradients[training] = False
        return self._takes_gradients[training]

    def given(self, batch: int, seed: int, training: bool, *, held: float | None = None) -> Any:
        """New inputs that require a gradient, where the model takes such; they hold one already, of `held`s, if it is given."""
        inputs = self.inputs(batch, seed)
        return mapped(lambda t: wanting_gradient(t, held), inputs) if self.takes_gradients(training) else inputs

    def caches(self, training: bool) -> dict[tuple[str, str], Any]:
        """The attributes in which the model's forward keeps what it would else compute again, with what they held before.

        An attribute is one if calls on other numbers of the same shapes put the same into it, the second such call leaves it
        alone, and a model that holds it already gives what one does that does not. A split may leave it as it was. Where it holds
        nothing but plain values, a call at another batch must leave it alone, too: else it notes what is new in each call.
        """
        if training not in self._caches:
            with undisturbed():
                self._caches[training] = self._find_caches(training)
        return self._caches[training]

    def _find_caches(self, training: bool) -> dict[tuple[str, str], Any]:
        def run(model: nn.Module, seed: int, batch: int = REFERENCE) -> Any:
            args, kwargs = self.inputs(batch, seed)
            seed_all(0)
            with torch.no_grad():
                return model(*args, **kwargs)

        fresh, first, other = (self.whole(training) for _ in range(3))
        run(first, 0)
        moved = moved_attributes(fresh, first)
        if not moved:
            return {}
        expected = run(other, 1)
        again = self.whole(training)
        for path, name in moved:
            value = vars(first.get_submodule(path)).get(name, ABSENT)
            if value is not ABSENT:
                vars(again.get_submodule(path))[name] = mapped(lambda t: t.detach().clone(), value)
        if difference(expected, run(again, 1)) is not None:
            return {}
        changing = moved_attributes(first, other).keys() | moved_attributes(first, again).keys()
        found = {key: before for key, before in moved.items() if key not in changing}
        noted = {key for key in found if _is_plain(vars(first.get_submodule(key[0])).get(key[1], ABSENT))}
        if noted:
            larger = self.whole(training)
            run(larger, 0, REFERENCE + 1)
            noted &= moved_attributes(first, larger).keys()
        return {key: before for key, before in found.items() if key not in noted}

    def order_matters(self, training: bool) -> bool:
        """Whether what the whole model gives depends on the calls before it."""
        if training not in self._order:
            results = []
            with undisturbed(), torch.no_grad():
                for seeds in ((2,), (1, 2)):
                    model = self.whole(training)
                    for seed in seeds:
                        args, kwargs = self.inputs(REFERENCE, seed)
                        seed_all(seed)
                        output = model(*args, **kwargs)
                    results.append(output)
            self._order[training] = difference(*results) is not None
        return self._order[training]

    def left_by_the_last(self, training: bool) -> bool:
        """Whether what two calls of the whole model leave in it depends on which came last, as a record of the last call does."""
        if training not in self._last_counts:
            models = []
            with undisturbed(), torch.no_grad():
                for seeds in ((1, 2), (2, 1)):
                    models.append(self.whole(training))
                    for seed in seeds:
                        args, kwargs = self.inputs(REFERENCE, seed)
                        seed_all(seed)
                        models[-1](*args, **kwargs)
            self._last_counts[training] = model_difference(*models) is not None
        return self._last_counts[training]

    def begin(self, check: str) -> None:
        """Forget the facts of the case before, and what `once` kept if it was for another check."""
        self.facts.clear()
        if check != self._check:
            self._check, self._last = check, (None, None)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, kept until another key or check comes: for cases in a row that look at the same, and leave it so."""
        if self._last[0] != key:
            self._last = (None, None)  # it may be large, and so may be the next
            self._last = (key, make())
        return self._last[1]

    # --- the split --------------------------------------------------------------------------------------------------

    def side(self, training: bool) -> _Side:
        """The split's model, put back to the state that every case starts from."""
        side = self._sides.get(training)
        if side is None:
            model = self.whole(training)
            side = self._sides[training] = _Side(model, Snapshot(model))
        side.before.restore()
        return side

    def prepare(self, model: nn.Module, inputs: Any, **options: Any) -> Any:
        """What the target makes of a model in the state that it is in, cut in the middle.

        Where the entry says that no graph holds it, its own Python is asked for, as a user would: then a graph is a Stop.
        """
        entry, (args, kwargs) = self.entry, inputs
        spec = SplitSpec("percent:50", dynamic_batch=(1, LARGEST), dynamic=entry.dynamic, batch_dim=entry.batch_dim)
        made = self.asked(model, args, spec, example_kwargs=kwargs, **options)
        if isinstance(made, SplitRuntime) and not entry.has_graph(model.training):
            raise Stop(Status.FAIL_STRUCTURE, f"a graph holds it: {self.model_name} need not have the tag 'no-graph'")
        return made

    def asked(self, model: nn.Module, args: Any, spec: SplitSpec, **options: Any) -> Any:
        """What the target gives when it is asked as a user would ask for this model."""
        if not self.entry.has_graph(model.training):
            spec, options = replace(spec, max_paths=1), {"fallback": "python", **options}
        return self.target(model, args, split=spec, **options)

    def runtime(self, training: bool, backend: str = "generated") -> Any:
        """What the target prepared on the split's model, cut in the middle; it is there to be resplit, and is not run.

        In generated mode, whose preparing is held against the model; every other backend runs the same plan. "refusing" is
        generated mode that refuses a changed model, where else a plan of it is captured.
        """
        side = self.side(training)
        if not side.prepared:
            inputs = self.inputs(CAPTURED)
            seed_all(0)
            side.prepared["generated"] = self.prepare(side.model, inputs)
            side.before.restore()
        if backend not in side.prepared:
            in_part = {"on_compile_error": "eager"} if "compiled-in-part" in self.entry.tags else {}
            compiled = {"mode": "compiled", "compile_options": {"backend": backend, **in_part}}
            side.prepared[backend] = side.prepared["generated"].resplit(**_AS_ASKED.get(backend, compiled))
        return side.prepared[backend]

    def split(self, cut: str, training: bool, backend: str = "generated", *, trained: bool = False) -> Split:
        """A new runtime at one cut, its model as every case finds it; the cut's facts go into the finding.

        Where the runtime refuses to be `trained` across that cut, it is the nearest across which it does not; a fact says so.
        No case meets what another one made a runtime capture: what was prepared is never run itself.
        """
        runtime = self.runtime(training, backend)
        made = runtime.resplit(resolve(runtime, cut))
        facts = cut_facts(made)
        if trained and getattr(made.candidate, "inexact", ""):
            asked = made.candidate.cut
            made = runtime.resplit(min(usable(runtime, True), key=lambda c: (abs(c.cut - asked), c.cut)))
            self.facts["trained_elsewhere"] = f"{cut} is op {asked}, trained was op {made.candidate.cut}"
            facts = cut_facts(made)
        self.facts.update(facts)
        return Split(made, self._sides[training].model, facts)

    def splits(self, case: Case, *, trained: bool = False) -> Iterator[Split]:
        """The split at the case's cut; for `cut=every` at every safe cut in turn, each from the same state.

        Those that are to be `trained` are without the cuts that the runtime refuses to train across.
        """
        backend = case.get("backend", "generated") or "generated"
        if case.get("cut") != "every":
            yield self.split(case.get("cut", "q50") or "q50", case.training, backend, trained=trained)
            return
        runtime = self.runtime(case.training, backend)
        cuts = usable(runtime, trained)
        inexact = len(usable(runtime)) - len(cuts)
        if inexact:
            self.facts["inexact"] = inexact
        for candidate in cuts:
            side = self.side(case.training)
            made = runtime.resplit(candidate)
            facts = {**cut_facts(made), "cuts": len(cuts)}
            self.facts.update(facts)
            yield Split(made, side.model, facts)


def _is_plain(value: Any) -> bool:
    """Whether a value holds nothing but numbers, text and None, and at least one of these.

    A `torch.Size` does not count: forward keeps one to tell whether what else it keeps was made for the same sizes.
    """
    if isinstance(value, torch.Size):
        return False
    found = [leaf for _, leaf in leaves(value)]
    return bool(found) and all(leaf is None or isinstance(leaf, (bool, int, float, complex, str)) for leaf in found)


def wanting_gradient(t: torch.Tensor, held: float | None = None) -> torch.Tensor:
    """A copy that requires a gradient, if it is of a kind that can, and holds one of `held`s already where that is given."""
    made = t.detach().clone()
    if made.is_floating_point() or made.is_complex():
        made.requires_grad_(True)
        if held is not None:
            made.grad = torch.full_like(made, held)
    return made


def learning_rate(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, torch.Tensor | None]) -> float:
    """The learning rate of one digit by which these gradients move the parameters by a hundred-thousandth of their norm.

    Parameters of half types by a hundredth.
    """
    both = [(parameters[name], g) for name, g in gradients.items() if g is not None]
    size, step = (sum(torch.linalg.vector_norm(pair[i]).item() ** 2 for pair in both) for i in range(2))
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p, _ in both)
    share = 1e-2 if half else 1e-5  # of half types, less would move nothing by a bit
    return float(f"{share * (size / step) ** 0.5:.0e}") if size and step else share


def eager(run: Callable[[], Any]) -> Any:
    """The result of the whole model's own run; Stop `error_eager` where it raises."""
    try:
        return run()
    except Stop:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Stop(Status.ERROR_EAGER, f"the whole model raises {type(error).__name__}: {error}"[:1000]) from error
