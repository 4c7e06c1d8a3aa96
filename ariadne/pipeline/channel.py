"""Headers between two ranks: small messages of bytes on the CPU, beside those that torch's engine sends; and how an error
ends all."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ariadne.errors import PipelineError

_BLOCK = 2048  # bytes of the first message; what is longer comes in a second one
_TAG = 7100  # the engine sends with tag 0
_UNUSED = 7099  # nobody sends with this one
_PATIENCE = 2.0  # seconds that a rank that failed waits for the others to read why


@dataclass
class Channel:
    """Process groups of a pipeline's own, on the ranks of another: `group` for what the engine sends, `headers` for headers.

    Of its own, so that an error may close them without taking the user's with it.
    """

    parent: dist.ProcessGroup
    group: dist.ProcessGroup
    headers: dist.ProcessGroup
    broken: bool = False
    _under_way: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, parent: dist.ProcessGroup | None) -> Channel:
        """That of a group, made when it is first asked for, which all its ranks must do."""
        parent = parent or dist.group.WORLD
        assert parent is not None
        known = _channels.get(parent.group_name)
        if known is not None and known.parent is parent and not known.broken:
            return known
        ranks, backend = dist.get_process_group_ranks(parent), str(dist.get_backend_config(parent))
        own = "gloo" if set(_backends(backend)) == {"gloo"} else backend

        def new(kind: str) -> dist.ProcessGroup:
            made = dist.new_group(ranks, backend=kind, timeout=_timeout(parent), use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            return made

        group = new(own)
        headers = group if "gloo" in _backends(backend) else new("gloo")
        found = _channels[parent.group_name] = cls(parent, group, headers)
        return found

    @property
    def rank(self) -> int:
        """This rank, within the group."""
        return dist.get_rank(self.group)

    # --- headers --------------------------------------------------------------------------------------------------------

    def send(self, data: bytes, rank: int, tag: int) -> None:
        """Send without waiting; `rank` counts within the group, and `tag` tells one row of messages from another."""
        framed = len(data).to_bytes(8, "little") + data
        head = framed[:_BLOCK].ljust(_BLOCK, b"\0")
        for piece in (head, framed[_BLOCK:]):
            if piece:
                t = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                work = dist.isend(t, group=self.headers, group_dst=rank, tag=_TAG + tag)
                assert work is not None
                self._under_way.append((work, t))

    def receive(self, rank: int, tag: int) -> bytes:
        """The next message of that row."""
        head = torch.empty(_BLOCK, dtype=torch.uint8)
        dist.recv(head, group=self.headers, group_src=rank, tag=_TAG + tag)
        data = bytes(head.numpy())
        size = int.from_bytes(data[:8], "little")
        if size <= _BLOCK - 8:
            return data[8 : 8 + size]
        rest = torch.empty(size + 8 - _BLOCK, dtype=torch.uint8)
        dist.recv(rest, group=self.headers, group_src=rank, tag=_TAG + tag)
        return data[8:] + bytes(rest.numpy())

    def send_memory(self, t: torch.Tensor, rank: int) -> None:
        """Send bytes of a tensor without waiting, outside of what the engine sends."""
        work = dist.isend(t, group=self.group, group_dst=rank, tag=self._tag(t))
        assert work is not None
        self._under_way.append((work, t))

    def receive_memory(self, t: torch.Tensor, rank: int) -> None:
        """Receive what `send_memory` sent."""
        dist.recv(t, group=self.group, group_src=rank, tag=self._tag(t))

    @staticmethod
    def _tag(t: torch.Tensor) -> int:
        return _TAG - 2 if t.device.type == "cpu" else 0  # only gloo knows tags

    def flush(self) -> None:
        """Wait until all that was sent has been received."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    # --- errors ---------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, where: str) -> BaseException:
        """End the pipeline on all ranks, each with this error; returns what this rank is to raise.

        The first error is kept in the store, and all connections of the pipeline are closed, so that whoever waits for this
        rank wakes up, finds out why, and closes its own.
        """
        if self.broken:
            return error
        self.broken = True
        store, key = dist.distributed_c10d._get_default_store(), f"ariadne/{self.headers.group_name}/error"
        mine = f"{self.rank} {where}: {type(error).__name__}: {error}"
        try:
            told = store.compare_set(key, "", mine).decode()
        except RuntimeError:  # the store's host is gone
            told = ""
        self._close()
        if told in ("", mine):
            self._wait_for_readers(store, key)
            return error
        store.add(f"{key}/read", 1)
        rank, _, text = told.partition(" ")
        found = PipelineError(f"rank {rank} failed in {text}")
        found.__cause__ = error
        return found

    def _wait_for_readers(self, store: Any, key: str) -> None:
        """The store may live in this process, and end with it."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and store.add(f"{key}/read", 0) < dist.get_world_size(self.group) - 1:
            time.sleep(0.02)

    def _close(self) -> None:
        """Close the connections: gloo closes all of a group when a wait runs out of time, on one that is still open."""
        self._under_way.clear()
        for group in [self.group] if self.group is self.headers else [self.group, self.headers]:
            if "gloo" in _backends(str(dist.get_backend_config(group))):
                for other in range(dist.get_world_size(group)):
                    if other != self.rank:
                        _run_out(group, other)


def _run_out(group: dist.ProcessGroup, rank: int) -> None:
    """Wait for what will not come."""
    try:
        work = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=rank, tag=_UNUSED)
        assert work is not None
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:  # which is what was wanted
        return


_channels: dict[str, Channel] = {}


@atexit.register
def _let_go() -> None:
    """Let go of the groups: gloo's threads hold tensors, and those that outlive the interpreter abort the process.

    `destroy_process_group` does not end the threads of a group that is still known here (pytorch #179291).
    """
    for channel in _channels.values():
        channel._under_way.clear()
        del channel.group, channel.headers
    _channels.clear()


def _backends(config: str) -> list[str]:
    """The backends that a group's configuration names, which reads "gloo" or "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2] for part in config.split(",")]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group waits; None where its backend does not say."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None
