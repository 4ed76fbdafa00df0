"""Docstrings of the package begin with what a thing does, and not with the middle of a sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OPENERS = re.compile(r"(Of|As|That|What|It is|Which|Those|These)\b")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), text


def bad(paths: list[Path]) -> list[str]:
    return [
        f"{path}:{line} opens with {text[:40]!r}"
        for path in paths
        for line, text in docstrings(path.read_text())
        if OPENERS.match(text)
    ]


@pytest.mark.parametrize(
    "folder", ["coevolve_jax", "experiments", "benchmarks", "tests", "tpu_scripts", "examples"]
)
def test_docstrings_begin_with_a_subject_or_a_verb(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert bad(files) == []


@pytest.mark.parametrize(
    "text, wrong", [("Of a step.", 1), ("What it is.", 1), ("Assigns rows.", 0), ("Packs.", 0)]
)
def test_the_check_can_fail(tmp_path, text, wrong):
    (tmp_path / "a.py").write_text(f'def f():\n    """{text}"""\n')
    assert len(bad([tmp_path / "a.py"])) == wrong
