"""The site: every public name, every link, every page in a browser, search from files and from a
server.
"""

import inspect
import re
import threading
from contextlib import contextmanager
from functools import cache, partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import onchip

pytestmark = pytest.mark.slow  # the build takes half a minute


class Document:
    """What a page names: its anchors, its links, and the files that it loads."""

    def __init__(self, text):
        self.anchors = {unescape(name) for name in re.findall(r'\s(?:id|name)="([^"]*)"', text)}
        found = re.findall(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"', text)
        self.links = {unescape(url) for tag, url in found if tag == "a"}
        self.loads = {unescape(url) for tag, url in found if tag != "a"}


@cache
def read(path):
    return Document(path.read_text(encoding="utf-8"))


def pages(site):
    """The pages in the theme: all but those of source files, and the lab itself."""
    apart = site / "source", site / "lab"
    every = sorted(site.rglob("*.html"))
    return [page for page in every if not any(map(page.is_relative_to, apart))]


def public_names(module):
    """`__all__`, or what a module without one defines. A module among them counts by its names."""
    defined = [n for n, x in vars(module).items() if inspect.getmodule(x) is module]
    for name in getattr(module, "__all__", [n for n in defined if not n.startswith("_")]):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from public_names(value)
        elif not name.startswith("__"):
            yield f"{module.__name__}.{name}"


def test_the_reference_has_every_public_name(site):
    """A new name of a package is added by itself, a new package needs a page in docs/reference."""
    modules = [onchip, *(import_module(f"onchip.{name}") for name in onchip._MODULES)]
    names = {name for module in modules for name in public_names(module)}
    reference = [read(page).anchors for page in (site / "reference").glob("*.html")]
    assert len(names) > 150 and names - set().union(*reference) == set()


def leads_somewhere(site, page, link):
    """Whether a relative link names a file of the site, and an anchor of it."""
    url = urlsplit(link)
    target = (page.parent / unquote(url.path)).resolve() if url.path else page
    if url.scheme or link.startswith("/") or not target.is_relative_to(site):
        return False
    is_page = target.is_file() and target.suffix == ".html" and target.parent.name != "lab"
    return unquote(url.fragment) in {"", *read(target).anchors} if is_page else target.is_file()


def test_links_lead_somewhere(site):
    """Other sites are linked only: nothing is loaded from them."""
    wrong = []
    for page in [*pages(site), *(site / "source").rglob("*.html")]:
        links = {link for link in read(page).links if "://" not in link}
        loads = {link for link in read(page).loads if not link.startswith("data:")}
        wrong += [(page.name, x) for x in links | loads if not leads_somewhere(site, page, x)]
    assert wrong == []


@pytest.fixture
def tab(chromium):
    """A page of the browser, and all that it writes to its console as errors."""
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    tab, errors = context.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda m: m.type in ("error", "warning") and errors.append(m.text))
    tab.on("requestfailed", lambda request: errors.append(request.url))
    yield tab
    context.close()
    assert errors == []


def test_pages_fit_a_phone_and_a_desktop(site, tab):
    api = pytest.importorskip("playwright.sync_api")
    tab.set_default_timeout(5_000)
    wide = []
    for page in [*pages(site), site / "source/onchip/core/state.py.html"]:
        tab.goto(page.as_uri(), timeout=60_000)
        for width in (390, 1280):
            tab.set_viewport_size({"width": width, "height": 844})
            try:  # the search box may still move to its place
                tab.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
            except api.TimeoutError:
                wide.append((page.name, width))
    assert wide == []


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder):
    """The address of a server of this folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def search(tab, address, word):
    tab.set_viewport_size({"width": 1280, "height": 844})
    tab.goto(address)
    tab.fill("[data-md-component=search-query]", word)
    results = "[data-md-component=search-result] .md-search-result__link"
    tab.wait_for_selector(results)
    return {urlsplit(a.get_attribute("href")).path for a in tab.locator(results).all()}


def test_search_finds_window_from_the_file_system(site, tab):
    found = search(tab, (site / "start.html").as_uri(), "window")
    assert len(found) > 3 and unquote(urlsplit((site / "masks.html").as_uri()).path) in found


def test_search_finds_window_from_a_sub_path(site, tab):
    with served(site.parent.parent) as address:
        folder = f"/{site.parent.name}/{site.name}"
        found = search(tab, f"{address}{folder}/reference/onchip.html", "window")
    assert len(found) > 3 and f"{folder}/masks.html" in found


def test_the_lab_is_embedded_and_has_the_theme_of_its_page(site, tab):
    tab.goto((site / "lab.html").as_uri())
    lab = tab.frame_locator("iframe.lab")
    lab.locator("html[data-ready][data-theme=light]").wait_for(state="attached")
    tab.locator("label[for=__palette_1]:visible").click()
    lab.locator("html[data-ready][data-theme=dark]").wait_for(state="attached")
