"""A real browser opens the live page: Chromium on two pipes, by its own protocol (CDP)."""

import json
import os
import shutil
import subprocess
import time

import pytest

from onchip.engine.llm import LLM
from onchip.engine.speculation.ngram import NgramProposer

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find():
    """The path of a browser, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `errors`: errors that it logged or threw."""

    def __init__(self, folder, seconds=30.0):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        arrange = lambda: (os.dup2(commands, 3), os.dup2(answers, 4))
        command = [find(), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=arrange, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(commands), os.close(answers)
        self._seconds, self._number, self._rest, self._session = seconds, 0, b"", None
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(message)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"])

    def see(self, width, height, scheme="light"):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, expression):
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition):
        end = time.monotonic() + self._seconds
        while not self.run(condition):
            assert time.monotonic() < end, (condition, self.errors)
            time.sleep(0.05)

    def click(self, element):
        self.run(f"document.getElementById('{element}').click()")

    def text(self, element):
        return self.run(f"document.getElementById('{element}').textContent")

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._out), os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find() is None:
        pytest.skip("there is no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def tiny(serving, browser):
    """The address of a server; at the end the browser has left the page."""
    llm = LLM("tiny", num_pages=129, max_num_seqs=8, swap_space=0)
    browser.go("about:blank")
    browser.errors.clear()
    with serving(llm.engine, drain_s=0.0) as (url, _):
        yield url
        browser.go("about:blank")


def test_a_prompt_sent_from_the_page_takes_pages_and_is_answered(browser, tiny):
    browser.see(1280, 900)
    browser.go(f"{tiny}/")
    browser.until("document.getElementById('state').textContent === 'ready'")
    assert browser.text("total") == "128" and browser.text("used") == "0"
    browser.run("document.getElementById('length').value = 300")
    browser.click("send")
    browser.until("now.holders.length === 1 && now.map.shared.length > 0")
    assert browser.run("document.querySelectorAll('#holders tr').length") == 1
    assert browser.run("now.map.cells.filter((cell) => cell === 0).length") >= 4
    browser.until("[...document.querySelectorAll('#answers p')].every((p) => p.textContent)")
    assert browser.run("document.querySelectorAll('#answers p').length") == 4
    browser.click("stop")
    browser.until("now.requests.open === 0 && now.pages.used === 0")
    assert int(browser.text("cached")) > 0 and browser.errors == []


def test_a_request_that_does_not_stream_shows_its_tokens(browser, tiny):
    """The page also shows the size of a page."""
    browser.see(1280, 900)
    browser.go(f"{tiny}/")
    browser.until("now !== null && now.page_size !== null")
    assert browser.text("slots") == "16"
    body = {"prompt": "Let there be", "max_tokens": 400, "n": 2, "ignore_eos": True}
    browser.run(
        "fetch('v1/completions', {method: 'POST', headers: {'content-type': 'application/json'},"
        f" body: JSON.stringify({json.dumps(body)})}}); 0"
    )
    made = "Number(document.querySelector('#holders tr')?.children[4].textContent)"
    browser.until(f"{made} > 1")
    first = browser.run(made)
    browser.until(f"{made} > {first}")
    assert browser.errors == []


def test_accepted_drafts_are_drawn_by_position(browser, serving, ask):
    config = {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    llm = LLM("tiny", num_pages=129, max_num_seqs=8, swap_space=0, speculative_config=config)
    browser.errors.clear()
    with serving(llm.engine, drain_s=0.0) as (url, _):
        browser.see(360, 800)
        browser.go(f"{url}/")
        browser.until("now !== null")
        assert browser.run("document.getElementById('drafts').hidden")
        ask(url, "/v1/completions", {"prompt": "the LORD " * 9, "max_tokens": 40, "temperature": 0})
        browser.until("now.speculation !== null")
        assert not browser.run("document.getElementById('drafts').hidden")
        stats = browser.run("now.speculation")
        assert browser.text("accepted") == str(stats["accepted_tokens"])
        rows = browser.run("[...document.querySelectorAll('#positions li')].map(r => r.innerText)")
        assert len(rows) == 3 and all("%" in row for row in rows)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        browser.go("about:blank")
    assert browser.errors == []


def test_drafts_that_fail_before_the_first_are_shown(browser, serving, ask, monkeypatch):
    monkeypatch.setattr(NgramProposer, "propose", lambda self, wanted: 1 / 0)
    llm = LLM("tiny", num_pages=99, swap_space=0, speculative_config={"num_speculative_tokens": 2})
    browser.errors.clear()
    with serving(llm.engine, drain_s=0.0) as (url, _):
        browser.go(f"{url}/")
        ask(url, "/v1/completions", {"prompt": "a", "max_tokens": 4})
        browser.until("now?.speculation?.failed")
        assert not browser.run("document.getElementById('no-drafts').hidden")
        assert browser.text("acceptance") == "no" and browser.text("positions") == "10%20%"
        browser.go("about:blank")
    assert browser.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_every_screen(browser, tiny, width, scheme):
    browser.see(width, 800, scheme)
    browser.go(f"{tiny}/")
    browser.until("now !== null")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.getElementById('pool').clientHeight") > 20
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 26)"}[scheme]
    named = "[...document.querySelectorAll('canvas, input, textarea, button')].every((e) => "
    named += "e.getAttribute('aria-label') || e.textContent || e.labels.length)"
    assert browser.run(named) and browser.errors == []


def test_a_locked_server_asks_for_the_key(browser, serving, fake):
    with serving(fake(), keys=["a-secret-key"]) as (url, _):
        browser.go(f"{url}/")
        browser.until("!document.getElementById('key-form').hidden")
        assert browser.text("state") == "locked"
        browser.run("document.getElementById('key').value = 'a-secret-key'")
        browser.run("document.getElementById('key-form').requestSubmit()")
        browser.until("document.getElementById('state').textContent === 'ready'")
        assert browser.run("document.getElementById('key-form').hidden")


def test_an_unreachable_server_is_shown(browser, serving, fake):
    with serving(fake()) as (url, _):
        browser.go(f"{url}/")
        browser.until("now !== null")
    browser.until("document.getElementById('state').textContent === 'unreachable'")
