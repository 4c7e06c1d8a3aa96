"""Changes between calls: of what stands outside of a network, of the order of its keywords, of weights that stand elsewhere too.

Each is an action of a session: it takes the session, and a small number.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from conformance.random_networks import given_steps, outside


def turn_keywords(session: Any, number: int) -> None:
    """The keywords of all calls come the other way round from now on."""
    session.twins.turned = not session.twins.turned


def change_tensor(session: Any, number: int) -> None:
    """Another number in a tensor out there, or another tensor."""
    outside.change_tensor(number)


def change_teacher(session: Any, number: int) -> None:
    """Another mode or weight of a module out there."""
    outside.change_teacher(number)


def change_value(session: Any, number: int) -> None:
    """Another number in a default, in a closure, or in a list that a function goes through."""
    outside.change_value(number)


def change_beside(session: Any, number: int) -> None:
    """Other numbers in the array and the objects that are handed in beside tensors: the very ones of the calls before."""
    given_steps.change_beside(session.twins.beside, number)
    session.stale = "what is handed in was changed in place"


def change_object(session: Any, number: int) -> None:
    """Other things in an object out there."""
    outside.change_object(number)


def change_kept(session: Any, number: int) -> None:
    """A function has forgotten its results, or what they were made of is another."""
    outside.change_kept(number)


def replace_held_function(session: Any, number: int) -> None:
    """Other functions on the class, on an object, in a module and on a function."""
    outside.replace_held_function(number)
    for model in session.models():
        type(model).turned = staticmethod(outside.FUNCTIONS[number // 4 % 2])


def assign_weights(session: Any, number: int) -> None:
    """Other weights are put in the place of the old ones; who has another reference goes on with the old."""
    drawn = session.drawn(number)
    for model in session.models():
        model.load_state_dict(copy.deepcopy(drawn), assign=True)
    session.twins.optimizers()


def shake_referred(session: Any, number: int) -> None:
    """Write into the weight that a list of the network holds, be it the network's own still or not.

    Through `.data`, so not where the first call makes something of a weight and keeps it: no guard sees that, as the docs say.
    """
    if any(step["do"] in ("by_first_weight", "by_first_in_part") for step in session.program.steps):
        return
    for model in session.models():
        for t in model.referred:
            if isinstance(t, Tensor):
                t.data.mul_(1.0 + number % 3)
