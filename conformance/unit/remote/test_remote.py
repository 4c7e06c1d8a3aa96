"""A suffix in another process: equal to the model, refused where it can't be, and bounded whatever comes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.cli import main
from ariadne.errors import (
    BoundaryError,
    BusyError,
    DeadlineError,
    HandshakeError,
    ModuleError,
    RemoteError,
    SpecError,
    StepError,
)
from ariadne.remote import Limits, Server, make_key
from conformance.unit.remote_kit import ROOT, Proxy, Served, beside, served
from conformance.unit.remote_pair import Pair, images, net

# --- equal ----------------------------------------------------------------------------------------------------------


def test_a_process_with_the_suffixs_file_alone_gives_what_the_model_gives(pair: Pair) -> None:
    with served(pair.suffix) as process, ariadne.connect(process.address, pair.prefix, timeout=60) as remote:
        for batch in (1, 2, 5, 64):
            x = images(batch)
            assert torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x))


def test_a_served_suffix_runs_under_the_autocast_of_its_client(pair: Pair, server: Server) -> None:
    x = images(3)
    with ariadne.connect(server.address, timeout=60) as remote:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            boundary, expected = pair.edge.run_prefix(x), pair.whole(x)
            assert expected.dtype is torch.bfloat16
            assert torch.equal(remote.run_suffix(boundary), expected)
            assert torch.equal(remote.submit(boundary).result(), expected)
        with pytest.raises(BoundaryError, match="the prefix ran under autocast"):
            remote.run_suffix(boundary)
        assert torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x))


def test_results_come_in_any_number_and_the_limit_of_those_in_flight_pushes_back(pair: Pair, server: Server) -> None:
    with ariadne.connect(server.address, timeout=60) as remote:
        xs = [images(1 + i % 5) for i in range(50)]
        pending = [remote.submit(pair.edge.run_prefix(x)) for x in xs]
        assert sum(not p.done() for p in pending) <= server.limits.inflight
        assert all(torch.equal(p.result(), pair.whole(x)) for p, x in zip(pending, xs, strict=True))


def test_many_threads_may_share_one_remote(pair: Pair, server: Server) -> None:
    wrong: list[Any] = []
    with ariadne.connect(server.address, timeout=60) as remote:

        def work(i: int) -> None:
            x = torch.full((2, 3, 8, 8), float(i))
            for _ in range(5):
                if not torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x)):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x)
        return torch.relu(x) * torch.rand_like(x)


def test_a_suffix_that_draws_goes_on_where_the_prefix_stopped(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Draws().eval(), "50%")
    x = images(3)
    with served(pair.suffix) as process, ariadne.connect(process.address, timeout=60) as remote:
        torch.manual_seed(5)
        found = [remote.run_suffix(pair.edge.run_prefix(x)) for _ in range(3)]
        after = torch.get_rng_state()
        with pytest.raises(StepError, match="draws random numbers, so boundaries must go one after the other"):
            remote.submit(pair.edge.run_prefix(x))
    torch.manual_seed(5)
    assert all(torch.equal(f, pair.whole(x)) for f in found)
    assert torch.equal(after, torch.get_rng_state())


def test_dropout_that_is_switched_off_sends_no_generator(tmp_path: Path) -> None:
    pair = Pair(
        tmp_path,
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 4)).eval(),
        "after:1",
        torch.randn(2, 4),
    )
    server = Server(pair.suffix, listen="127.0.0.1:0", log=None)
    with beside(server), ariadne.connect(server.address, timeout=60) as remote:
        assert [s["draws"] for s in remote.facts["splits"].values()] == [False]


# --- refused --------------------------------------------------------------------------------------------------------


def test_a_half_of_another_cut_is_refused_with_both_sides_values(tmp_path: Path, pair: Pair, server: Server) -> None:
    other = Pair(tmp_path, pair.model, "after:3")
    with pytest.raises(
        HandshakeError, match=rf"the split differs: here cut:4 of plan \w+, at {server.address} cut:3 of plan"
    ):
        ariadne.connect(server.address, other.prefix, timeout=60)
    with ariadne.connect(server.address, timeout=60) as remote:
        before = server.served
        with pytest.raises(
            BoundaryError, match=r"this boundary is of cut:4 of plan \w+; the server at .* has cut:3 of plan"
        ):
            remote.run_suffix(other.edge.run_prefix(images(2)))
        assert server.served == before


def test_other_weights_are_refused_with_both_digests(tmp_path: Path, pair: Pair, server: Server) -> None:
    other = Pair(tmp_path, net().eval())
    with pytest.raises(
        HandshakeError, match=rf"digest of the weights differs: here {other.edge.digest}, .* {pair.edge.digest}"
    ):
        ariadne.connect(server.address, other.prefix, timeout=60)
    with (
        ariadne.connect(server.address, timeout=60) as remote,
        pytest.raises(BoundaryError, match="saved with other weights"),
    ):
        remote.run_suffix(other.edge.run_prefix(images(2)))


def test_weights_replaced_on_either_side_of_a_connection_are_noticed(pair: Pair, server: Server) -> None:
    x, edge = images(2), ariadne.load(pair.prefix)
    other = net().eval()
    with ariadne.connect(server.address, edge, timeout=60) as remote:
        edge.replace_weights(other.state_dict())
        with pytest.raises(BoundaryError, match=f"digest {edge.digest}.* than the suffix at .*{pair.edge.digest}"):
            remote.run_suffix(edge.run_prefix(x))
        server.half.replace_weights(other.state_dict())
        with torch.no_grad():
            assert torch.equal(remote.run_suffix(edge.run_prefix(x)), other(x))
        with pytest.raises(BoundaryError, match="saved with other weights"):
            remote.run_suffix(pair.edge.run_prefix(x))


def test_another_dtype_is_refused_with_both(pair: Pair, server: Server) -> None:
    half = ariadne.load(pair.prefix, dtype=torch.float64)
    with pytest.raises(HandshakeError, match=r"the dtype of '\w+' differs: here f64, at .* f32"):
        ariadne.connect(server.address, half, timeout=60)


def test_another_mode_and_the_wrong_part_are_refused(tmp_path: Path, pair: Pair, server: Server) -> None:
    with pytest.raises(HandshakeError, match=r"the mode differs: here training, at .* eval"):
        ariadne.connect(server.address, Pair(tmp_path, net().train()).prefix, timeout=60)
    with pytest.raises(HandshakeError, match="part must differ"):
        ariadne.connect(server.address, pair.suffix, timeout=60)
    with pytest.raises(SpecError, match="a server runs a suffix; this file is a prefix"):
        Server(pair.prefix, listen="127.0.0.1:0")


def test_another_protocol_is_refused_with_both(pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ariadne.remote.calls.PROTOCOL", 3)
    with pytest.raises(HandshakeError, match="speaks protocol 2, this client 3"):
        ariadne.connect(server.address, timeout=60)


def test_errors_of_the_server_come_back_by_name(pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with ariadne.connect(server.address, timeout=60) as remote:
        boundary = pair.edge.run_prefix(images(2))
        for error in (ModuleError("a hook was added"), ZeroDivisionError("by zero")):

            def fail(*_: Any, error: Exception = error) -> Any:
                raise error

            monkeypatch.setattr(type(server.half), "run_suffix", fail)
            known = isinstance(error, ariadne.AriadneError)
            words = "a hook was added" if known else "on the server: ZeroDivisionError: by zero"
            with pytest.raises(ModuleError if known else RemoteError, match=words):
                remote.run_suffix(boundary)


def test_nobody_there_is_told_within_the_time_given() -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"nobody answered at 127.0.0.1:9 "):
        ariadne.connect("127.0.0.1:9", timeout=0.5)
    assert time.monotonic() - start < 5
    with pytest.raises(TimeoutError):
        ariadne.connect("127.0.0.1:9", timeout=0.1)


def test_a_slow_answer_is_given_up_in_time_and_the_line_goes_on(
    pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = type(server.half).run_suffix

    def slow(half: Any, boundary: Any) -> Any:
        time.sleep(0.5)
        return run(half, boundary)

    with ariadne.connect(server.address, timeout=60) as remote:
        x = images(2)
        boundary = pair.edge.run_prefix(x)
        monkeypatch.setattr(type(server.half), "run_suffix", slow)
        late = remote.submit(boundary)
        with pytest.raises(DeadlineError, match=r"no answer came from .* in the time given"):
            remote.run_suffix(boundary, timeout=0.1)
        monkeypatch.undo()
        assert torch.equal(late.result(), pair.whole(x))
        assert torch.equal(remote.run_suffix(boundary), pair.whole(x))
        remote.ping()  # what was answered before is counted now
    ran = server.counters.text()
    assert 'ariadne_requests_total{op="run",outcome="ok"} 2' in ran  # the one given up was not run


def test_what_was_cancelled_is_not_run(pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran = type(server.half).run_suffix, []

    def slow(half: Any, boundary: Any) -> Any:
        ran.append(boundary.batch)
        time.sleep(0.3)
        return run(half, boundary)

    monkeypatch.setattr(type(server.half), "run_suffix", slow)
    with ariadne.connect(server.address, timeout=60) as remote:
        pending = [remote.submit(pair.edge.run_prefix(images(n))) for n in (1, 2, 3)]
        pending[1].cancel()
        assert pending[2].result().shape == (3, 10)
        assert pending[0].result().shape == (1, 10)
        with pytest.raises(RemoteError, match="cancelled"):
            pending[1].result()
    assert ran == [1, 3]


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(pair: Pair) -> None:
    server = Server(pair.suffix, listen="127.0.0.1:0", log=None, limits=Limits(bytes=10_000))
    with beside(server), ariadne.connect(server.address, timeout=60) as remote:
        assert remote.run_suffix(pair.edge.run_prefix(images(2))).shape == (2, 10)
        with pytest.raises(BusyError, match=r"this message has .* bytes; the server at .* takes 10000 at once"):
            remote.run_suffix(pair.edge.run_prefix(images(60)))


def test_without_keys_loopback_alone_is_served(pair: Pair, tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "192.168.0.7:7077", "[::]:0"):
        with pytest.raises(SpecError, match="without keys only loopback is served"):
            Server(pair.suffix, listen=address)
    for address in ("7077", "host:port", "127.0.0.1:99999", ""):
        with pytest.raises(SpecError, match="an address is host:port"):
            Server(pair.suffix, listen=address)
    make_key(tmp_path / "server.key")
    with pytest.raises(SpecError, match="needs the public keys of its clients"):
        Server(pair.suffix, listen="127.0.0.1:0", key=tmp_path / "server.key")


def test_a_half_that_came_back_as_another_is_refused(tmp_path: Path, pair: Pair) -> None:
    first = served(pair.suffix)
    process = first.__enter__()
    with ariadne.connect(process.address, timeout=20) as remote:
        process.kill()
        with (
            served(Pair(tmp_path, net().eval()).suffix, listen=process.address),
            # by the handshake; or, where the request is there before it, by the digest that it carries
            pytest.raises(
                (HandshakeError, BoundaryError), match=r"came back with another half|saved with other weights"
            ),
        ):
            remote.run_suffix(pair.edge.run_prefix(images(2)))


# --- goes on --------------------------------------------------------------------------------------------------------


def test_a_server_that_was_killed_and_started_again_answers_what_was_asked_before(pair: Pair) -> None:
    with served(pair.suffix) as process, ariadne.connect(process.address, timeout=60) as remote:
        x, again = images(2), list[Served]()
        process.kill()
        later = threading.Timer(0.5, lambda: again.append(Served(pair.suffix, listen=process.address)))
        later.start()
        assert torch.equal(remote.run_suffix(pair.edge.run_prefix(x)), pair.whole(x))
        later.join()
        again[0].kill()


def test_a_connection_that_breaks_is_made_anew_and_nothing_is_lost(pair: Pair, server: Server) -> None:
    proxy = Proxy(server.address)
    with ariadne.connect(proxy.address, timeout=60) as remote:
        for i in range(10):
            x = images(1 + i % 3)
            pending = [remote.submit(pair.edge.run_prefix(x)) for _ in range(5)]
            proxy.cut()
            assert all(torch.equal(p.result(), pair.whole(x)) for p in pending)
    proxy.close()


def test_what_waits_is_done_when_the_server_is_told_to_stop(pair: Pair) -> None:
    with served(pair.suffix) as process, ariadne.connect(process.address, timeout=60) as remote:
        x = images(64)
        pending = [remote.submit(pair.edge.run_prefix(x)) for _ in range(8)]
        assert remote._line is not None
        assert remote._line.socket.poll(60_000)  # the first answer is there, and nobody has read it
        assert process.stop() == 0
        while not remote._line.broken:
            remote._line._look()
        done = [p.result() for p in pending]  # no server is left: these answers came before the line broke
        assert len(done) == 8
        assert all(torch.equal(found, pair.whole(x)) for found in done)


def test_there_is_a_log_line_for_each_request_and_a_page_of_counters(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    with beside(Server(pair.suffix, listen="127.0.0.1:0", log="json", metrics="127.0.0.1:0")) as server:
        server.announce()
        with ariadne.connect(server.address, timeout=60) as remote:
            remote.run_suffix(pair.edge.run_prefix(images(2)))
            remote.ping()  # which is answered after the run was counted
        assert server._page is not None
        with urllib.request.urlopen(f"http://{server._page.address}/metrics", timeout=60) as page:
            text = page.read().decode()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["op"] for line in lines] == ["listen", "hello", "run", "ping"]
    assert lines[2]["outcome"] == "ok"
    assert lines[2]["received"] > 2000
    assert 'ariadne_requests_total{op="run",outcome="ok"} 1' in text
    assert "# TYPE ariadne_waiting gauge" in text
    with pytest.raises(RemoteError, match="counters are shown on loopback alone"):
        Server(pair.suffix, listen="127.0.0.1:0", metrics="0.0.0.0:0")


# --- merged ---------------------------------------------------------------------------------------------------------


def test_waiting_boundaries_of_several_clients_become_one_run_where_samples_don_t_mix(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    with beside(Server(pair.suffix, listen="127.0.0.1:0", log=None, batch=8)) as server:
        run = type(server.half).run_suffix

        def noted(half: Any, boundary: Any) -> Any:
            batches.append(boundary.batch)
            time.sleep(0.1)
            return run(half, boundary)

        monkeypatch.setattr(type(server.half), "run_suffix", noted)
        remotes = [ariadne.connect(server.address, timeout=60) for _ in range(3)]
        xs = [images(1 + i) for i in range(3)]
        pending = [r.submit(pair.edge.run_prefix(x)) for r, x in zip(remotes * 2, xs * 2, strict=True)]
        for p, x in zip(pending, xs * 2, strict=True):
            torch.testing.assert_close(p.result(), pair.whole(x))
        for remote in remotes:
            remote.close()
    assert sum(batches) == 12
    assert max(batches) > 3


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        return x - x.mean(0, keepdim=True)


def test_samples_that_mix_are_never_merged(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Mixes().eval(), "50%")
    server = Server(pair.suffix, listen="127.0.0.1:0", log=None, batch=8)
    assert [*server._merger.why.values()]
    with beside(server), ariadne.connect(server.address, timeout=60) as remote:
        xs = [images(1 + i) for i in range(4)]
        pending = [remote.submit(pair.edge.run_prefix(x)) for x in xs]
        assert all(torch.equal(p.result(), pair.whole(x)) for p, x in zip(pending, xs, strict=True))


# --- commands -------------------------------------------------------------------------------------------------------


def test_the_commands_serve_ping_run_and_keys(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "ariadne", "serve", str(pair.suffix), "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = json.loads(process.stderr.readline())["address"]
        assert main(["ping", address, "--count", "3", "--bytes", "1000"]) == 0
        said = capsys.readouterr().out
        assert f"{address}: a suffix in eval mode on cpu" in said
        out = tmp_path / "out.safetensors"
        assert (
            main(["run", str(pair.prefix), "--to", address, "--input", "3x8x8", "--batch", "4", "--out", str(out)]) == 0
        )
        assert "output  float32[4, 10]" in capsys.readouterr().out
        assert main(["run", str(pair.suffix), "--to", address, "--input", "3x8x8"]) == 3
        assert main(["run", str(pair.prefix), "--to", address]) == 2
        process.terminate()
        stdout, _ = process.communicate(timeout=60)
        assert json.loads(stdout)["served"] >= 8
        assert process.returncode == 0
    finally:
        process.kill()
    assert main(["keys", str(tmp_path / "a.key")]) == 0
    assert main(["ping", address, "--timeout", "0.3"]) == 3
    assert "nobody answered" in capsys.readouterr().err
