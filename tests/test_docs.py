"""The documents: links, the length and the language of guides, the first page on one screen."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from coevolve_jax import config
from coevolve_jax.config import keys
from coevolve_jax.strategies.base import Strategy
from tests.support.paths import ROOT

PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
GUIDES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/guides/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"^ *(?:[*-]|\d+\.) +|^ *> ?")
# A program, by its folder and its name, in code and in commands. Names with a capital or a * are
# placeholders.
NAMED = re.compile(r"(?<![\w/.:~-])((?:[a-z0-9_.]+/)+[a-z0-9_.]+\.(?:py|sh|js|ipynb))(?![\w/])")


# ---- Links ---------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for link in LINK.findall(FENCED.sub("", page.read_text())):
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


@pytest.mark.parametrize("name", ["README.md", "AGENTS.md", "docs/STATUS.md", *GUIDES])
def test_files_named_are_there(name):
    """Paths are relative to the root or the package; other folders are a user's, or another project's."""
    for file in NAMED.findall((ROOT / name).read_text()):
        homes = [home for home in (ROOT, ROOT / "coevolve_jax") if (home / file.partition("/")[0]).exists()]
        assert not homes or any((home / file).exists() for home in homes), f"{name} names {file}"


@pytest.mark.parametrize("name", ["README.md", *GUIDES])
def test_keys_named_are_in_the_config(name):
    """Keys of strategy and explorer are their own, and do not count. Some keys are of one environment."""
    c = config.load_file(ROOT / "configs" / "bfcl_tiny.py")
    sections = "|".join(key for key in c if hasattr(c[key], "keys") and key not in ("strategy", "explorer"))
    named = re.compile(rf"(?:`|config\.)((?:{sections})\.(?!jsonl)[a-z0-9_]+)(?![\w./])")
    for key in named.findall((ROOT / name).read_text()):
        section, _, last = key.partition(".")
        assert last in c[section] or key in keys.OPTIONAL, f"{name} names {key}"


def test_the_picture_names_the_methods_of_a_strategy():
    named = re.findall(r"strategy\.([a-z_]+)  ", (ROOT / "docs/guides/understand_the_code.md").read_text())
    assert len(named) == 4 and all(hasattr(Strategy, name) for name in named)


# ---- Language ------------------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page's prose, each in one line.

    Code, tables, headings and pictures are no prose. A link counts as its words, code within a line as one
    word.
    """
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", FENCED.sub("", text))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`\n]+`", "code", text))
    lines, listed = [], False
    for line in text.splitlines():
        empty, indented = not line.strip(), line.startswith("    ")
        listed = bool(MARKER.match(line)) or (listed and (empty or line.startswith(" ")))
        prose = not (empty or (indented and not listed) or line.startswith(("#", "|")))
        if not prose or MARKER.match(line):
            lines.append("")
        if prose:
            lines.append(MARKER.sub("", line).strip())
    for words in "\n".join(lines).split("\n\n"):
        if words.strip():
            yield " ".join(words.split())


def sentences(text: str) -> list[int]:
    """The number of words of each sentence in a page's prose."""
    found = (s for p in paragraphs(text) for s in re.split(r"(?<=[.!?])[)*\"]*\s+", p))
    return [n for n in (len(words(s)) for s in found) if n]


def words(prose: str) -> list[str]:
    return [word for word in prose.split() if re.search(r"\w", word)]


def numbers(prose: str) -> list[str]:
    """Numbers: words that begin with a digit, after an optional sign or bracket. Qwen2.5 is a name."""
    return [word for word in words(prose) if re.match(r"[(\[+\-*~]*\d", word)]


def problems(text: str) -> list[str]:
    """The rules that a guide with this text breaks, one sentence each; [] is a valid guide."""
    prose = list(paragraphs(text))
    count = sum(len(words(p)) for p in prose)
    share = 100 * sum(len(numbers(p)) for p in prose) / max(count, 1)
    read = len(words(text))  # code and tables too
    found = [f"{read} words: at most 900"] if read > 900 else []
    if not any(line.startswith(("    ", "```")) for line in text.splitlines()[:10]):
        found.append("no command in its first ten lines")
    if median(sentences(text) or [0]) > 14:
        found.append(f"a sentence has {median(sentences(text))} words in the median: at most 14")
    if share > 2.5:
        found.append(f"{share:.1f} numbers per 100 words: at most 2.5")
    return found


