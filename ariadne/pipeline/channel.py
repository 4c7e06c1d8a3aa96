"""Headers between two ranks: small messages of bytes on the CPU, beside those that torch's engine sends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_BLOCK = 2048  # bytes of the first message; what is longer comes in a second one
_TAG = 7100  # the engine sends with tag 0


@dataclass
class Channel:
    """Sends and receives headers within a group; `group` must be able to send tensors that are on the CPU."""

    group: dist.ProcessGroup
    _under_way: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Channel:
        """That of a group; one whose backend can't send from the CPU gets a gloo group beside it, which all its ranks must ask for."""
        group = group or dist.group.WORLD
        assert group is not None
        if "gloo" not in str(dist.get_backend_config(group)):
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return cls(group)

    def send(self, data: bytes, rank: int, tag: int) -> None:
        """Send without waiting; `rank` counts within the group, and `tag` tells one row of messages from another."""
        framed = len(data).to_bytes(8, "little") + data
        head = framed[:_BLOCK].ljust(_BLOCK, b"\0")
        self._under_way = [(work, t) for work, t in self._under_way if not work.is_completed()]
        for piece in (head, framed[_BLOCK:]):
            if piece:
                t = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                work = dist.isend(t, group=self.group, group_dst=rank, tag=_TAG + tag)
                assert work is not None
                self._under_way.append((work, t))

    def receive(self, rank: int, tag: int) -> bytes:
        """The next message of that row."""
        head = torch.empty(_BLOCK, dtype=torch.uint8)
        dist.recv(head, group=self.group, group_src=rank, tag=_TAG + tag)
        data = bytes(head.numpy())
        size = int.from_bytes(data[:8], "little")
        if size <= _BLOCK - 8:
            return data[8 : 8 + size]
        rest = torch.empty(size + 8 - _BLOCK, dtype=torch.uint8)
        dist.recv(rest, group=self.group, group_src=rank, tag=_TAG + tag)
        return data[8:] + bytes(rest.numpy())

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
