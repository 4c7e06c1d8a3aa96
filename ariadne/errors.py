"""Every error that Ariadne raises on purpose.

The tree, most general first::

    AriadneError
      SpecError            (ValueError)    an invalid argument: mode, percentage, range, option
      CaptureError         (RuntimeError)  the forward can't be recorded as one plan
        UnsupportedError                   ... because it does something a plan can't hold
      FrontierError        (ValueError)    no such cut, or the cut is not safe
      GuardError           (RuntimeError)  a condition that the plan relies on does not hold now
        InputError         (ValueError)    inputs: structure, rank, dims, dtype, device
          BatchError                       ... the batch is outside the range
        ModuleError                        the model: training flags, modules, hooks, attributes
        WitnessError                       a value that Python read out of a tensor came out different
      BoundaryError        (ValueError)    a boundary that this runtime can't take
        ConsumedError                      ... because it was already trained or walked back
        PayloadError                       ... because its bytes are malformed
      TrainingError        (RuntimeError)  parameters or optimizers that can't be trained split
      CompileError         (RuntimeError)  a segment that the compiler refused
      VerificationError    (RuntimeError)  split and whole were compared, and differ
      PipelineError        (RuntimeError)  another rank of a pipeline failed, or ranks that don't fit each other
      HalfError            (ValueError)    a half that can't be kept in a file, or a file that can't be loaded as one
      RemoteError          (RuntimeError)  the process with the other half can't be reached, or could not answer
        HandshakeError                     ... because it holds another split, other weights or another protocol
        DeadlineError      (TimeoutError)  ... in the time that was given
        BusyError                          ... because a limit of it is reached, or another client trains it
        StepError                          ... because the two sides are not at the same step
        CheckpointError                    ... because a checkpoint could not be written or read
      VisualizationError   (RuntimeError)  a picture that could not be made, for want of a program

Each message says what was asked, what was found, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AriadneError(Exception):
    """Base of every error that Ariadne raises on purpose."""


class SpecError(AriadneError, ValueError):
    """An invalid argument: a misspelt mode, a percentage out of range, an empty batch range."""


class CaptureError(AriadneError, RuntimeError):
    """The model's forward could not be recorded as one plan."""


class UnsupportedError(CaptureError):
    """The model's forward does something that a plan can't hold, such as drawing from Python's `random`."""


class FrontierError(AriadneError, ValueError):
    """The boundary names no cut, more than one cut, or a cut that is not safe."""


class GuardError(AriadneError, RuntimeError):
    """A condition recorded at capture does not hold at this call."""


class InputError(GuardError, ValueError):
    """The inputs differ from the captured ones in structure, rank, a non-batch dim, dtype or device type; nothing was run."""


class BatchError(InputError):
    """The batch is missing, not shared by all batched inputs, or outside `dynamic_batch`."""


class ModuleError(GuardError):
    """The model changed since capture: a training flag, a module, a hook, or an attribute that forward reads."""


class WitnessError(GuardError):
    """A value that the model's Python reads out of a tensor differs from the one captured, and no plan can be had for it.

    Or an op raised, where forward may catch it. `found` is the value, and `at` the number of the op that gives it in `plan`.
    """

    plan: Any = None
    at: int = -1
    found: Any = None
    asked: tuple[Any, str, str] | None = None  # what was captured, by which op, in which module

    def __str__(self) -> str:
        """Written only when it is read: a call that goes on on another path has such an error, and nobody reads it."""
        if self.args or self.asked is None:
            return super().__str__()
        expected, target, module = self.asked
        return (
            f"the model's Python reads a value out of a tensor ({target} in {module or 'the model itself'}) and goes on from "
            f"there: at capture it was {expected!r}, now it is {self.found!r}. What was captured holds only for {expected!r}; "
            "call prepare_split again with inputs that take the new path"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class BoundaryError(AriadneError, ValueError):
    """The boundary was made by another split, or does not have the values that this one needs."""


class ConsumedError(BoundaryError):
    """The boundary was already consumed by `train_suffix` or `backward_prefix`; each takes it once."""


class PayloadError(BoundaryError):
    """The bytes are not a well-formed boundary payload."""


class TrainingError(AriadneError, RuntimeError):
    """Parameters, gradients or optimizers that split training can't handle exactly."""


class CompileError(AriadneError, RuntimeError):
    """torch.compile refused a generated segment."""


class VerificationError(AriadneError, RuntimeError):
    """The split and the whole model were run on the same input, and their results differ."""


class PipelineError(AriadneError, RuntimeError):
    """A step of a pipeline could not be finished: another rank failed, whose error this one tells, or ranks don't fit each
    other."""


class HalfError(AriadneError, ValueError):
    """A half that a file can't hold, a file that is not a half, or a half that can't run here; nothing was run."""


class RemoteError(AriadneError, RuntimeError):
    """The process that holds the other half can't be reached, failed, or does not understand what it was asked."""


class HandshakeError(RemoteError):
    """The other process holds another split, other weights, or speaks another protocol; nothing was sent."""


class DeadlineError(RemoteError, TimeoutError):
    """No answer came in the time given. The request may have been done; to ask again for a step gives the same answer."""


class BusyError(RemoteError):
    """A limit of the server is reached: bytes of a message, boundaries in flight; or another client's run is trained there."""


class StepError(RemoteError):
    """The server is at another step than this client: it was started anew, or another client has taken the run over."""


class CheckpointError(RemoteError):
    """A checkpoint could not be written or read; the one before is still there, and the training run goes on."""


class VisualizationError(AriadneError, RuntimeError):
    """A picture could not be made: a program is missing or failed. What it would have been made from is kept beside it."""


def named(path: str) -> str:
    """How a message calls the module at `path`: quoted, or as the model where it is that itself."""
    return repr(path) if path else "the model"


def nearest(name: str, known: Iterable[str], n: int = 5) -> str:
    """The names nearest to `name`, quoted and joined for an error message; empty if none is near."""
    pool = list(dict.fromkeys(known))
    found = difflib.get_close_matches(name, pool, n=n, cutoff=0.5)
    found += [k for k in pool if k not in found and (name in k or k in name) and k][: n - len(found)]
    return ", ".join(repr(k) for k in found)
