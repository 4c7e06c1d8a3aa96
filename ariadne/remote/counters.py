"""Counters of a server, as text that Prometheus reads, and its log: one line for each request."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from ariadne.errors import RemoteError
from ariadne.remote.link import is_loopback, parsed

_HELP = {
    "ariadne_requests_total": ("counter", "Requests answered, by op and outcome."),
    "ariadne_received_bytes_total": ("counter", "Bytes of requests."),
    "ariadne_sent_bytes_total": ("counter", "Bytes of replies."),
    "ariadne_busy_seconds_total": ("counter", "Seconds spent on requests, by op."),
    "ariadne_waiting_seconds_total": ("counter", "Seconds that requests waited, by op."),
    "ariadne_lost_replies_total": ("counter", "Replies whose client was gone, or took nothing."),
    "ariadne_waiting": ("gauge", "Requests that wait."),
    "ariadne_training_step": ("gauge", "Requests done of the training run in hand."),
}


class Counters:
    """Numbers by name and labels."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name, tuple(labels.items())] += value  # type: ignore[assignment]

    def put(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, ()] = value  # type: ignore[assignment]

    def served(self, op: str, outcome: str, received: int, sent: int, busy: float, waited: float, lost: bool) -> None:
        """Count a request that was answered: bytes, and seconds."""
        values, of = self._values, (("op", op),)
        with self._lock:
            values["ariadne_requests_total", (*of, ("outcome", outcome))] += 1
            values["ariadne_received_bytes_total", ()] += received
            values["ariadne_sent_bytes_total", ()] += sent
            values["ariadne_busy_seconds_total", of] += busy  # type: ignore[assignment]
            values["ariadne_waiting_seconds_total", of] += waited  # type: ignore[assignment]
            values["ariadne_lost_replies_total", ()] += lost

    def total(self, name: str) -> int:
        """The sum of a counter over its labels."""
        with self._lock:
            return int(sum(v for (n, _), v in self._values.items() if n == name))

    def text(self) -> str:
        """All of them in Prometheus' text form."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, (kind, words) in _HELP.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            lines += [f"{n}{_labels(labels)} {value:g}" for (n, labels), value in values if n == name]
        return "\n".join(lines) + "\n"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    inner = ",".join(f'{k}="{v}"' for k, v in labels)
    return f"{{{inner}}}" if inner else ""


class Log:
    """One line for each request on stderr, for people or as JSON; nothing where `form` is None."""

    def __init__(self, form: str | None) -> None:
        self.form = form

    def __call__(self, **said: Any) -> None:
        if self.form is None:
            return
        moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if self.form == "json":
            line = json.dumps({"time": moment, **said})
        else:
            line = f"{moment} " + " ".join(f"{k}={v}" for k, v in said.items() if v != "")
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class Page:
    """The counters at http://ADDRESS/metrics, from a thread of its own, until it is closed."""

    def __init__(self, address: str, counters: Counters) -> None:
        host, port = parsed(address)
        if not is_loopback(host):
            raise RemoteError(
                f"counters are shown on loopback alone, and {host} is none; let a proxy show them elsewhere"
            )

        class Handler(BaseHTTPRequestHandler):
            timeout = 2  # a silent peer keeps the others waiting no longer

            def do_GET(self) -> None:  # the name that http.server looks for
                found = self.path == "/metrics"
                body = (counters.text() if found else "the counters are at /metrics\n").encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Say nothing: the log is of requests to the half."""

        self._server = HTTPServer((host.strip("[]"), port), Handler)
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()
