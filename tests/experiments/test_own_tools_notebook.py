"""The notebook for own tools, executed whole in a real kernel with a tiny policy: here, and as on Colab."""

import json
import re

import pytest

from tests.envs.test_tools_guide import PAGE, SMALL
from tests.support import notebooks
from tests.support.notebooks import printed, shown
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

NAME = "own_tools.ipynb"


@pytest.fixture(scope="module", params=["here", "colab"])
def executed(request, tmp_path_factory, environ):
    """Its cells by id, and the folder in which it ran, which is no checkout."""
    folder = tmp_path_factory.mktemp("own_tools")
    workdir = folder / "runs" / "library"
    changes = " ".join(text for text in SMALL if not text.startswith("--config.model="))
    parameters = {
        "SOURCE": "my_env:Library",
        "MODEL": str(ROOT / "models" / "tiny_qwen3"),
        "WORKDIR": workdir,
        "CHANGES": changes,
    }
    return notebooks.executed(NAME, parameters, folder, environ, request.param == "colab"), folder


@pytest.mark.nightly
def test_it_goes_from_a_class_to_an_agent(executed):
    cells, folder = executed
    assert "my_env:Library: is it fit to train on? Yes." in printed(cells["check"])
    (page,) = shown(cells["page"], "text/html")
    assert page.startswith("<iframe srcdoc=") and "Are these tools fit to train on?" in page
    workdir = folder / "runs" / "library"
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((workdir / "summary.json").read_text())
    before, after = (summary[f"held_out_success_{when}"] for when in ("before", "after"))
    said = f"held-out tasks: {before:.1%} before RL, {after:.1%} after {len(rows)} steps"
    assert len(rows) == 2 and printed(cells["curves"]).startswith(said)
    assert len(shown(cells["curves"], "image/png")) == 1
    tasks = {t["id"]: t for t in map(json.loads, (workdir / "tasks.jsonl").read_text().splitlines())}
    attempt = printed(cells["attempt"])
    (first,) = [task for id, task in tasks.items() if attempt.startswith(f"{id}: ")]
    assert f"  user   {first['turns'][0]['query']}" in attempt
    listed = printed(cells["tasks"])
    assert all(turn["query"] in listed for turn in list(tasks.values())[0]["turns"])
    assert str(workdir / "report.html") in printed(cells["report"])
    assert "README.md" in printed(cells["report"])


def test_its_class_is_that_of_the_guide():
    (cell,) = [cell for cell in notebooks.read(NAME).cells if cell.id == "class"]
    assert cell.source.startswith("%%writefile my_env.py\n")
    assert cell.source.removeprefix("%%writefile my_env.py\n") in PAGE


def test_the_page_that_it_shows_is_the_one_that_its_check_writes_whatever_the_source():
    cells = {cell.id: cell.source for cell in notebooks.read(NAME).cells}
    (out,) = re.findall(r"--out=(\S+)", cells["check"])
    assert f'Path("{out}").read_text()' in cells["page"] and "{" not in out
