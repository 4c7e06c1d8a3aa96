"""What every test runs under: one thread, no network, a chosen hypothesis profile, packages that keep to themselves."""

from __future__ import annotations

import ipaddress
import os
import sys
import tempfile
from typing import Any

# Read by ultralytics and huggingface_hub as they are imported, and by the processes that tests start. Older releases of
# ultralytics know no "1" and "0".
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "HF_HUB_OFFLINE": "1"}
if "YOLO_CONFIG_DIR" not in os.environ:
    _settings = tempfile.TemporaryDirectory(prefix="ariadne-ultralytics-")
    os.environ["YOLO_CONFIG_DIR"] = _settings.name

import torch
from hypothesis import settings

torch.set_num_threads(1)

# Under CI, hypothesis would choose a profile that draws the same examples every time and keeps none: choose explicitly.
for _name, _examples in {"smoke": 25, "full": 200, "nightly": 5000}.items():
    settings.register_profile(_name, max_examples=_examples, deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("ARIADNE_HYPOTHESIS_PROFILE", "smoke"))


def _is_local(host: Any) -> bool:
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_network(event: str, args: tuple[Any, ...]) -> None:
    """Refuse look-ups and connections that would leave this machine; sockets between its own processes may be made."""
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    if not _is_local(host):
        raise RuntimeError(
            f"a test wants the network: {event} to {host!r}. Tests build their models from configs and seeds."
        )


sys.addaudithook(_no_network)