@pytest.mark.parametrize("name", ["AGENTS.md", *GUIDES])
def test_guides_are_short_and_plain(name):
    assert problems((ROOT / name).read_text()) == []


def test_there_are_at_most_fifteen_guides():
    assert len(GUIDES) <= 15


GUIDE = """# Add a tool

    python experiments/main.py --config=FILE --steps=100 --seed=7

A tool is a function. Its name has two parts, `like_3_this`.

* It reads [its arguments](tools.md#2-arguments) and
  returns a value.

| 1 | 2 | 3 |
|---|---|---|
| 4 | 5 | 6 |

It never raises.
"""


def test_prose_is_what_is_neither_code_nor_table_nor_heading():
    assert list(paragraphs(GUIDE))[:2] == [
        "A tool is a function. Its name has two parts, code.",
        "It reads its arguments and returns a value.",
    ]
    assert list(paragraphs(GUIDE))[-1] == "It never raises."
    assert sentences(GUIDE)[:3] == [5, 6, 8]
    assert numbers("From 36.5% to (83.1%), +46.6 points with Qwen2.5 at -1") == [
        "36.5%",
        "(83.1%),",
        "+46.6",
        "-1",
    ]
    assert problems(GUIDE) == []


@pytest.mark.parametrize(
    "text, problem",
    [
        (GUIDE + "Word. " * 900, "9.. words: at most 900"),
        (GUIDE.replace("    python", "python"), "no command in its first ten lines"),
        (
            "    make\n\n"
            + "One word after the other, fifteen of them, makes a sentence that is read twice here.",
            "16 words",
        ),
        (GUIDE + "Success rises from 36.5% to 83.1%, by 46.6 points.\n", "numbers per 100 words"),
    ],
)
def test_the_measure_finds_what_a_guide_may_not_be(text, problem):
    (found,) = problems(text)
    assert re.search(problem, found)


# ---- The first page ------------------------------------------------------------------------------


def test_the_first_page_is_one_screen_and_its_commands_are_the_makefiles():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 60
    assert [line for line in lines if len(line) > 120] == []
    assert median(sentences(text)) <= 14
    commands = set(re.findall(r"^    make ([\w-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets


def test_what_agents_are_told_to_run_and_to_change_is_there():
    text = (ROOT / "AGENTS.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test-fast", "check"} <= set(re.findall(r"make ([\w-]+)", text)) <= targets
    named = set(re.findall(r"`((?:[\w.-]+/)+)`|`([\w.-]+(?:/[\w.-]+)+)`", text))
    paths = {folder or file for folder, file in named}
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).exists()] == []


def test_agents_are_told_where_every_folder_of_the_checkout_is():
    """Folders that hold no code of ours are left out."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    code = {
        name.partition("/")[0] for name in tracked.stdout.splitlines() if name.endswith(".py") and "/" in name
    }
    text = (ROOT / "AGENTS.md").read_text()
    assert {folder for folder in code if f"`{folder}/" not in text} <= {"tpu_scripts", "typings"}


SMALL = {
    "steps": 2, "data.initial_tasks": 4, "rollout.tasks_per_step": 2, "rollout.group_size": 2,
    "evaluation.tasks": 4,
    "environment.workers": 1,
}  # fmt: skip


@pytest.mark.slow
def test_the_first_pages_python_runs(monkeypatch, tmp_path, capsys):
    """The sizes are small, so that it takes seconds."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for folder in ("configs", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    load_file = config.load_file
    monkeypatch.setattr(config, "load_file", lambda *args: config.override(load_file(*args), SMALL))
    exec(code, {})
    assert [line.split()[::2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["0", "4"],
        ["1", "4"],
    ]
