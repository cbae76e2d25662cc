"""The site of `make docs`: it builds strictly without a network, and its pages load nothing from elsewhere."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import CHROMIUM, chromium
from places import ROOT

pytestmark = pytest.mark.slow
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # links that a browser does not follow by itself


def build(target: Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADS and given.get("rel") not in NOT_LOADED and (address := given.get(LOADS[tag])):
            self.found.append(address)


def foreign(address: str) -> bool:
    return re.match(r"(?:https?:)?//", address) is not None


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.glob("*.html"))
    assert len(pages) > 15
    loaded = {(page.name, address) for page in pages for address in Loads(page.read_text(encoding="utf-8")).found}
    assert len(loaded) > 100
    assert not [(name, address) for name, address in loaded if foreign(address)]
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert not [found for style in styles for found in re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", style)]


def test_a_script_from_elsewhere_is_found():
    page = '<link rel="canonical" href="https://a.example/"><script src="//b.example/x.js"></script><img src="c.png">'
    assert [address for address in Loads(page).found if foreign(address)] == ["//b.example/x.js"]


def test_marks_and_equations_are_made_into_what_they_stand_for(site):
    texts = {page.name: page.read_text(encoding="utf-8") for page in site.glob("*.html")}
    left = re.compile(r'class="arithmatex"|(?:src|href)="\.\./(?:results|figures)')
    assert not [name for name, text in texts.items() if left.search(text)]
    assert texts["method.html"].count("<math") > 20
    assert texts["results-demo.html"].count("<table") >= 9
    assert texts["results-demo.html"].count("<img") >= 5
    assert texts["assumptions.html"].count("<tr>") > 20
    assert 'id="tapernorm.attach"' in texts["api.html"]


def test_a_broken_link_fails_the_build(tmp_path):
    for name in ("docs", "figures", "results", "config", "src", "benchmarks", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.is_file():
            (tmp_path / "docs" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "mkdocs.yml").write_bytes((ROOT / "mkdocs.yml").read_bytes())
    with open(tmp_path / "docs/method.md", "a", encoding="utf-8") as page:
        page.write("\n[nowhere](no-such-page.md)\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode != 0
    assert "no-such-page.md" in done.stdout + done.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_every_page_without_an_error(site, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium(tmp_path / "profile") as page:
            for path in sorted(site.glob("*.html")):
                if path.name == "404.html":
                    continue
                page.open(f"http://127.0.0.1:{server.server_port}/{path.name}")
                assert page.evaluate("document.querySelector('h1').textContent.length") > 2, path.name
                broken = "[...document.images].filter(i => i.complete && i.naturalWidth === 0).length"
                assert page.evaluate(broken) == 0, path.name
                wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert page.evaluate(wide) <= 0, path.name
            page.open(f"http://127.0.0.1:{server.server_port}/method.html")
            assert page.evaluate("document.querySelector('math').getBoundingClientRect().height") > 5
            assert page.errors == []
    finally:
        server.shutdown()
        server.server_close()
