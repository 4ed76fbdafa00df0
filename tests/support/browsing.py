"""Fixtures of tests that open a report in a real browser."""

import os
import shutil
import urllib.parse

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60_000  # milliseconds; a busy machine draws slowly
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    not CHROMIUM,
    reason="no Chromium: install one (Debian: apt-get install chromium), or name yours in the variable "
    "CHROMIUM",
)
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the report: make test installs it"
    )
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """visit(address, **options) opens a page. A dialog, an error or a foreign request fails the test."""
    opened, wrong = [], []

    def visit(address, **options):
        context = browser.new_context(**{"viewport": DESK, **options})
        context.set_default_timeout(PATIENCE)
        opened.append(context)
        found = context.new_page()
        found.on("dialog", lambda d: (wrong.append(f"dialog {d.message}"), d.dismiss()))
        found.on("pageerror", lambda e: wrong.append(f"error {e}"))
        found.on("console", lambda m: m.type == "error" and wrong.append(f"console {m.text}"))
        own = str(address).partition("#")[0].rpartition("/")[0]
        found.on("request", lambda r: r.url.startswith((own, "blob:")) or wrong.append(f"request {r.url}"))
        found.goto(str(address))
        found.wait_for_selector("html[data-ready]")
        return found

    yield visit
    for context in opened:
        context.close()
    assert wrong == []


def address(workdir, **place):
    return f"file://{workdir}/report.html#" + urllib.parse.urlencode(place)
