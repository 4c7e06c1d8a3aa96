"""`ariadne ping`: who is at an address, how far away, and how much goes through."""

from __future__ import annotations

from argparse import Namespace
from statistics import median

from ariadne.cli.output import Answer
from ariadne.remote import connect
from ariadne.units import size


def run(options: Namespace) -> Answer:
    """Ask, and time it."""
    with connect(options.address, timeout=options.timeout, key=options.key, server_key=options.server_key) as remote:
        times = [remote.ping() for _ in range(options.count)]
        nbytes = min(options.bytes, remote.limits["bytes"])
        seconds = min(remote.ping(nbytes) for _ in range(3))
        facts = remote.facts
        data = {
            **{k: facts[k] for k in ("ariadne", "torch", "part", "mode", "device", "threads", "digest")},
            "address": options.address,
            "splits": [*facts["splits"]],
            "limits": remote.limits,
            "trains": remote.trains,
            "round_trip_us": {"min": min(times) * 1e6, "median": median(times) * 1e6, "max": max(times) * 1e6},
            "bytes_per_second": 2 * nbytes / seconds,
        }
    trips = data["round_trip_us"]
    lines = [
        f"{options.address}: a {facts['part']} in {facts['mode']} mode on {facts['device']}, {facts['threads']} thread(s)",
        f"versions    Ariadne {facts['ariadne']}, torch {facts['torch']}",
        *(f"serves      {split}" for split in facts["splits"]),
        f"round trip  {trips['median']:.0f} µs ({trips['min']:.0f} to {trips['max']:.0f})",
        f"speed       {size(data['bytes_per_second'])}/s there and back",
    ]
    return Answer("\n".join(lines), data)
