"""What a Python split's prefix hands to its suffix: the output of a module's call, and the forward that waits there."""

from __future__ import annotations

from typing import Any, Never

import torch

from ariadne import tree
from ariadne.boundary import BoundaryPayload
from ariadne.errors import BoundaryError
from ariadne.stopped.forward import Forward

PYTHON = "python"  # the label of what Python needs to skip the prefix's part


class StoppedBoundary(BoundaryPayload):
    """A forward that waits at the end of a module's call, with what the call returned.

    `tensors`, `values` and `nbytes` are those of the call's output; what forward keeps from before besides it is in the forward.
    In training what of that is used again after the cut is added when `train_suffix` meets it. Where it is dropped without being
    run, its forward is unwound. A second run, or one elsewhere (`to_bytes`), runs forward from its beginning, with all that came
    before the cut skipped.

    >>> runtime.run_prefix([torch.rand(3, 480, 640)])
    StoppedBoundary(after:backbone, backbone['0']: [1, 256, 120, 160], ...)
    """

    def __init__(
        self,
        split_id: str,
        signature: str,
        label: str,
        forward: Forward,
        inputs: tuple[Any, ...],
        raw: Any,
        requires_grad: tuple[str, ...],
        graph: tuple[Any, ...] | None,
    ) -> None:
        super().__init__(split_id, signature, 1, (label,), (raw,), requires_grad, graph)
        self.forward, self.before, self.kept = forward, forward.halt.before, forward.halt.kept
        assert forward.stood is not None
        self.stood = forward.stood
        self.owner: object = None  # the runtime that made it
        self.flags: tuple[bool, ...] = ()  # which modules were training
        self.foreign: list[torch.Tensor] = []  # inputs that have a graph of their own
        held = [
            (name, t)
            for name, t in (*self.tensors.items(), *tree.paths(inputs, "input "), *tree.paths(self.kept, "kept"))
            if isinstance(t, torch.Tensor)
        ]
        self._versions = [(name, t, _version(t)) for name, t in held]

    @property
    def spent(self) -> bool:
        """Whether its forward went on already, or would find that another call moved what its own prefix wrote."""
        return self.forward.taken or not self.stood.written.isdisjoint(self.stood.moved())

    def refuse_if_written(self) -> None:
        """Raise `BoundaryError` if what crosses, or an input, was written into since the prefix ran."""
        name = next((name for name, t, was in self._versions if _version(t) != was), None)
        if name is not None:
            raise BoundaryError(
                f"{name!r} was written into after the prefix ran ({self.split_id}); the forward that waits there may use it again, "
                "and the whole model would not see that. Write into it after the suffix has run, or hand a copy to the prefix"
            )

    def crossing(self) -> BoundaryPayload:
        """What crosses, apart from the forward that waits: for any process that has the model; raises `BoundaryError`."""
        self.refuse_if_written()
        if self.forward.halt.ended:
            return self._apart(self.labels, self.raw, self.requires_grad)
        tensors = dict(self.tensors)
        wanting = list(self.requires_grad)
        for number, t in enumerate(self.kept):
            tensors[f"kept_{number}"] = t.detach()
            if t.requires_grad:
                wanting.append(f"kept_{number}")
        labels = (*tensors, PYTHON)
        raw = (*tensors.values(), self.stood.told(self.before).told())
        return self._apart(labels, raw, tuple(wanting))

    def _apart(self, labels: tuple[str, ...], raw: tuple[Any, ...], wanting: tuple[str, ...]) -> BoundaryPayload:
        made = BoundaryPayload(self.split_id, self.plan_signature, 1, labels, raw, wanting)
        made.autocast = self.autocast
        return made

    def hold_kept(self) -> None:
        """Have the graph of what else crosses too, whose gradients come from a suffix that was trained elsewhere."""
        if self._graph is None or not self.kept or self.labels[-1] == f"kept_{len(self.kept) - 1}":
            return
        self.labels += tuple(f"kept_{number}" for number in range(len(self.kept)))
        self.raw += tuple(t.detach() for t in self.kept)
        self._graph += tuple(self.kept)

    def to_bytes(self) -> bytes:
        """What crosses as bytes, for any process that prepared the same split.

        Besides the output of the module's call it holds what else the suffix used from before the cut in the examples, and what
        Python needs to go through the prefix's part without running it. Raises `BoundaryError` where that can't be sent.
        """
        return self.crossing().to_bytes()

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, device: str = "cpu", max_bytes: int = 1 << 32
    ) -> BoundaryPayload:
        """As `BoundaryPayload.from_bytes`: what was sent has no forward that waits."""
        return BoundaryPayload.from_bytes(data, device=device, max_bytes=max_bytes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._stays()

    def __copy__(self) -> StoppedBoundary:
        self._stays()

    def __deepcopy__(self, memo: dict[int, Any]) -> StoppedBoundary:
        self._stays()

    def _stays(self) -> Never:
        raise BoundaryError(
            f"this boundary ({self.split_id}) is a forward of the model's own Python that waits in this process, which can't be "
            "copied; send it by to_bytes, which holds what crosses alone"
        )

    def __repr__(self) -> str:
        return super().__repr__().replace("BoundaryPayload", "StoppedBoundary", 1).replace(", batch 1", "", 1)


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version
