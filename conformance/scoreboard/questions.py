"""What is asked of every system, as steps: the runner takes them, and the page's scripts are these steps in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXAMPLE = 4  # the batch of the example that is captured
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Question:
    """A question: its key, the words of the table's head, and the steps that answer it; see `asking.Pair` for these.

    `training`: both models are in training mode before the capture. `changes`: only asked of programs that ask for changes.
    """

    key: str
    title: str
    about: str
    steps: tuple[Step, ...]
    training: bool = False
    changes: bool = False


def _asked(*steps: Step) -> tuple[Step, ...]:
    return (("capture",), *steps)


def _changed(name: str) -> tuple[Step, ...]:
    return _asked(("change", name), ("outputs", EXAMPLE, 6))


_ALL = (
    Question("captures", "captured", "it captures, and gives the example's output", _asked(("outputs", EXAMPLE, 0))),
    Question(
        "same", "other data", "the same batch, other numbers", _asked(("outputs", EXAMPLE, 1), ("outputs", EXAMPLE, 2))
    ),
    Question("batches", "other batches", "batches of 3 and 7", _asked(("outputs", 3, 3), ("outputs", 7, 4))),
    Question("one", "batch of one", "a batch of 1", _asked(("outputs", 1, 5))),
    Question(
        "train", "in training mode", "captured in training mode: the output", _asked(("outputs", EXAMPLE, 1)), True
    ),
    Question(
        "gradients", "gradients", "every gradient of a training step", _asked(("gradients", EXAMPLE, 2)), training=True
    ),
    Question(
        "state",
        "state after a call",
        "what a call in training mode leaves in buffers and attributes",
        _asked(("outputs", EXAMPLE, 1), ("state",)),
        training=True,
    ),
    Question(
        "left",
        "left as found",
        "capturing leaves model and random generator as they were",
        _asked(("left",)),
        training=True,
    ),
    Question("flag", "mode flipped", "captured in eval mode, then model.train()", _changed("flag"), changes=True),
    Question("loaded", "weights loaded", "other weights by load_state_dict", _changed("loaded"), changes=True),
    Question("replaced", "weight replaced", "a new Parameter object", _changed("replaced"), changes=True),
    Question("hook", "hook added", "a forward hook that doubles", _changed("hook"), changes=True),
)
QUESTIONS: Mapping[str, Question] = {question.key: question for question in _ALL}


def script(target: str, program: str, question: Question) -> str:
    """Five lines or less that repeat a case and print what was found, from the root of a checkout."""
    lines = [
        "from conformance.scoreboard.asking import Pair",
        f"pair = Pair({target!r}, {program!r}, training={question.training})  # one model twice; one is captured",
    ]
    calls = [f"pair.{name}({', '.join(map(repr, given))})" for name, *given in question.steps]
    if len(calls) > 2:
        calls[1:-1] = ["; ".join(f"print({call})" if "outputs" in call else call for call in calls[1:-1])]
    return "\n".join([*lines, *calls[:-1], f"print({calls[-1]})"])
