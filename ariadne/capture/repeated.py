"""Repeated: what forward does in Python where a plan would do so another number of times.

The backward pass runs a part under `torch.utils.checkpoint` once more, and a plan does not; a function of autograd does by itself
what a plan would do after it. To set something to what does not hang on what stood there is the same twice; to add to it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, GeneratorType
from typing import Any

import torch.utils.checkpoint

from ariadne.capture.recorder import Recorder
from ariadne.capture.refusals import Patches
from ariadne.capture.state import Snapshot, Spot
from ariadne.errors import UnsupportedError, named
from ariadne.guards import Containers, Place, Recording, Rule
from ariadne.plan import TracePlan

_WHY = (
    "inside of a part that torch.utils.checkpoint runs again in the backward pass, or of a torch.autograd.Function: a plan would "
    "do so another number of times. Do it outside of that part"
)


def patch(recorder: Recorder, patches: Patches) -> None:
    """Note in `Recording.repeated` what changes under a checkpoint; where one is kept whole, `Recorder.whole` does."""
    hook: Any = torch.utils.checkpoint._checkpoint_hook
    plain_enter, plain_leave = hook.__enter__, hook.__exit__
    before: dict[int, Snapshot] = {}

    def enter(self: Any) -> Any:
        if recorder.is_mine() and recorder.fake is None:
            with recorder.aside():
                before[id(self)] = recorder.snapshot.anew()
        return plain_enter(self)

    def leave(self: Any, *error: Any) -> Any:
        if id(self) in before:
            with recorder.aside():
                then = before.pop(id(self))
                if changed := then.spots(by_key=True):
                    recorder.recording.repeated |= changed
                    recorder.rerun.append((changed, then.anew()))
        return plain_leave(self, *error)

    patches.set(hook, "__enter__", enter)
    patches.set(hook, "__exit__", leave)


def overtaken(rerun: Sequence[tuple[set[Spot], Snapshot]], snapshot: Snapshot) -> str:
    """What parts under a checkpoint put somewhere, and forward something else later, in words; empty where nothing is.

    The backward pass runs such a part last. `rerun`: for each what it changed, and all as it left it.
    """
    spots = next((both for changed, then in rerun if (both := changed & then.spots(by_key=True))), None)
    if not spots:
        return ""
    at, key = min(spots, key=repr)
    for path, module in snapshot.modules.items():
        if at in (id(module.__dict__), id(module._buffers), id(module._parameters)):
            return f"{key!r} of {named(path)}"
    return f"{key!r} of a dict" if key is not None else "a container"


def refuse_repeated(
    found: Recording, plan: TracePlan, snapshot: Snapshot, rules: Mapping[Place, Rule], containers: Containers
) -> None:
    """Raise `UnsupportedError` for what forward adds to in such a part: a buffer that it also reads, a list that grows."""
    changed = {at for at, _ in found.repeated}
    if not changed:
        return
    if found.overtaken:
        raise UnsupportedError(
            f"forward sets {found.overtaken} inside of a part that torch.utils.checkpoint runs again in the backward pass, and "
            "later to something else: the backward pass sets it once more, and a plan does not. Set each under a name of its own, "
            "or do it outside of that part"
        )
    read = {value.origin for value in plan.values.values() if value.is_state}
    for path, name, _ in found.stores:
        if (id(snapshot.modules[path]._buffers), name) in found.repeated and (path, name) in read:
            raise UnsupportedError(f"forward reads and replaces the buffer {name!r} of {named(path)} {_WHY}")
    for place in containers.at(changed) & rules.keys():
        rule = rules[place]
        if rule.how == "append" or rule.grown:
            raise UnsupportedError(f"forward appends to {place.words(*rule.grown[:1])} {_WHY}")
        if any((place.path, *place.steps, key) in read for key in rule.what if rule.how == "items"):
            raise UnsupportedError(f"forward reads and replaces what is in {place.words()} {_WHY}")


@contextmanager
def ended() -> Iterator[None]:
    """End the checkpoints that an error has left. In torch 2.11 their hooks stay on until nothing holds the error any more, and
    take in what others save for a backward pass."""  # fmt: skip
    try:
        yield
    except BaseException as error:
        for frame in reversed(_frames(error)):
            left = frame.f_locals.get("gen")
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__ and isinstance(left, GeneratorType):
                left.close()
        raise


def _frames(error: BaseException | None) -> list[FrameType]:
    """Where an error, and those that it came of, went through; outer ones first."""
    found: list[FrameType] = []
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            found.append(trace.tb_frame)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return found
