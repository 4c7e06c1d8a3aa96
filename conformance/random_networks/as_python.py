"""A program split as the model's own Python, though a graph may hold it: resumed, from bytes, and beside a captured prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ariadne import MixedSplit, PythonSplit, SplitSpec
from ariadne.capture import Example
from ariadne.errors import AriadneError, FrontierError, VerificationError
from ariadne.prepare import _prepare, _settings, example_of
from ariadne.runtime import SplitRuntime
from ariadne.stopped import beside, prepared
from conformance.random_networks.compare import Different
from conformance.random_networks.counts import Counts
from conformance.random_networks.extent import ALL, Extent
from conformance.random_networks.program import Program
from conformance.random_networks.trial import TRAINED, modes
from conformance.random_networks.twins import BATCHES, Twins

WAYS = (False, True)  # whether the boundary goes as bytes


def trial_as_python(program: Program, extent: Extent = ALL) -> Counts:
    """Hold Python splits of a program against the whole; raises as `trial` does. A refusal must be one of Ariadne's errors."""
    counts = Counts()
    for training, trains in modes(program, extent):
        _hold(program, training, trains, counts, extent.cuts)
    return counts


def _hold(program: Program, training: bool, trains: bool, counts: Counts, most: int) -> None:
    twins, mode = Twins(program, training), "python, train" if training else "python, eval"
    try:
        runtime: Any = twins.trace(mode, _forced)
    except FrontierError:
        counts.uncut += 1
        return
    except VerificationError as error:
        raise Different(f"{mode}: {error}") from error
    except AriadneError as error:
        counts.refuse(error, program)
        return
    safe = [c for c in runtime.candidates if c.safe]
    for candidate in safe[:: max(1, len(safe) // most)]:
        made = _allowed(lambda candidate=candidate: runtime.resplit(candidate), twins, counts, f"{mode}, {candidate}")
        if made is not None:
            _cut(program, twins, made, mode, counts, trains)
            mixed = _allowed(lambda made=made: _beside(made), twins, counts, f"{mode}, {made.split_id}, graph")
            if mixed is not None:
                _cut(program, twins, mixed, f"{mode}, graph before", counts, trains)


def _cut(program: Program, twins: Twins, runtime: Any, mode: str, counts: Counts, trains: bool) -> None:
    where = f"{mode}, {runtime.split_id}"
    counts.cuts += 1
    for batch in dict.fromkeys((program.batch, *TRAINED)):
        for wire in WAYS if isinstance(runtime, PythonSplit) else (True,):  # beside a graph all that crosses is a copy
            told = f"{where}, batch {batch}, {'bytes' if wire else 'resumed'}"
            done = _allowed(lambda b=batch, w=wire, t=told: twins.replay(runtime, b, t, wire=w), twins, counts, told)
            counts.replays += bool(done)
    for step in range(3 if trains else 0):
        batch, wire = TRAINED[step % len(TRAINED)], step == 2 and not runtime.shared_parameters()
        told = f"{where}, batch {batch}, step {step}{', bytes' if wire else ''}"
        done = _allowed(
            lambda b=batch, w=wire, t=told, s=step: twins.train(runtime, b, t, seed=s, wire=w), twins, counts, told
        )
        counts.steps += bool(done)


def _allowed(act: Callable[[], Any], twins: Twins, counts: Counts, where: str) -> Any:
    """What an act gives; None where one of Ariadne's errors refuses it, and all that moved until then is put back."""
    try:
        return act()
    except Different:
        raise
    except VerificationError as error:
        raise Different(f"{where}: {error}") from error
    except AriadneError as error:
        counts.refuse(error, twins.program)
    except Exception as error:
        raise Different(f"{where}: {type(error).__name__}: {error}") from error
    twins.reset()
    return None


def _forced(model: nn.Module, args: Any, *, split: SplitSpec, example_kwargs: Any) -> PythonSplit:
    """What `fallback="python"` gives where no graph holds, of any model."""
    settings = _settings(split, "generated_eager", None, None)
    example = example_of(model, args, example_kwargs, settings.spec)
    return prepared(model, settings, example, "asked for by a test", training=True)


def _beside(python: PythonSplit) -> MixedSplit:
    """What `fallback="python-suffix"` gives at the same cut."""
    settings = python.settings
    example: Example = python._example

    def prefix(part: nn.Module, boundary: str) -> SplitRuntime:
        spec = SplitSpec(boundary, dynamic_batch=BATCHES, max_paths=1)
        return _prepare(part, example, _settings(spec, settings.mode, None, None), True)

    return beside(python, prefix, example)
