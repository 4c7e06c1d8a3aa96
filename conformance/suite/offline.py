"""What the processes of the suite run under: one thread, and no network. Import it before torch and the model libraries."""

from __future__ import annotations

import atexit
import ipaddress
import os
import shutil
import sys
import tempfile
from typing import Any

# Read by ultralytics and huggingface_hub as they are imported, and by the processes that tests start. Older releases of
# ultralytics know no "1" and "0".
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false", "HF_HUB_OFFLINE": "1"}
# Results depend on the number of threads; and a process that forks must have no others.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
if "YOLO_CONFIG_DIR" not in os.environ:
    os.environ["YOLO_CONFIG_DIR"] = _settings = tempfile.mkdtemp(prefix="ariadne-ultralytics-")
    atexit.register(shutil.rmtree, _settings, ignore_errors=True)
# What is compiled is kept by default, and a test must meet no package that another one made. The user's own stay out of it, too.
os.environ["ARIADNE_CACHE_DIR"] = _packages = tempfile.mkdtemp(prefix="ariadne-packages-")
atexit.register(shutil.rmtree, _packages, ignore_errors=True)


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
