"""The documentation site: it builds, its links and pictures exist, and a browser shows it well.

The browser is headless Chromium, at the widths of a desktop and of a phone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.repository.browser import CHROMIUM, Tab, open_tab
from tests.support.jobs import ROOT
from tests.support.limits import HANG_S

needs_zensical = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None,
    reason="zensical is not installed: scripts/check.sh and scripts/test.sh install it",
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"
)
WIDTHS = (1280, 390)
# Search text -> the page that must be among the results.
SEARCHED = {
    "linear": "reference/operations/",
    "sdpfa_fwd": "reference/operations/",
    "HirAliasSelect": "reference/host-operations/",
}
_RESULTS = """
[...document.querySelectorAll('*')].filter(e => e.shadowRoot)
    .flatMap(e => [...e.shadowRoot.querySelectorAll('a')]).map(a => a.href)
"""
_INPUT = """
[...document.querySelectorAll('*')].filter(e => e.shadowRoot)
    .map(e => e.shadowRoot.querySelector('input')).find(Boolean)
"""
# Elements that reach beyond the page and do not scroll in a box of their own.
_WIDE = """
[...document.querySelectorAll('main *')].filter(e => {
    if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let box = e.parentElement; box; box = box.parentElement)
        if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return false;
    return true;
}).map(e => e.outerHTML.slice(0, 100))
"""
_BACKGROUND = """
getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)
    .reduce((sum, part) => sum + Number(part), 0) / 3
"""


def listed_pages() -> list[str]:
    """Returns the pages listed under `nav` in mkdocs.yml, in order."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return re.findall(r": (\S+\.md)$", nav, re.MULTILINE)


def address(page: str) -> str:
    """Returns a page's address in the site: `how-to/x.md` is at `how-to/x/`."""
    return re.sub(r"(^|/)index/$", r"\1", page.removesuffix(".md") + "/")


class Resources(HTMLParser):
    """Collects the addresses that a browser fetches for the HTML of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        is_link = tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload")
        name = "href" if is_link else "src" if tag in ("img", "script", "iframe") else None
        if name is not None and (value := values.get(name)):
            self.fetched.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site from a copy of its sources, because several tests may run at the same
    time.
    """
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for name in ("fuser", "multidevice", "hostir", "examples", "CONTRIBUTING.md"):
        (folder / name).symlink_to(ROOT / name)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert built.returncode == 0, re.sub(r"\x1b\[[0-9;]*m", "", built.stdout)
    return folder / "site"


@pytest.fixture(scope="module")
def home(site: Path) -> Iterator[str]:
    """Serves the site; yields its address."""
    handler = functools.partial(_SilentHandler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


class _SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_every_page_is_listed_once() -> None:
    pages = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed_pages()) == pages


@needs_zensical
def test_every_listed_page_is_built_and_is_finished(site: Path) -> None:
    for page in listed_pages():
        text = (site / address(page) / "index.html").read_text()
        assert "<h1" in text
        assert not re.search(r"To be written|[Cc]oming soon|TODO", text), page
        assert "```" not in text, f"{page}: a code block is not taken for one"


@needs_zensical
def test_what_a_page_fetches_is_in_the_site(site: Path) -> None:
    for file in site.rglob("*.html"):
        for value in Resources(file.read_text()).fetched:
            url = urlsplit(value)
            assert not url.netloc, f"{file}: {value} is on another host"
            if file.name != "404.html" and url.scheme != "data":
                assert (file.parent / url.path).exists(), f"{file}: {value} is missing"


@needs_zensical
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_window_and_all_pictures_load(
    tab: Tab, home: str, scheme: str
) -> None:
    tab.prefer(scheme)
    # The choice of an earlier visit comes first, and an open page would write it again.
    tab.load("about:blank")
    tab.call("Storage.clearDataForOrigin", origin=home.rstrip("/"), storageTypes="local_storage")
    faults = []
    for page in listed_pages():
        tab.load(home + address(page))
        for width in WIDTHS:
            tab.resize(width)
            wide = tab.evaluate("document.documentElement.scrollWidth > innerWidth")
            elements = tab.evaluate(_WIDE)
            if wide or elements:
                faults.append(f"{page} at {width}: {elements}")
        tab.evaluate("[...document.images].forEach(i => i.loading = 'eager')")
        tab.wait_for("[...document.images].every(i => i.complete)")
        missing = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
        faults += [f"{page}: {picture} does not load" for picture in tab.evaluate(missing)]
        is_dark = tab.evaluate(_BACKGROUND) < 128
        if is_dark != (scheme == "dark"):
            faults.append(f"{page}: the background is not {scheme}")
    assert faults == []


@needs_zensical
@needs_chromium
@pytest.mark.parametrize("text", SEARCHED)
def test_search_finds_an_operation(tab: Tab, home: str, text: str) -> None:
    tab.resize(WIDTHS[0])
    tab.load(home)
    tab.evaluate("document.querySelector('.md-search__button').click()")
    tab.wait_for(f"Boolean({_INPUT})")
    tab.evaluate(f"({_INPUT}).focus()")
    tab.call("Input.insertText", text=text)
    tab.wait_for(f"({_RESULTS}).some(link => link.includes('{SEARCHED[text]}'))")


@needs_zensical
@needs_chromium
def test_nothing_is_fetched_from_other_hosts(tab: Tab, home: str) -> None:
    for page in listed_pages():
        tab.load(home + address(page))
    hosts = {urlsplit(url).netloc for url in tab.requests if not url.startswith("data:")}
    assert hosts == {urlsplit(home).netloc}
