"""The name of a case, which is one line, and queries over such names.

A case is `<check>/<family>/<model>/<key=value,…>`, with keys in the order of `KEYS` and those left out that its check
doesn't vary: `forward/timm/levit_128s/cut=q50,bs=3,mode=eval,backend=generated`. A query is the name of one case, or any
prefix of names with `*` at its end; `*` alone means all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KEYS = ("cut", "bs", "mode", "backend", "steps")
MODES = ("eval", "train")
BACKENDS = (
    "generated",
    "debug",
    "eager",
    "aot_eager",
    "inductor",
)  # the last three: torch.compile's, on generated segments
CUTS = ("first", "q25", "q50", "q75", "last", "narrowest", "widest", "every")  # and mod:<name>, rand:<seed>

_VALUE = {
    "cut": re.compile(rf"{'|'.join(CUTS)}|mod:[\w.#-]+|rand:\d+"),
    "bs": re.compile(r"[1-9]\d*"),
    "mode": re.compile("|".join(MODES)),
    "backend": re.compile("|".join(BACKENDS)),
    "steps": re.compile(r"[1-9]\d*"),
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MODEL = re.compile(r"[\w.-]+")


@dataclass(frozen=True, order=True)
class Case:
    """One comparison: a check, a model of the zoo by its full name, and the public parameters, as written.

    >>> case = Case.parse("train/nn/mlp10x64/cut=q50,bs=2,mode=train,backend=generated,steps=3")
    >>> case.model, case.bs, case["cut"]
    ('nn/mlp10x64', 2, 'q50')
    """

    check: str
    model: str
    parameters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        family, _, name = self.model.partition("/")
        if not _NAME.fullmatch(self.check) or not _NAME.fullmatch(family) or not _MODEL.fullmatch(name):
            raise ValueError(f"not a case: {self}; a case is <check>/<family>/<model>/<key=value,…>")
        keys = [key for key, _ in self.parameters]
        if keys != [key for key in KEYS if key in keys]:
            raise ValueError(f"not a case: {self}; its keys are {keys}, of {list(KEYS)} in that order, each once")
        for key, value in self.parameters:
            if not _VALUE[key].fullmatch(value):
                raise ValueError(f"not a case: {self}; {key}={value!r} is not of the form {_VALUE[key].pattern}")

    @classmethod
    def of(cls, check: str, model: str, **parameters: object) -> Case:
        """A case from keywords, put in order; those that are None are left out."""
        unknown = sorted(parameters.keys() - set(KEYS))
        if unknown:
            raise ValueError(f"a case has the keys {list(KEYS)}, not {unknown}")
        given = tuple((key, str(parameters[key])) for key in KEYS if parameters.get(key) is not None)
        return cls(check, model, given)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of that name; ValueError says what is wrong with any other text."""
        parts = text.split("/", 3)
        if len(parts) != 4:
            raise ValueError(f"not a case: {text!r}; a case is <check>/<family>/<model>/<key=value,…>")
        pairs = [tuple(item.split("=", 1)) for item in parts[3].split(",")] if parts[3] else []
        if any(len(pair) != 2 or pair[0] not in KEYS for pair in pairs):
            raise ValueError(f"not a case: {text!r}; its last part is key=value,… with keys of {list(KEYS)}")
        return cls(parts[0], f"{parts[1]}/{parts[2]}", tuple((key, value) for key, value in pairs))

    def __str__(self) -> str:
        return f"{self.check}/{self.model}/{','.join(f'{key}={value}' for key, value in self.parameters)}"

    def __getitem__(self, key: str) -> str:
        return dict(self.parameters)[key]

    def get(self, key: str, default: str | None = None) -> str | None:
        """A parameter's value as written, or the default where this check doesn't vary it."""
        return dict(self.parameters).get(key, default)

    @property
    def family(self) -> str:
        """The library that defines the model."""
        return self.model.partition("/")[0]

    @property
    def bs(self) -> int:
        """The batch size; KeyError for a check without one."""
        return int(self["bs"])

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.get("mode") == "train"


def matches(query: str, case: Case | str) -> bool:
    """Whether a query means this case: it is its name, or a prefix of it followed by `*`.

    >>> matches("forward/timm/*", "forward/timm/levit_128s/cut=q50,bs=3,mode=eval,backend=generated")
    True
    """
    name = str(case)
    return name.startswith(query[:-1]) if query.endswith("*") else name == query


def checked_query(query: str) -> str:
    """The query itself; ValueError unless it is a case's name or ends in its only `*`."""
    if query.endswith("*") and "*" not in query[:-1]:
        return query
    Case.parse(query)
    return query
