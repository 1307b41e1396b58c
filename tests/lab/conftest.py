"""The page, written once, and a real browser that opens it."""

import os
import shutil

import pytest

from onchip.lab import page, record

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def data():
    return record.record_figures()


@pytest.fixture(scope="session")
def site(data, tmp_path_factory):
    """The file that `onchip lab --out` writes."""
    return page.write(tmp_path_factory.mktemp("lab"), data)


# One browser for each file of tests, closed before the next file begins: while Playwright's
# synchronous API is open, its event loop counts as running, and asyncio.run is refused.
@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here (CHROMIUM= names one)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opening(chromium):
    """open(url, width, scheme, ...) gives a page in a profile of its own, and the list of all that
    such pages write to their consoles as errors.
    """
    errors, contexts = [], []

    def open(url, width=1280, scheme="light", **options):
        view = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
        contexts.append(chromium.new_context(**view, **{"reduced_motion": "reduce"} | options))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(10_000)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda m: m.type in ("error", "warning") and errors.append(m.text))
        tab.on("requestfailed", lambda request: errors.append(request.url))
        tab.goto(url)
        tab.wait_for_selector("html[data-ready]", state="attached")
        return tab

    yield open, errors
    for context in contexts:
        context.close()


@pytest.fixture
def opened(opening):
    """As `opening`; at the end of a test no page has written an error."""
    open, errors = opening
    errors.clear()
    yield open
    assert errors == []


@pytest.fixture(scope="module")
def only(opening, site):
    return opening[0](site.as_uri())


@pytest.fixture
def tab(only, opened):
    """One page for all tests that leave its figures in whatever state they like."""
    return only
