"""What was compared, and which refusals count as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ariadne import SplitRuntime
from ariadne.errors import (
    BoundaryError,
    FrontierError,
    GuardError,
    TrainingError,
    UnsupportedError,
    VerificationError,
    WitnessError,
)
from conformance.random_networks.compare import Different
from conformance.random_networks.program import Program
from conformance.random_networks.twins import Twins, asked

WIRE, TOO_SHORT = "over a wire", "there is nothing to cut"
UNSEEN = ("takes data out of torch unseen", "Forward may do what no op shows")
BEFORE_PART = "which may read that; pass it to the part"
HIDE = {"left_torch", "unseen_later"}  # steps whose numbers come by no op of torch, so that a graph would freeze them
LIMITS = (WIRE, "max_paths", "were written into since")  # of plans that branch on data
NAMED_LIMITS = {  # what no split can do, or has a bound that the user sets: by words of the error, as results name it
    WIRE: "a path that a suffix over a wire does not know",
    LIMITS[1]: "a path beyond max_paths",
    LIMITS[2]: "a path asked for after its inputs were written into",
    TOO_SHORT: "a plan of one op",
    UNSEEN[0]: "what forward does by no op of torch",
    UNSEEN[1]: "what forward does by no op of torch",
    "which no guard sees; pass input.contiguous()": "strides of an input that is a part of another tensor",
    BEFORE_PART: "a change in Python before an opaque part that may read it",
}
INEXACT = "may differ from the whole model's in the last bits"
MOVED = ("this boundary's prefix ran elsewhere", "another call, or you, wrote")  # state that both sides of a cut use
ASKS = "loss_fn asks torch.autograd.grad for"


@dataclass
class Counts:
    """What was run: cuts, unsafe cuts, replays and training steps that were compared, and what was refused."""

    cuts: int = 0
    unsafe: int = 0
    replays: int = 0
    steps: int = 0
    uncut: int = 0  # modes in which the plan has no safe cut
    raising: int = 0  # calls that the whole model refuses, and the split too
    captured: int = 0  # plans that a call needed and the preparation had not made
    penalised: int = 0  # training steps whose loss has a penalty over all parameters
    inexact: int = 0  # steps that the split refuses, since gradients might be added in another order
    behind: int = 0  # steps that the split refuses, since the loss asks for a gradient of what lies behind the boundary
    limited: list[str] = field(default_factory=list)  # the names of the limits that were met
    refused: list[str] = field(default_factory=list)  # all else that was refused

    def refuse(self, error: Exception, program: Program) -> None:
        """Note that something of a program was refused, and how; or by which limit."""
        hides = any(step["do"] in HIDE for step in program.steps)
        words = (words for words in NAMED_LIMITS if words in str(error) and (hides or words not in UNSEEN))
        limit = next((NAMED_LIMITS[found] for found in words), None)
        if limit is None:
            self.refused.append(f"{type(error).__name__}: {error}")
        else:
            self.limited.append(limit)


def allowed(
    act: Callable[[], bool],
    twins: Twins,
    runtime: SplitRuntime,
    batch: int,
    refusable: object,
    counts: Counts,
    seed: int = 0,
) -> bool:
    """Run a comparison, of a step of that number if it is one; whether it came to one.

    A guard may fire where something is `refusable`; a cut may be missing where the plan excludes the batch.
    """
    plans = len(runtime.plans)
    try:
        ran = act()
    except GuardError as error:
        limits = LIMITS if refusable else (WIRE,) if twins.program.one_path else ()
        witnessed = isinstance(error, WitnessError)
        if not any(limit in str(error) for limit in limits) if witnessed else not refusable:
            raise Different(f"{runtime.split_id}, batch {batch}: a guard fires for no reason: {error!r}") from error
        counts.refuse(error, twins.program)
    except FrontierError as error:
        if batch in runtime.plan.batches and TOO_SHORT not in str(error):  # of a path of its own
            raise Different(f"{runtime.split_id}, batch {batch}: {error!r}") from error
        counts.refuse(error, twins.program)
    except TrainingError as error:
        wanted = asked(twins.split, seed)
        if ASKS in str(error) and any(p is wanted for p in runtime.prefix_parameters()):
            counts.behind += 1
        elif INEXACT not in str(error) or not twins.program.writes:
            raise Different(f"{runtime.split_id}, batch {batch}: {error!r}") from error
        else:
            counts.inexact += 1
    except Different:
        raise
    except (UnsupportedError, VerificationError) as error:  # of a plan that was captured for this call
        if not any(step["do"] == "unseen_later" for step in twins.program.steps):
            raise Different(f"{runtime.split_id}, batch {batch}: {error!r}") from error
        counts.refuse(error, twins.program)
    except BoundaryError as error:
        if not (twins.program.writes and any(words in str(error) for words in MOVED)):
            raise Different(f"{runtime.split_id}, batch {batch}: {error!r}") from error
        counts.refuse(error, twins.program)
    except Exception as error:
        raise Different(f"{runtime.split_id}, batch {batch}: {type(error).__name__}: {error}") from error
    else:
        counts.raising += not ran
        counts.captured += max(0, len(runtime.plans) - plans)
        return ran
    twins.reset()
    return False
