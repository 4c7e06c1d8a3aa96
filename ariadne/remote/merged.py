"""Merging: boundaries of several clients that wait become one run, where each sample is computed from that sample alone.

A kernel may round a sample otherwise in another batch, so that results are no longer, bit for bit, those of the boundary alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.compiled import Along, Mixed, rows
from ariadne.errors import PayloadError
from ariadne.half import Half
from ariadne.plan import Expr, Ref, TracePlan
from ariadne.remote.facts import device_of
from ariadne.remote.message import failure, pack

Ways = tuple[tuple[Along | None, ...], tuple[Along | None, ...]]
Answer = tuple[dict[str, Any], list[Any]]


class Merger:
    """Merges up to `most` boundaries. `why` says of each split that can't be merged why not."""

    def __init__(self, half: Half, most: int) -> None:
        self.half, self.most = half, most
        self.device = device_of(half)
        self.why: dict[tuple[str, str], str] = {}
        self._ways: dict[tuple[str, str], tuple[TracePlan, Ways]] = {}
        for plan, (candidates, _) in half.runtime._plans.items() if most > 1 else ():
            key = plan.signature, candidates[0].split_id
            try:
                self._ways[key] = plan, _ways(plan, candidates[0].live)
            except Mixed as why:
                self.why[key] = str(why)

    def gather(self, first: Any, queue: deque[Any], now: float) -> list[Any]:
        """The requests that go with one, taken out of the queue."""
        key, found = first.header.get("split"), [first]
        for request in [*queue]:
            if len(found) == self.most:
                break
            header = request.header
            alike = header["op"] == "run" and header.get("split") == key and header.get("autocast", []) == []
            if alike and len(request.bodies) == 1 and "number" not in header and now <= request.until:
                queue.remove(request)
                found.append(request)
        plain = len(first.bodies) == 1 and first.header.get("autocast", []) == [] and now <= first.until
        if not plain and len(found) > 1:
            queue.extendleft(reversed(found[1:]))
        return found if plain else [first]

    def run(self, requests: list[Any], max_bytes: int) -> list[Answer]:
        """The answers to requests, from as few runs as there are kinds of boundaries among them."""
        answers: list[Answer | None] = [None] * len(requests)
        kinds: dict[Any, list[tuple[int, BoundaryPayload]]] = {}
        for i, request in enumerate(requests):
            try:
                boundary = BoundaryPayload.from_bytes(request.bodies[0], device=self.device, max_bytes=max_bytes)
                kinds.setdefault(self._kind(i, boundary), []).append((i, boundary))
            except Exception as error:
                answers[i] = failure(error), []
        for group in kinds.values():
            try:
                outputs = self._together([b for _, b in group])
                found: list[Answer] = [({}, [pack(output)]) for output in outputs]
            except Exception as error:
                found = [(failure(error), [])] * len(group)
            for (i, _), answer in zip(group, found, strict=True):
                answers[i] = answer
        return [a for a in answers if a is not None]

    def _kind(self, i: int, boundary: BoundaryPayload) -> Any:
        """Boundaries of one kind may be merged; one that no rule speaks for is of a kind of its own."""
        way = self._ways.get((boundary.plan_signature, boundary.split_id))
        if way is None or boundary.requires_grad:
            return i
        told: list[Any] = [boundary.plan_signature, boundary.split_id]
        for value, along in zip(boundary.raw, way[1][0], strict=True):
            if along is None or not isinstance(value, torch.Tensor) or value.dim() <= along.dim:
                return i
            told.append((value.dtype, *(n for d, n in enumerate(value.shape) if d != along.dim)))
            if value.shape[along.dim] != along.each * boundary.batch:
                return i
        return tuple(told)

    def _together(self, boundaries: list[BoundaryPayload]) -> list[Any]:
        first = boundaries[0]
        batch = sum(b.batch for b in boundaries)
        plan, (taken, given) = self._ways.get((first.plan_signature, first.split_id), (None, ((), ())))
        if len(boundaries) == 1 or plan is None or batch not in plan.batches or any(b.autocast for b in boundaries):
            return [self.half.run_suffix(b) for b in boundaries]
        raw = tuple(
            torch.cat([b.raw[i] for b in boundaries], along.dim) if along is not None else first.raw[i]
            for i, along in enumerate(taken)
        )
        one = BoundaryPayload(first.split_id, first.plan_signature, batch, first.labels, raw)
        leaves, spec = tree.flatten(self.half.run_suffix(one))
        if len(leaves) != len(given):
            raise PayloadError("the merged run gave other results than its plan says")
        outputs, start = [], 0
        for b in boundaries:
            own = [
                leaf if at is None else leaf.narrow(at.dim, start * at.each, b.batch * at.each)
                for leaf, at in zip(leaves, given, strict=True)
            ]
            outputs.append(tree.unflatten(own, spec))
            start += b.batch
        return outputs


def _ways(plan: TracePlan, live: tuple[str, ...]) -> Ways:
    """Where the samples lie in what comes in and what goes out; `Mixed` where they may meet."""
    if any(node.is_witness for node in plan.nodes):
        raise Mixed("it reads numbers out of tensors")
    if any(isinstance(atom, Expr) for atom in plan.output):
        raise Mixed("it gives a number that follows the batch")
    found = rows(plan, plan.nodes, live)
    given = tuple(found.get(atom.name) if isinstance(atom, Ref) else None for atom in plan.output)
    return tuple(found[name] for name in live), given
