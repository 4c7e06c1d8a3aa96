"""The link: sockets of ZeroMQ with the limits that a server needs, the one file that imports it.

A server has one ROUTER, a client one DEALER for as long as its connection holds. Frames are bytes; what they mean is
told elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import Any

from ariadne.errors import HandshakeError, RemoteError, SpecError

try:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator
    from zmq.utils.monitor import parse_monitor_message
except ImportError:  # the extra `remote` is not installed, which is said when it is needed
    zmq = None  # type: ignore[assignment]

LARGE = 1 << 16  # bytes from which on frames are sent without a copy
HEARTBEAT, SILENCE, HANDSHAKE = 2_000, 10_000, 10_000  # ms: a sign of life, given up after, for the first words
IDLE, LOOK = 100, 20  # ms: that a server waits for a message at a time, and a client before it looks at its connection
# Seconds that a client looks again and again before it sleeps, where the reply before came so soon: waking takes a third of it.
SOON = 300e-6
_ADDRESS = re.compile(r"(?:tcp://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")


def require() -> None:
    """Raise `RemoteError` where ZeroMQ is not installed."""
    if zmq is None:
        raise RemoteError("halves in two processes need pyzmq: pip install pyzmq")


def parsed(address: str) -> tuple[str, int]:
    """Host and port of `host:7077`; `SpecError` for anything else.

    >>> parsed("127.0.0.1:7077")
    ('127.0.0.1', 7077)
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or int(found[2]) > 65535:
        raise SpecError(f"an address is host:port, such as 127.0.0.1:7077; found {address!r}")
    return found[1], int(found[2])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return _LOOPBACK.fullmatch(host) is not None


def curve_pair() -> tuple[str, str]:
    """A new public and secret key."""
    require()
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _options(socket: Any, host: str, most_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, SILENCE // 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)
    socket.setsockopt(zmq.IPV6, int(host.startswith("[")))


class Listener:
    """A server's socket: requests come in with who sent them, replies go out to these."""

    def __init__(
        self, address: str, most_bytes: int, waiting: int, pair: tuple[str, str] | None, allowed: Collection[str]
    ) -> None:
        require()
        host, port = parsed(address)
        if pair is None and not is_loopback(host):
            raise SpecError(
                f"without keys only loopback is served, where nobody else can listen or come; asked for {host}. Make keys with "
                "`ariadne keys`, and pass key= and clients=; or listen on 127.0.0.1 and let ssh forward the port"
            )
        if pair is not None and not allowed:
            raise SpecError(
                "a server with a key needs the public keys of its clients: pass clients=, files or a folder"
            )
        self._context: Any = zmq.Context()
        self._guard: Any = None
        self.socket: Any = self._context.socket(zmq.ROUTER)
        _options(self.socket, host, most_bytes)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Without signs of life of its own: libzmq 4.3.5 ends the process when it has one to send to a peer that sent more than the
        # mark below and hung up (its issue 4841). Clients ask for these signs, and say after which silence they are gone.
        # ZeroMQ counts what was taken in strides of half the mark: more than what an honest client has in flight must pass.
        self.socket.setsockopt(zmq.RCVHWM, waiting)
        self.socket.setsockopt(zmq.SNDHWM, 4 * waiting)
        self.socket.setsockopt(zmq.RCVTIMEO, IDLE)
        if pair is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", _Callers(allowed))
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, pair[0].encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1].encode())
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise RemoteError(
                f"{address} can't be listened on: {error}. Take another port, or stop who has it"
            ) from None
        bound: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = bound.removeprefix("tcp://")

    def receive(self, waits: bool) -> tuple[bytes, str, list[Any]] | None:
        """The next message: its sender, where that is, and its frames; None where none is there, or came while it waited."""
        try:
            who, *frames = _received(self.socket, waits)
        except zmq.Again:
            return None
        return who.bytes, _peer(frames), [f.buffer for f in frames]

    def send(self, who: bytes, frames: Sequence[Any]) -> bool:
        """Send a message; False where the other is gone, or takes nothing: it may ask again."""
        try:
            _send(self.socket, [who, *frames])
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close, once what was sent has gone out, or two seconds have passed."""
        self.socket.close(linger=2000)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


class _Callers:
    """Says of a public key whether its owner may come."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        """As ZeroMQ's authenticator asks."""
        return key.decode("ascii", "replace") in self.allowed


def _peer(frames: Sequence[Any]) -> str:
    try:
        return str(frames[0].get("Peer-Address")) if frames else ""
    except zmq.ZMQError:
        return ""


def _received(socket: Any, waits: bool) -> list[Any]:
    found = [socket.recv(0 if waits else zmq.NOBLOCK, copy=False)]
    while found[-1].more:
        found.append(socket.recv(0, copy=False))
    return found


def _send(socket: Any, frames: Sequence[Any]) -> None:
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0), copy=len(frame) < LARGE)


class Line:
    """A client's connection, until it breaks: then `broken` says so, and another is made."""

    def __init__(self, address: str, most_bytes: int, pair: tuple[str, str] | None, server: str) -> None:
        require()
        host, port = parsed(address)
        if pair is not None and not server:
            raise SpecError("a client with a key needs the public key of its server: pass server_key=")
        self.address = address
        self._context: Any = zmq.Context.instance()
        self.socket: Any = self._context.socket(zmq.DEALER)
        _options(self.socket, host, most_bytes)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE)
        self.socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self.socket.setsockopt(zmq.RCVTIMEO, LOOK)
        if pair is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, pair[0].encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair[1].encode())
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        self._monitor: Any = self.socket.get_monitor_socket(events)
        self.broken, self.connected, self._soon = False, False, False
        self.socket.connect(f"tcp://{host}:{port}")

    def send(self, frames: Sequence[Any], until: float) -> bool:
        """Send a message; False where the line broke, or nothing could be sent until that moment of `time.monotonic`."""
        while not self.broken:
            try:
                _send(self.socket, frames)
                return True
            except zmq.Again:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self.socket.poll(min(left, 0.05) * 1000, zmq.POLLOUT)
                self._look()
        return False

    def receive(self, wait: float) -> list[Any] | None:
        """The frames of the next message; None where none comes within so many seconds, or soon, or the line broke."""
        start = time.perf_counter()
        if self._soon and wait > 0:
            while not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN and time.perf_counter() < start + SOON:
                pass
        elif 0 < wait < LOOK / 1000:
            self.socket.poll(wait * 1000)
        try:
            frames = [f.buffer for f in _received(self.socket, wait >= LOOK / 1000)]
        except zmq.Again:
            self._soon = self._soon and wait <= 0
            self._look()
            return None
        self._soon = time.perf_counter() < start + SOON
        return frames

    def _look(self) -> None:
        """Read what happened to the connection."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise HandshakeError(
                    f"the server at {self.address} does not take this client's key: add its .pub file to the server's clients"
                )
            self.connected = self.connected or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.broken = self.broken or (event == zmq.EVENT_DISCONNECTED and self.connected)

    def close(self) -> None:
        """Close; what was not sent is forgotten."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
