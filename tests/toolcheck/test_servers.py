"""The check of tools on MCP servers: what does not repeat, files, and servers that could be reused."""

import json

import pytest

from coevolve_jax import config as configs
from coevolve_jax.toolcheck import facts
from coevolve_jax.toolcheck.findings import findings
from coevolve_jax.toolcheck.lines import Lines
from tests.envs.test_env_folder_tools import FIND, FLIGHTS, NEEDS_CC, PRICE, environment
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SERVER = f"python {ROOT}/tests/support/mcp_server.py {{world}}"
FIT = ("restock", "count", "inventory")


@pytest.fixture
def check(tmp_path):
    """Checks the tests' server, and returns the facts and the findings, those that stop with a mark."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "stock.json").write_text(json.dumps({"tea": 3, "milk": 1}))
    config = configs.load_file(ROOT / "configs" / "mcp_smollm2.py")

    def check(fault="", **changed):
        changed = {"command": f"{SERVER} {fault}", "template": str(tmp_path / "shop"), "workers": 1} | changed
        c = configs.override(config, {f"environment.{name}": value for name, value in changed.items()})
        found = facts.gather(c, ["train", "test"], worlds=2)
        return found, [f"{'STOP ' * each.stops}{each}" for each in findings(c, found, Lines(""))]

    return check


def of(told, begin):
    """The findings that begin so."""
    return [each for each in told if each.startswith(begin)]


def test_what_does_not_repeat_stops_and_the_other_tools_are_named(check):
    found, told = check()
    assert set(found.tools) == {*FIT, "today", "fault"} and found.asked == 7 and not found.forgets
    (stop,) = of(told, "STOP")
    assert stop.startswith("STOP today depends on a clock or on chance: today() gives ")
    assert "Set config.environment.freeze_time" in stop
    (fit,) = of(told, "Fit to train on are 4 of 5 tools.")
    assert fit.endswith("--config.environment.tools=restock,count,inventory,fault")
    (alike,) = of(told, "All worlds begin alike")
    assert "Give the template folders train" in alike


def test_a_server_that_remembers_nothing_could_be_reused(check):
    found, told = check(tools=FIT)
    assert found.forgets and len(found.tasks) > 1
    (reused,) = of(told, "The server remembers nothing")
    assert reused.endswith("--config.environment.reuse_server=True") and not of(told, ("STOP", "Fit"))


@pytest.mark.nightly
def test_a_server_that_remembers_other_worlds_is_not_reused(check):
    found, told = check("remembers", tools=("restock", "fault"))
    assert not found.forgets and not found.unlike and not of(told, ("STOP", "The server"))
    _, told = check("remembers", tools=("restock", "fault"), reuse_server=True)
    (stop,) = of(told, "STOP")
    assert stop.startswith("STOP fault depends on other worlds beside it: fault() gives 'called ")
    assert "Set config.environment.reuse_server=False" in stop


@pytest.mark.nightly
def test_files_that_differ_and_files_that_every_call_changes_are_named(check):
    found, told = check("logs", tools=FIT)
    assert found.logs == ["log.txt"] and not found.forgets
    assert "; the worlds then differ in log.txt." in of(told, "STOP")[0]
    (every,) = of(told, "Every call changes the state in log.txt, also where it only looks something up.")
    assert every.endswith("by config.environment.ignore.")
    found, told = check("logs", tools=FIT, ignore=("log.txt",))
    assert found.forgets and not found.logs and not of(told, ("STOP", "Every"))


@pytest.mark.nightly
def test_remedies_are_those_of_a_server(check):
    _, told = check("dies", tools=("count", "fault"))
    (ends,) = of(told, "fault ends its world at fault() (")
    assert ends.endswith("leave the tool out by config.environment.tools.")
    _, told = check(tools=("count", "inventory"))
    (elsewhere,) = of(told, "No call changes the state")
    assert elsewhere.endswith("let it keep it below {world}.")


@pytest.mark.nightly
@NEEDS_CC
def test_remedies_for_folders_of_tables_name_the_tables(check, tmp_path):
    environment(tmp_path / "mix", "0001000", [FIND, PRICE], flights=FLIGHTS, products=[])
    _, told = check(name="folder_tools", template=str(tmp_path / "mix"))
    (never,) = of(told, "set_price never succeeded")
    assert "Let the tables hold values that work under the name product_id, or" in never
    (elsewhere,) = of(told, "No call changes the state")
    assert elsewhere.endswith("let it write that to the tables, below MCP_DB_DIR.")
