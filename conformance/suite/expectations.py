"""Expectations: which cases come to something other than a pass, for what reason and until when; data, not code.

A file of `expectations/*.toml` holds entries, and conditions that all of them share::

    condition = "target=ariadne"

    [[expect]]
    query = "{forward,train}/torchvision/fasterrcnn_mobilenet_v3_large_fpn/*"    # or a list of such
    status = "unsupported"
    condition = "torch<2.16"          # may be left out
    reason = "the number of boxes depends on data, so there is no plan for a batch"
    says = "data-dependent"           # words that the result's own reason must hold; may be left out but for `fail_…`
    until = 2027-06-30

A condition is a list, parted by commas, of `name operator value`: versions (`torch`, `python`, `timm` …) take any operator
of a version specifier, words (`target`, `platform`, `machine`, `cpu`, `simd`) take `=` and `!=`.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from conformance.suite.cases import matches
from conformance.suite.environment import PACKAGES
from conformance.suite.queries import queries
from conformance.suite.statuses import Status

FOLDER = Path(__file__).parents[1].joinpath("expectations")
VERSIONS = (*PACKAGES, "python")
WORDS = ("target", "platform", "machine", "cpu", "simd")
_TERM = re.compile(r"\s*([a-z]\w*)\s*(=|==|!=|<=|>=|<|>|~=)\s*([\w.:+()-]+(?: [\w.:+()-]+)*)\s*")


@dataclass(frozen=True)
class Expectation:
    """One entry: the cases that its query means come to exactly this status where its condition holds."""

    query: str | tuple[str, ...]
    status: Status
    condition: str
    reason: str
    until: datetime.date
    where: str = ""
    says: str = ""

    def __post_init__(self) -> None:
        if self.status == Status.PASS:
            raise ValueError("nothing needs to be expected to pass")
        if not self.reason.strip():
            raise ValueError("a reason must be given")
        if not self.queries:
            raise ValueError("a query must be given")
        terms(self.condition)

    def __str__(self) -> str:
        first, *more = self.lines
        return f"{self.where} ({first}{' …' if more else ''} is {self.status})"

    @property
    def lines(self) -> tuple[str, ...]:
        """The query or queries, as written."""
        return (self.query,) if isinstance(self.query, str) else self.query

    @cached_property
    def queries(self) -> tuple[str, ...]:
        """What the brace lists of all queries mean."""
        return tuple(query for line in self.lines for query in queries(line))

    def means(self, case: str) -> bool:
        """Whether this entry is about this case."""
        return any(matches(query, case) for query in self.queries)

    def holds(self, facts: Mapping[str, str]) -> bool:
        """Whether the condition is true of an environment; a comparison with a package that is not there is false."""
        return all(_holds(name, operator, value, facts) for name, operator, value in terms(self.condition))


def terms(condition: str) -> list[tuple[str, str, str]]:
    """A condition's terms as (name, operator, value); ValueError for one that has no meaning."""
    found = []
    for text in condition.split(",") if condition.strip() else []:
        match = _TERM.fullmatch(text)
        if match is None:
            raise ValueError(f"condition {text.strip()!r} is not of the form `name operator value`")
        name, operator, value = match.groups()
        if name not in (*VERSIONS, *WORDS):
            raise ValueError(f"condition on {name!r}; it may be on {', '.join((*VERSIONS, *WORDS))}")
        if name in WORDS and operator not in ("=", "!="):
            raise ValueError(f"{name} is a word, which = and != compare, not {operator}")
        if name in VERSIONS:
            try:
                SpecifierSet(f"{'==' if operator == '=' else operator}{value}")
            except InvalidSpecifier as error:
                raise ValueError(
                    f"condition {text.strip()!r}: {value!r} is no version that {operator} takes"
                ) from error
        found.append((name, operator, value))
    return found


def _holds(name: str, operator: str, value: str, facts: Mapping[str, str]) -> bool:
    if name not in facts:
        return False
    if name in WORDS:
        return (facts[name] == value) == (operator == "=")
    specifier = SpecifierSet(f"{'==' if operator == '=' else operator}{value}")
    return specifier.contains(facts[name], prereleases=True)


def load(folder: Path = FOLDER) -> list[Expectation]:
    """The entries of all files of a folder; ValueError names the file and entry that can't be meant."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        found += parse(path.read_text(encoding="utf-8"), path.name)
    return found


def parse(text: str, name: str) -> list[Expectation]:
    """The entries of one file's text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: {error}") from error
    unknown = sorted(data.keys() - {"condition", "expect"})
    if unknown:
        raise ValueError(f"{name}: it holds `condition` and [[expect]] entries, not {unknown}")
    found = []
    for number, fields in enumerate(data.get("expect", []), start=1):
        where = f"{name} entry {number}"
        lacking = sorted({"query", "status", "reason", "until"} - fields.keys())
        unknown = sorted(fields.keys() - {"query", "status", "condition", "reason", "until", "says"})
        if lacking or unknown:
            raise ValueError(f"{where}: lacks {lacking}, has unknown {unknown}")
        if type(fields["until"]) is not datetime.date:
            raise ValueError(f"{where}: until is a date such as 2027-06-30, without quotes; found {fields['until']!r}")
        both = ", ".join(filter(None, (data.get("condition", ""), fields.get("condition", ""))))
        try:
            status = Status(fields["status"])
            query = fields["query"] if isinstance(fields["query"], str) else tuple(fields["query"])
            says = fields.get("says", "")
            found.append(Expectation(query, status, both, fields["reason"], fields["until"], where, says))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return found


def written(entries: Iterable[Expectation]) -> str:
    """Entries as the text of a file."""
    return "\n".join(
        "[[expect]]\n"
        f"query = {_listed(e.lines)}\nstatus = {_quoted(e.status)}\n"
        + (f"condition = {_quoted(e.condition)}\n" if e.condition else "")
        + (f"says = {_quoted(e.says)}\n" if e.says else "")
        + f"reason = {_quoted(e.reason)}\nuntil = {e.until}\n"
        for e in entries
    )


def _listed(lines: tuple[str, ...]) -> str:
    if len(lines) == 1:
        return _quoted(lines[0])
    return "[\n" + "".join(f"    {_quoted(line)},\n" for line in lines) + "]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
