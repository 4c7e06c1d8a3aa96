"""The table of all entries."""

from collections.abc import Mapping
from types import MappingProxyType

from model_zoo.definition import Entry
from model_zoo.errors import UnknownNameError
from model_zoo.families import nn, rfdetr, timm, torchvision, torchvision_detection, toys, transformers, ultralytics

_MODULES = (nn, rfdetr, timm, torchvision, torchvision_detection, toys, transformers, ultralytics)
_ENTRIES: Mapping[str, Entry] = MappingProxyType({made.name: made for module in _MODULES for made in module.ENTRIES})
_TAGS = frozenset(tag for made in _ENTRIES.values() for tag in made.tags)

FAMILIES = tuple(sorted({made.family for made in _ENTRIES.values()}))


def names(family: str | None = None, tag: str | None = None) -> tuple[str, ...]:
    """The names of all models, sorted; of those in a family, and of those with a tag, where these are given.

    UnknownNameError for a family or tag that no model has: an empty answer would let a check over it pass on nothing.
    """
    if family is not None and family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    if tag is not None and tag not in _TAGS:
        raise UnknownNameError("tag", tag, _TAGS)
    chosen = (made for made in _ENTRIES.values() if family in (None, made.family) and (tag is None or tag in made.tags))
    return tuple(sorted(made.name for made in chosen))


def entry(name: str) -> Entry:
    """The entry of that name; UnknownNameError, a KeyError, lists the nearest names otherwise."""
    try:
        return _ENTRIES[name]
    except KeyError:
        raise UnknownNameError("model", name, _ENTRIES) from None
