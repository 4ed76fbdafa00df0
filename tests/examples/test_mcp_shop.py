"""The shops for an MCP server: the same ones again, different in each split, with SQL that works there."""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coevolve_jax.envs.mcp import templates
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shops") / "mcp_shop"
    subprocess.run([sys.executable, ROOT / "examples" / "mcp_shop.py", folder], check=True)
    return folder


def contents(folder: Path) -> dict[str, dict[str, str]]:
    settings = {"template": str(folder)}
    found = [(split, path) for split in templates.SPLITS for path in templates.of_split(settings, split)]
    return {f"{split}/{path.name}": templates.content(path) for split, path in found}


def test_the_shops_are_the_same_ones_again_and_no_two_are_alike(shops, tmp_path):
    before = contents(shops)
    assert len(before) == 36 and len({content["shop.db"] for content in before.values()}) == 36
    subprocess.run([sys.executable, ROOT / "examples" / "mcp_shop.py", tmp_path / "again"], check=True)
    assert contents(tmp_path / "again") == before


def test_shops_that_an_interrupted_run_left_are_made_whole(shops, tmp_path):
    (tmp_path / "train" / "shop_0").mkdir(parents=True)
    half = tmp_path / "train" / "shop_1"
    half.mkdir()
    with sqlite3.connect(half / "shop.db") as database:
        database.execute("CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT)")
    database.close()
    subprocess.run([sys.executable, ROOT / "examples" / "mcp_shop.py", tmp_path], check=True)
    assert contents(tmp_path) == contents(shops) and (half / "coevolve.json").exists()


def test_the_values_are_sql_that_works_and_that_a_user_would_type(shops, tmp_path):
    told = list(shops.glob("*/*/coevolve.json"))
    assert len(told) == 36
    for notes in told:
        named = json.loads(notes.read_text())["values"]
        assert named and all(named.values())
        for name, values in named.items():
            for value in values:
                assert len(value) <= 40
                shutil.copy(notes.with_name("shop.db"), tmp_path / "shop.db")
                with sqlite3.connect(tmp_path / "shop.db") as database:
                    asked = f"SELECT * FROM {value}" if name.endswith("table_name") else value
                    rows = database.execute(asked).fetchall()
                    assert rows or database.total_changes or not value.startswith(("SELECT name", "UPDATE"))
                database.close()
