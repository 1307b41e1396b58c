"""The log: one line per request, and no secrets."""

import logging
import re

import pytest

from onchip.server import command
from onchip.server.app import Server, ServerOptions
from onchip.server.process import BackgroundServer

COMPLETIONS = "/v1/completions"
KEY = "a-key-of-a-tenant"
SECRET = "a prompt that nobody may read"


@pytest.fixture
def lines(caplog):
    """lines(): log lines of requests so far, at every level."""
    caplog.set_level(logging.DEBUG, "onchip.serve")

    def messages():
        return [r.getMessage() for r in caplog.records if r.name == "onchip.serve"]

    return messages


def test_a_request_is_one_log_line(shared, ask, lines, until):
    body = {"prompt": "abc", "max_tokens": 5, "n": 2}
    _, _, headers = ask(shared, COMPLETIONS, body, **{"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    until(lambda: lines())
    pattern = r"POST /v1/completions 200 in=3 out=10 first=\d\.\d{3}s total=\d\.\d{3}s id=mine-1"
    assert re.fullmatch(pattern, lines()[0]) and len(lines()) == 1


@pytest.mark.parametrize(
    ("path", "body", "start"),
    [
        (COMPLETIONS, {"prompt": "abc", "stream": True, "max_tokens": 4}, "200 in=3 out=4 first="),
        (COMPLETIONS, {"prompt": -1}, "400 total="),
        (COMPLETIONS, {"prompt": "break me"}, "500 total="),
        ("/v1/models", None, "200 total="),
        ("/nowhere%0Aat%20all?prompt=secret", None, "404 total="),
    ],
)
def test_every_kind_of_request_has_its_line(shared, ask, lines, until, path, body, start):
    _, _, headers = ask(shared, path, body)
    name = headers["x-request-id"]
    until(lambda: any(name in line for line in lines()))
    line = next(line for line in lines() if name in line)
    method, where = "GET" if body is None else "POST", path.partition("?")[0]
    assert line.startswith(f"{method} {where} {start}"), line


@pytest.mark.parametrize("given", ["", "a b", "a\tb", "ä", "a" * 129, 'a"b', "a,b"])
def test_an_unsafe_request_id_is_replaced(shared, ask, given):
    _, _, headers = ask(shared, "/health", **{"x-request-id": given.encode()})
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])


def test_probes_are_logged_at_debug(shared, ask, caplog):
    caplog.set_level(logging.INFO, "onchip.serve")
    for path in ("/health", "/ready", "/metrics", "/stats"):
        assert ask(shared, path)[0] == 200
    assert not caplog.records


def test_a_disconnected_client_is_logged_as_499(serving, fake, open_stream, lines, until):
    engine = fake(step_s=0.01)
    with serving(engine) as (url, server):
        connection = open_stream(url, max_tokens=4000)
        connection.getresponse().fp.readline()
        connection.close()
        connection.sock = None
        until(lambda: any(" 499 in=3 out=" in line for line in lines()))
        until(lambda: b"onchip_clients_gone_total 1.0" in server.metrics.render(server.service))


def test_a_failure_of_the_server_is_answered_and_logged_once(serving, fake, ask, caplog):
    with serving(fake()) as (url, server):
        server.live_view.read_stats = None
        server.metrics.render = None
        status, answer, headers = ask(url, "/metrics")
        assert status == 500 and answer["error"]["message"] == "the server failed at this request"
        assert caplog.text.count("Traceback") == 1 and headers["x-request-id"] in caplog.text


def test_no_prompt_and_no_key_is_logged(fake, ask, caplog):
    caplog.set_level(logging.DEBUG)
    from onchip.server.api_keys import Keyring

    with BackgroundServer(Server(fake(), ServerOptions("fake"), Keyring([KEY]))) as url:
        bearer = {"authorization": f"Bearer {KEY}"}
        chat = {"messages": [{"role": "user", "content": SECRET}], "nonsense": SECRET}
        assert ask(url, COMPLETIONS, {"prompt": SECRET}, **bearer)[0] == 200
        assert ask(url, COMPLETIONS, {"prompt": SECRET, "n": SECRET}, **bearer)[0] == 400
        assert ask(url, "/v1/chat/completions", chat, **bearer)[0] == 400
        assert ask(url, COMPLETIONS, {"prompt": SECRET}, authorization=f"Bearer {KEY}x")[0] == 401
        assert ask(url, COMPLETIONS, SECRET.encode(), **bearer)[0] == 400
    assert "POST /v1/completions 200" in caplog.text
    assert SECRET not in caplog.text and KEY not in caplog.text


def test_the_start_line_describes_the_model():
    from onchip.engine import LLM

    llm = LLM("tiny", num_pages=200, max_num_seqs=8, swap_space=0, device="cpu")
    sentence = command.describe(llm.engine, "tiny")
    llm.engine.close()
    assert re.search(r"model=tiny device=cpu dtype=float32 kv_dtype=float32 pages=199 ", sentence)
    assert re.search(r"page_tokens=16 max_model_len=2048 pages_mib=\d+", sentence)
