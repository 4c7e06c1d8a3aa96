"""A server among strangers: what is malformed, too much, silent or without a key costs its sender alone."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import ariadne
from ariadne.errors import (
    DeadlineError,
    HandshakeError,
    PayloadError,
    SpecError,
)
from ariadne.remote import Server, make_key
from conformance.unit.remote_kit import ROOT, beside
from conformance.unit.remote_pair import Pair, images

# --- strangers ------------------------------------------------------------------------------------------------------


def raw(address: str) -> Any:
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.setsockopt(zmq.LINGER, 0)
    line.connect(f"tcp://{address}")
    return line


def fuzzed(code: str) -> subprocess.CompletedProcess[str]:
    """The fuzzer in a process of its own, since it forks."""
    code = f"from conformance.suite import remote_fuzz\n{code}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_mutated_messages_cost_their_sender_alone() -> None:
    count = int(os.environ.get("ARIADNE_REMOTE_FUZZ", "1500"))
    done = fuzzed(f"print(remote_fuzz.run({count}, 0))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"'messages': {count}" in done.stdout


@pytest.mark.planted
def test_a_planted_server_that_ends_over_a_message_is_noticed() -> None:
    done = fuzzed("""
import json
remote_fuzz.PATIENCE = 5.0
def planted(*given):
    request = remote_fuzz.Server._request
    def trusting(self, who, peer, frames):
        json.loads(bytes(frames[0]))
        return request(self, who, peer, frames)
    remote_fuzz.Server._request = trusting
    remote_fuzz.serve(*given)
remote_fuzz.run(2000, 0, planted)
""")
    assert done.returncode == 1
    assert "has gone silent" in done.stderr


def test_babbling_and_silent_peers_don_t_keep_others_waiting(pair: Pair, server: Server) -> None:
    host, _, port = server.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(50)]
    for i, stranger in enumerate(strangers):
        if i % 2:
            stranger.sendall(random.Random(i).randbytes(5000))
    flood = raw(server.address)
    for _ in range(200):
        flood.send_multipart([b'{"op":"ping","id":1}', bytes(1000)])
    with ariadne.connect(server.address, timeout=60) as remote:
        x = images(2)
        assert torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x))
    flood.close()
    server.stop()
    for stranger in strangers:
        stranger.close()


FLOODED = """
import sys, time, zmq
from ariadne.remote import link

options = link._options
if sys.argv[1:] == ["planted"]:
    link._options = lambda socket, *given: (options(socket, *given), socket.setsockopt(zmq.HEARTBEAT_IVL, 50),
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000))
listener = link.Listener("127.0.0.1:0", 1 << 20, 10, None, ())
print(listener.address, flush=True)
sys.stdin.readline()
time.sleep(1.5)
while listener.receive(False):
    pass
listener.close()
"""


@pytest.mark.parametrize("how", ["as it is", pytest.param("planted", marks=pytest.mark.planted)])
def test_who_sends_more_than_is_taken_and_hangs_up_does_not_end_the_server(how: str) -> None:
    command = [sys.executable, "-c", FLOODED, how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        line = raw(process.stdout.readline().strip())
        for _ in range(2000):
            line.send(b"{}")
        time.sleep(0.5)  # for the plant alone: what was sent has been read up to the mark
        line.close()
        _, words = process.communicate("\n", timeout=60)
    assert process.returncode == (0 if how == "as it is" else -signal.SIGABRT), words


def test_more_in_flight_than_allowed_is_refused_by_the_server_too(
    pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.half), "run_suffix", lambda *_: time.sleep(0.05))
    line, boundary = raw(server.address), pair.edge.run_prefix(images(1)).to_bytes()
    for i in range(40):
        line.send_multipart([json.dumps({"op": "run", "id": i, "session": "a"}).encode(), boundary])
    found = []
    for _ in range(40):
        assert line.poll(20_000)
        found.append(json.loads(line.recv_multipart()[0]))
    line.close()
    assert {r.get("error") for r in found if not r["ok"]} == {"BusyError"}
    assert any(r["ok"] for r in found)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"{"], "no JSON"),
        ([b"[" * 60_000], "no JSON"),
        ([b"[1]"], "is a list"),
        ([b"{}", b"", b"", b"", b""], "1 to 4 parts"),
        ([b" " * 70_000], "70000 bytes"),
        ([b'{"op":"rm"}'], "there is no op 'rm'"),
        ([b'{"op":1}'], "must be of type str"),
        ([b'{"op":"run","seconds":"a"}', b""], "no time"),
        ([b'{"op":"run","seconds":NaN}', b""], "no JSON"),
        ([b'{"op":"run"}'], "1 or 2 bodies"),
        ([b'{"op":"run","autocast":[["xpu","float64",true]]}', b""], "payload"),
        ([b'{"op":"begin","run":"../x","at":0,"session":""}'], "32 hexadecimal digits"),
    ],
)
def test_what_is_malformed_is_told_to_its_sender(server: Server, frames: list[bytes], words: str) -> None:
    line = raw(server.address)
    line.send_multipart(frames)
    assert line.poll(10_000)
    reply = json.loads(line.recv_multipart()[0])
    line.close()
    assert reply["ok"] is False
    assert reply["error"] == PayloadError.__name__
    assert words in reply["words"]


# --- keys -----------------------------------------------------------------------------------------------------------


def test_with_keys_those_alone_come_whose_key_the_server_knows(pair: Pair, tmp_path: Path) -> None:
    for name in ("server", "edge", "stranger"):
        make_key(tmp_path / f"{name}.key")
    assert (tmp_path / "server.key").stat().st_mode & 0o077 == 0
    with pytest.raises(SpecError, match="a key that is in use is not overwritten"):
        make_key(tmp_path / "server.key")
    known = tmp_path / "known"
    known.mkdir()
    (tmp_path / "edge.key.pub").rename(known / "edge.pub")
    options: dict[str, Any] = {"key": tmp_path / "server.key", "clients": [known]}
    public = tmp_path / "server.key.pub"
    with beside(Server(pair.suffix, listen="127.0.0.1:0", log=None, **options)) as server:
        with ariadne.connect(server.address, timeout=30, key=tmp_path / "edge.key", server_key=public) as remote:
            x = images(2)
            assert torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x))
        with pytest.raises(HandshakeError, match="does not take this client's key"):
            ariadne.connect(server.address, timeout=30, key=tmp_path / "stranger.key", server_key=public)
        with pytest.raises(DeadlineError, match=r"nobody answered .* asks for keys, where none is given"):
            ariadne.connect(server.address, timeout=1)
        with pytest.raises(DeadlineError, match="wrong server_key= looks like this too"):
            ariadne.connect(
                server.address, timeout=1, key=tmp_path / "edge.key", server_key=tmp_path / "stranger.key.pub"
            )
    with pytest.raises(SpecError, match="a client with a key needs the public key of its server"):
        ariadne.connect("127.0.0.1:9", key=tmp_path / "edge.key")
    with pytest.raises(SpecError, match="holds a public key alone"):
        ariadne.connect("127.0.0.1:9", key=public, server_key=public)
