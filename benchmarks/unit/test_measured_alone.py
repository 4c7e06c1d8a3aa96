"""Processes abreast: whoever measures is alone, and a turn ends whatever becomes of who had it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.turns import Turns

ROOT = Path(__file__).resolve().parents[2]
# Counts in a loop; or asks for a turn, and says how much the others counted while it had it.
COUNTS = "import sys, time\nwhile True:\n open(sys.argv[1], 'a').write('.')\n time.sleep(0.005)"
MEASURES = """
import pathlib, sys, time
from benchmarks.turns import alone
with alone(int(sys.argv[2])):
    time.sleep(0.1)
    before = pathlib.Path(sys.argv[1]).stat().st_size
    time.sleep(0.3)
    print(pathlib.Path(sys.argv[1]).stat().st_size - before)
"""
DIES = """
import os, socket, sys, time
socket.socket(fileno=int(sys.argv[2])).sendall(b"?")
time.sleep(0.2)
os._exit(3)
"""


def begun(shared: Turns, code: str, file: Path) -> tuple[subprocess.Popen[str], socket.socket]:
    mine, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", code, str(file), str(theirs.fileno())]
        child = shared.begin(
            lambda: subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        )
    return child, mine


def test_who_has_a_turn_is_alone_and_the_others_go_on_after_it(tmp_path: Path) -> None:
    shared, file = Turns(), tmp_path / "count"
    file.touch()
    counting, channel = begun(shared, COUNTS, file)
    try:
        for code, exit_status in ((MEASURES, 0), (DIES, 3)):
            child, mine = begun(shared, code, file)
            with mine:
                assert shared.wait(child, mine, 20) == exit_status
            told = child.communicate()[0]
            assert json.loads(told or "0") == 0, "the other counted while this one had its turn"
            before = file.stat().st_size
            time.sleep(0.1)
            assert file.stat().st_size > before, "the other goes on"
    finally:
        channel.close()
        counting.kill()
        counting.communicate()


def test_turns_are_taken_one_after_another(tmp_path: Path) -> None:
    shared = Turns()
    code = (
        "import sys, time\nfrom benchmarks.turns import alone\nwith alone(int(sys.argv[2])):\n"
        " open(sys.argv[1], 'a').write('('); time.sleep(0.05); open(sys.argv[1], 'a').write(')')"
    )
    file = tmp_path / "order"

    def run() -> None:
        child, mine = begun(shared, code, file)
        with mine:
            shared.wait(child, mine, 20)
        child.communicate()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() == "()" * 3


def test_a_turn_has_an_end_and_who_does_not_end_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST", 0.2)
    shared, file = Turns(), tmp_path / "count"
    file.touch()
    counting, channel = begun(shared, COUNTS, file)
    child, mine = begun(shared, MEASURES.replace("0.3", "30"), file)
    try:
        with mine:
            assert shared.wait(child, mine, 20) == -signal.SIGKILL, "it would go on measuring while the others run"
        assert not child.communicate()[0]
        before = file.stat().st_size
        time.sleep(0.1)
        assert file.stat().st_size > before, "the others go on"
    finally:
        channel.close()
        counting.kill()
        counting.communicate()
