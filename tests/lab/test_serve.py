"""The lab on the loopback: the page, the Python pool behind it, and what is refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from urllib.request import urlopen

import pytest

from onchip.cli import main
from onchip.lab import serve


@pytest.fixture
def server(data):
    with serve.LabServer("127.0.0.1", 0, data) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, method, path, body=None, **headers):
    connection = HTTPConnection(*server.server_address, timeout=10)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    answer = reply.status, reply.read()
    connection.close()
    return answer


def test_the_page_plays_with_the_python_pool(server, opened):
    tab = opened(server.url)
    assert "own pool, in the Python process" in tab.locator("#pages-behind").text_content()
    tab.wait_for_selector('#pages [data-name="B"]')  # what a visitor finds
    tab.click("#pages-reset")
    tab.click("#pages-add")
    tab.click("#pages-add")
    tab.wait_for_selector('#pages [data-name="B"]')
    tab.click('[data-act="fork A"]')
    tab.wait_for_selector('#pages [data-name="C"]')
    tab.click("#pages-generate")
    tab.wait_for_function("() => document.querySelector('#pages-say').textContent.includes('drew')")
    want = server.playground.state()
    assert tab.evaluate("lab.figures.pages.state") == want and len(want["tables"]) == 3
    tab.reload()  # the pages are the server's, not the browser's
    tab.wait_for_selector('#pages [data-name="C"]')


def test_operations_over_http(server):
    ask(server, "POST", "/pages", json.dumps({"do": "reset"}))
    status, body = ask(server, "POST", "/pages", json.dumps({"do": "add", "text": "a b c d e"}))
    answer = json.loads(body)
    assert status == 200 and answer["ok"] and answer["state"]["tables"][0]["pages"] == [1, 2]
    status, body = ask(server, "GET", "/pages")
    assert status == 200 and json.loads(body)["state"] == answer["state"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "Expecting value"),
        (b"[1]", "an operation is an object"),
        (b'{"do": "explode"}', "must be one of"),
        (b'{"do": "add", "text": 7}', "must be words"),
        (b"\xff\xfe", "Expecting value"),
        (b'{"do": "\xc3\x28"}', "decode"),
        (b"[" * 4000, "too deep"),
        (b" " * 5000, "at most 4096"),
    ],
)
def test_invalid_operations_are_refused_and_change_nothing(server, body, why):
    status, answer = ask(server, "POST", "/pages", body)
    answer = json.loads(answer)
    assert status == 400 and not answer["ok"] and why in answer["say"]
    assert ask(server, "GET", "/pages")[0] == 200


def test_only_its_own_address_is_served(server):
    host, port = server.server_address
    assert ask(server, "GET", "/", Host=f"localhost:{port}")[0] == 200
    for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert ask(server, "GET", "/", Host=name)[0] == 403
    assert ask(server, "POST", "/pages", b"{}", Origin="http://evil.example")[0] == 403
    assert ask(server, "GET", "/etc/passwd")[0] == 404
    assert ask(server, "GET", "/../record.py")[0] == 404
    assert ask(server, "DELETE", "/pages")[0] == 501


def test_connections_are_bounded(server):
    """Idle connections take all slots: each new one closes the oldest."""
    server.connection_slots = threading.BoundedSemaphore(3)
    idle = [HTTPConnection(*server.server_address, timeout=10) for _ in range(3)]
    for one in idle:
        one.connect()
    slots_taken = lambda: server.connection_slots._value == 0
    assert _soon(slots_taken)
    assert ask(server, "GET", "/pages")[0] == 200
    assert idle[0].sock.recv(1) == b"" and len(server.open_connections) <= 3
    for one in idle:
        one.close()
    assert _soon(lambda: server.connection_slots._value == 3)
    assert ask(server, "GET", "/pages")[0] == 200


def _soon(holds):
    wait = threading.Event()
    return any(holds() or wait.wait(0.02) for _ in range(300))


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped():
    command = [sys.executable, "-m", "onchip", "lab", "--port", "0", "--no-open"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as lab:
        url = re.search(r"http://127\.0\.0\.1:\d+/", lab.stdout.readline())[0]
        with urlopen(url, timeout=10) as reply:
            assert b'data-behind="live"' in reply.read()
        lab.send_signal(signal.SIGINT)
        assert lab.wait(10) == 130 and "stopped" in lab.stderr.read()


def test_the_command_writes_a_page_that_needs_no_server(tmp_path, capsys, monkeypatch, data):
    monkeypatch.setattr("onchip.lab.record.record_figures", lambda model: data)
    assert main(["lab", "--out", str(tmp_path / "new" / "folder")]) == 0
    file = tmp_path / "new" / "folder" / "index.html"
    assert capsys.readouterr().out.strip() == str(file)
    assert 'data-behind="offline"' in file.read_text(encoding="utf-8")
    assert main(["lab", "--out", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err


def drip(client, stop):
    """A byte of a head now and then."""
    client.sendall(b"GET / HTTP/1.1\r\nx: ")
    while not stop.wait(0.05):
        try:
            client.sendall(b"a")
        except OSError:
            return


@pytest.fixture
def dripping(server):
    """Opens connections that drip until the end of the test."""
    stop, threads, clients = threading.Event(), [], []

    def start(count):
        for _ in range(count):
            clients.append(socket.create_connection(server.server_address, timeout=10))
            threads.append(threading.Thread(target=drip, args=(clients[-1], stop)))
            threads[-1].start()
        return clients

    yield start
    stop.set()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()


def test_slow_senders_do_not_delay_other_clients(server, dripping):
    dripping(serve.MAX_CONNECTIONS + 8)
    for _ in range(3):
        assert ask(server, "GET", "/pages")[0] == 200
    assert len(server.open_connections) <= serve.MAX_CONNECTIONS


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nx: ", b"POST /pages HTTP/1.1\r\nContent-Length: 900\r\n\r\n{"]
)
def test_a_request_arrives_in_time_or_not_at_all(server, monkeypatch, head):
    """A byte now and then does not start the time anew."""
    monkeypatch.setattr(serve, "REQUEST_S", 0.5)
    with socket.create_connection(server.server_address, timeout=10) as client:
        client.sendall(head)
        started, client_ended = time.monotonic(), False
        while not client_ended and time.monotonic() - started < 8:
            client.settimeout(0.1)
            try:
                client.sendall(b"a")
                client_ended = not client.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                client_ended = True
        assert client_ended


def test_a_request_is_bounded_in_bytes(server):
    with socket.create_connection(server.server_address, timeout=10) as client:
        line = b"x: " + b"a" * 8000 + b"\r\n"
        try:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + 20 * line + b"\r\n")
            answer = client.recv(100)
        except ConnectionError:
            answer = b""
        assert b"200" not in answer
    assert ask(server, "GET", "/pages")[0] == 200
