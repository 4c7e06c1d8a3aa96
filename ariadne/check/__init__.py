"""Checks: a model of the user's held against its split, and what a split costs here.

A model and inputs, or a runtime, flow in; findings flow out, one for each promise. The files, in import order::

    observation    inputs and a loss for any model; all that a run moves
    twins          a model whole and split, run and trained alike
    model          a user's model held against its split
    profile        bytes and time along all cuts
"""

from ariadne.check.model import CHECKS, SPLIT_CHECKS, CheckResult, Kind, check, passed
from ariadne.check.observation import Given, Inputs, Loss, seed_all, varied
from ariadne.check.profile import FORMATS, frontier_profile

__all__ = [
    "Given",
    "Inputs",
    "Loss",
    "seed_all",
    "varied",
    "CHECKS",
    "CheckResult",
    "Kind",
    "SPLIT_CHECKS",
    "check",
    "passed",
    "FORMATS",
    "frontier_profile",
]
