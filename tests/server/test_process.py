"""`onchip serve` as a process, with the built-in model: signals, and clients that are killed."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from onchip.server.app import Server, ServerOptions
from onchip.server.process import BackgroundServer

CLIENT = """
import sys
from http.client import HTTPConnection
connection = HTTPConnection(sys.argv[1], int(sys.argv[2]))
body = '{"prompt": "abc", "max_tokens": 2000, "ignore_eos": true, "stream": true}'
connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
for line in connection.getresponse():
    print("got", flush=True)
"""


def stats(ask, url):
    return ask(url, "/stats")[1]["requests"]


@pytest.mark.slow
def test_killed_clients_and_a_drain_under_load(process, ask, until):
    """A killed client frees its pages. After SIGTERM every request is finished or rejected with an
    error; none hangs, and none ends silently.
    """
    child, url = process("--drain-s", "2", "--max-num-seqs", "4")
    until(lambda: ask(url, "/ready")[0] == 200)
    kill_a_client(ask, url, until)
    with ThreadPoolExecutor(24) as pool:
        lengths = [20 if i % 2 else 1500 for i in range(24)]
        answers = [pool.submit(drive, ask, url, n, bool(i % 3)) for i, n in enumerate(lengths)]
        until(lambda: stats(ask, url)["waiting"] > 8, 30)
        child.send_signal(signal.SIGTERM)
        outcomes = [answer.result(30) for answer in answers]
    assert child.wait(30) == 0
    assert set(outcomes) <= {"done", "shutdown"}
    assert "done" in outcomes and "shutdown" in outcomes, outcomes


def kill_a_client(ask, url, until):
    host, port = url.removeprefix("http://").split(":")
    client = subprocess.Popen([sys.executable, "-c", CLIENT, host, port], stdout=subprocess.PIPE)
    client.stdout.readline()
    assert stats(ask, url)["running"] == 1
    client.kill()
    until(lambda: stats(ask, url) == {"open": 0, "running": 0, "waiting": 0}, 30)
    client.communicate()


def drive(ask, url, max_tokens, stream):
    body = {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    status, answer, _ = ask(url, "/v1/completions", body)
    if status != 200:
        return answer["error"]["code"]
    if not stream:
        return "done"
    *_, last, end = [e.removeprefix("data: ") for e in answer.split("\n\n") if e]
    assert end == "[DONE]"
    last = json.loads(last)
    return last["error"]["code"] if "error" in last else "done"


def test_ctrl_c_ends_the_server_and_says_what_it_did(process, ask, tmp_path):
    child, url = process("--drain-s", "5")
    body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
    assert ask(url, "/v1/completions", body)[0] == 200
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert (tmp_path / "log").read_text().endswith("onchip: stopped: 3 tokens were generated\n")


def test_a_second_signal_does_not_wait(fake, ask, until):
    engine = fake(step_s=0.01)
    background = BackgroundServer(Server(engine, ServerOptions("fake")), drain_s=60.0)
    with background as url, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(drive, ask, url, 2000, False)
        until(lambda: engine.requests)
        background.process.handle_exit(signal.SIGINT)
        until(lambda: ask(url, "/ready")[0] == 503)
        assert not answer.done()
        background.process.handle_exit(signal.SIGINT)
        assert answer.result(10) == "shutdown"


def test_a_connection_without_a_request_is_closed(shared, monkeypatch):
    """Neither silence nor single bytes keep it open."""
    monkeypatch.setattr("onchip.server.process.HEADER_S", 0.3)
    host, port = shared.removeprefix("http://").split(":")
    for head in (
        b"",
        b"GET /health HTTP/1.1\r\nx: ",
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(head)
            while connection.recv(4096):
                pass


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--port", "99999"], "99999"),
        (["--max-body-mib", "0"], "max_body_bytes=0"),
        (["--max-request-s", "nan"], "max_request_s=nan"),
        (["--drain-s", "-1"], "drain_s=-1"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--api-key", "short"], "API key"),
        (["--max-model-len", "100000"], "max_model_len"),
    ],
)
def test_invalid_options_are_found_before_serving(options, word, capsys):
    from onchip.cli import main

    assert main(["serve", "--port", "0", *options]) == 2
    captured = capsys.readouterr()
    assert word in captured.err and captured.out == ""


def test_an_address_in_use_is_reported(shared, capsys):
    from onchip.cli import main

    assert main(["serve", "--port", shared.rpartition(":")[2]]) == 2
    assert "cannot serve on 127.0.0.1" in capsys.readouterr().err
