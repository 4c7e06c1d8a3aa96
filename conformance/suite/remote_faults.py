"""Faults for training in two processes: sides killed at random, connections cut, disks full; the final weights stay the same.

`python -m conformance.suite.remote_faults 1000 --seed 3` kills 1,000 times. Every other run has the loss on the edge, in three
parts; with `--loss edge` each of them has, with `--loss server` none. Each life of a process is a fork of this one, which has torch
loaded already. All that it does hangs on the seed, save for how fast the machine is.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ariadne
from ariadne.errors import CheckpointError, StepError
from ariadne.remote import Edge, Server, Training, checkpoint, until_told

STEPS, EVERY, MOST = 40, 6, 1.0  # of the last, the norm by which gradients are clipped
CE = nn.functional.cross_entropy
PATIENCE = 120.0  # seconds that a run may take


class Small(nn.Module):
    """A bit of everything: a tied weight, dropout on both sides, statistics; trained with steps that are scaled and clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.norm, self.more = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8),
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.mix(self.embed(tokens)))
        hidden = self.drop(torch.relu(self.norm(self.more(hidden))))
        return hidden @ self.embed.weight.t()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a step."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (6,), generator=drawn), torch.randint(0, 20, (6,), generator=drawn)


def sgd(half: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9)


def rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.5)


def scaling() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)


