"""What the documents point at is there."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name} links to {link}"
        assert not anchor or anchor in anchors(target), (
            f"{name} links to {link}, and the page has no such heading"
        )


def test_every_page_can_be_reached_from_the_first():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in seen:
            seen.add(page)
            links = (link.partition("#")[0] for link in LINK.findall(page.read_text()))
            left += [(page.parent / x).resolve() for x in links if x.endswith(".md") and "://" not in x]
    assert {(ROOT / name).resolve() for name in PAGES} <= {page.resolve() for page in seen}


def test_the_first_page_is_one_screen_and_its_commands_are_the_makefiles():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60
    commands = set(re.findall(r"^    make ([\w-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets
