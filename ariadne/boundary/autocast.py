"""The autocast that one side of a cut ran under: the other side has to run under the same, as the whole model would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ariadne.errors import BoundaryError, PayloadError

Autocast = tuple[tuple[str, str, bool], ...]
_is_any_enabled = torch._C._is_any_autocast_enabled


def autocast_now() -> Autocast:
    """The autocast that is on, as data: device, dtype and whether casts are cached.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     autocast_now()
    (('cpu', 'bfloat16', True),)
    """
    if not _is_any_enabled():
        return ()
    return tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def refuse_another(then: Autocast | None, split_id: str) -> None:
    """Raise `BoundaryError` where the autocast that the prefix ran under is not that of now; None is not known."""
    if then is None or (now := autocast_now()) == then:
        return
    raise BoundaryError(
        f"the prefix ran {_shown(then)}, and the suffix is called {_shown(now)} ({split_id}); the whole model runs under one. Call "
        "both halves inside of the same torch.autocast(...), or both outside of it"
    )


def autocast_in(header: Mapping[str, Any]) -> Autocast:
    """What the header of a payload, which a stranger may have written, tells of it."""
    told = header.get("autocast", ())
    rows = [tuple(r) if isinstance(r, (tuple, list)) else () for r in told] if isinstance(told, (tuple, list)) else [()]
    if len(rows) > 2 or not all([*map(type, row)] == [str, str, bool] for row in rows):
        raise PayloadError("the header's 'autocast' is malformed; refuse the sender")
    return tuple((device[:20], dtype[:20], cached) for device, dtype, cached in rows)


def _shown(autocast: Autocast) -> str:
    if not autocast:
        return "outside of autocast"
    rows = (f"{device} to {dtype}{'' if cached else ' without its cache'}" for device, dtype, cached in autocast)
    return f"under autocast of {' and '.join(rows)}"