def prepare(folder: Path) -> None:
    """Both halves, and the three parts, as files in a folder, and the state of the whole model after all steps, in one process."""
    torch.manual_seed(0)
    model = Small().train()
    runtime = ariadne.prepare_split(model, (batch(0)[0],), split="after:mix")
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    pipeline = ariadne.prepare_pipeline(model, (batch(0)[0],), boundaries=["after:mix", "after:norm"])
    for i in range(3):
        pipeline.save_part(i, folder / f"part{i}")
    optimizer, scaler = sgd(model), scaling()
    rates = rate(optimizer)
    torch.manual_seed(1)
    for step in range(STEPS):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        scaler.scale(CE(model(tokens), targets)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
    save_file({n: t.detach().clone() for n, t in model.state_dict().items()}, folder / "expected")


def in_parts(folder: Path) -> bool:
    """Whether the run in a folder has the loss on the edge."""
    return (folder / "part0").exists()


def there(folder: Path) -> ariadne.Half:
    """What the server has."""
    return ariadne.load(folder / "part1", plain=True) if in_parts(folder) else ariadne.load(folder / "suffix")


def serve(folder: Path, port: int, full: bool) -> None:
    """One life of the server."""
    half = there(folder)
    server = Server(
        half,
        listen=f"127.0.0.1:{port}",
        optimizer=sgd(half),
        scheduler=rate,
        loss_fn=None if in_parts(folder) else "cross_entropy",
        checkpoints=folder / "there",
        log=None,
    )
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    until_told(server)


def train(folder: Path, port: int, full: bool) -> None:
    """One life of the client; ends when all steps are done and kept."""
    half = None if in_parts(folder) else ariadne.load(folder / "prefix")
    torch.manual_seed(1)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    with ariadne.connect(
        f"127.0.0.1:{port}", half, timeout=10 * PATIENCE
    ) as remote:  # who kills says when it is too long
        training = None
        while training is None or training.step < STEPS or not (folder / "here" / f"{STEPS:012d}.safetensors").exists():
            try:
                training = training or begun(half or on_edge(folder, remote), remote, folder)
                for _ in training.run(STEPS, batch):
                    pass
                if not (folder / "here" / f"{STEPS:012d}.safetensors").exists():
                    try:
                        training.save()
                    except StepError:
                        training = None  # the server was started anew since: from the last checkpoint, then
            except CheckpointError:
                time.sleep(0.02)  # somebody makes room, or kills us


def on_edge(folder: Path, remote: ariadne.Remote) -> Edge:
    return Edge(folder / "part0", remote, folder / "part2")


def begun(side: ariadne.Half | Edge, remote: ariadne.Remote, folder: Path) -> Training:
    """A run whose steps are scaled and clipped, at a rate that moves."""
    optimizer = sgd(side)
    how: dict[str, Any] = {"scaler": scaling(), "scheduler": rate(optimizer), "max_norm": MOST}
    how |= {"loss_fn": CE} if isinstance(side, Edge) else {}
    return Training(side, remote, optimizer, checkpoints=folder / "here", every=EVERY, **how)


def fork(work: Callable[..., None], *given: Any) -> int:
    """A process that does some work and exits with 0, or says why not."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work(*given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Cutter:
    """Stands between client and server, and cuts some connections after a random number of bytes, in mid-message."""

    def __init__(self, to: int, draw: random.Random) -> None:
        self.to, self.draw, self.cuts, self.often, self.moved = to, draw, 0, 0.5, 0  # of the last, bytes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            limit = int(self.draw.expovariate(1 / 12_000)) if self.draw.random() < self.often else None
            threading.Thread(target=self._join, args=(here, limit), daemon=True).start()

    def _join(self, here: socket.socket, limit: int | None) -> None:
        try:
            there = socket.create_connection(("127.0.0.1", self.to), timeout=5)
        except OSError:
            here.close()
            return
        left = [limit]
        for one, other in ((here, there), (there, here)):
            threading.Thread(target=self._forward, args=(one, other, left), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, left: list[int | None]) -> None:
        try:
            one.settimeout(None)
            while data := one.recv(4096):
                if left[0] is not None:
                    cut, left[0] = left[0] < len(data), max(0, left[0] - len(data))
                    if cut:
                        other.sendall(data[: len(data) // 2])
                        self.cuts += 1
                        break
                other.sendall(data)
                self.moved += len(data)
        except OSError:
            pass  # the other end is gone: so is this one
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                end.close()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def disturbed(folder: Path, draw: random.Random, kills: int, told: Counter[str]) -> int:
    """One training run with faults, up to so many kills; returns how many there were."""
    port, done, start = free_port(), 0, time.monotonic()
    cutter = Cutter(port, draw)
    lives: dict[str, int] = {}

    def revive(who: str, sound: bool = False) -> None:
        full = not sound and draw.random() < 0.1
        told["disks full"] += full
        at = cutter.port if who == "client" else port
        lives[who] = fork({"server": serve, "client": train}[who], folder, at, full)
        ill[who] = full

    ill: dict[str, bool] = {}
    for who in ("server", "client"):
        revive(who, sound=True)
    while not cutter.moved and time.monotonic() - start < PATIENCE:
        time.sleep(0.002)
    took = time.monotonic() - start  # until both speak: on a busy machine shorter lives would all end before
    while True:
        pause = time.monotonic() + draw.expovariate(1 / (0.15 + took))
        while time.monotonic() < pause or done >= kills:
            if time.monotonic() - start > PATIENCE + 4 * kills * took:
                raise SystemExit(f"a run has not ended in time; see {folder}")
            pid, status = os.waitpid(lives["client"], os.WNOHANG)
            if pid:
                os.kill(lives["server"], signal.SIGTERM)
                os.waitpid(lives["server"], 0)
                cutter.close()
                told["connections cut"] += cutter.cuts
                if status:
                    raise SystemExit(f"the client ended with {status}; see {folder}")
                return done
            time.sleep(0.002)
            if done >= kills and any(ill.values()):
                break
        sick = [who for who in lives if ill[who]]
        for who in sick if done >= kills else draw.choice((["client"], ["server"], ["server"], ["client", "server"])):
            os.kill(lives[who], signal.SIGKILL)
            os.waitpid(lives[who], 0)
            done += 1
            told[f"{who}s killed"] += 1
            told["killed while both spoke"] += cutter.moved > 0
            revive(who, sound=done >= kills)
        cutter.moved = 0
        cutter.often = 0.5 if done < kills else 0.0


def hold(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Raise where a tensor of either side's last checkpoint is not the whole model's after the last step."""
    if in_parts(folder):
        port = free_port()
        server = fork(serve, folder, port, False)
        try:
            with ariadne.connect(f"127.0.0.1:{port}", timeout=PATIENCE) as remote:
                found = differing(on_edge(folder, remote), folder / "here", expected, {"scaler": scaling()})
        finally:
            os.kill(server, signal.SIGKILL)
    else:
        found = differing(ariadne.load(folder / "prefix"), folder / "here", expected, {"scaler": scaling()})
    found += differing(there(folder), folder / "there", expected, {})
    assert not found, f"not as without faults: {', '.join(found)}"


def differing(side: Any, place: Path, expected: dict[str, torch.Tensor], beside: dict[str, Any]) -> list[str]:
    """The tensors of one side that are not those of the whole model, by its last checkpoint."""
    paths = [p for p in place.glob("*.safetensors") if p.name != "start.safetensors"]
    optimizer = sgd(side)
    about = checkpoint.restore(max(paths), side, optimizer, {**beside, "scheduler": rate(optimizer)})[0]
    found = [f"{place.name}: {n}" for n, t in side.state_dict().items() if not torch.equal(t, expected[n])]
    return found + ([] if about.get("step", STEPS) == STEPS else [f"{place.name}: it is at step {about['step']}"])


def main(arguments: list[str] | None = None) -> int:
    """Make faults; 0 where all runs ended as one without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--loss", choices=("edge", "server"), help="on which side the loss is; both in turn, unless told"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    draw, told, done = random.Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as where:
        base = Path(where)
        if os.waitpid(fork(prepare, base), 0)[1]:  # not here: autograd's threads don't go through a fork
            return 1
        expected = load_file(base / "expected")
        while done < options.kills:
            folder = base / f"run {told['runs']}"
            folder.mkdir()
            three = options.loss == "edge" or (options.loss is None and told["runs"] % 2)
            for name in ("part0", "part1", "part2") if three else ("prefix", "suffix"):
                shutil.copy(base / name, folder / name)
            done += disturbed(folder, draw, min(options.kills - done, 25, (options.kills + 1) // 2), told)
            told["runs"] += 1
            if os.waitpid(fork(hold, folder, expected), 0)[1]:
                print(f"seed {options.seed}, run {told['runs']}: see above")
                return 1
            shutil.rmtree(folder)
    print(f"{done} kills: " + ", ".join(f"{n} {what}" for what, n in sorted(told.items())) + "; all ends equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
