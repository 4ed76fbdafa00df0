"""Notebooks, executed in a real kernel with other parameters."""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.paths import ROOT

FOLDER = ROOT / "experiments" / "notebooks"


def read(name: str):
    return nbformat.read(FOLDER / name, as_version=4)


def tagged(cell, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def executed(name: str, parameters: dict[str, Any], folder: Path, environ: dict, cwd: Path) -> dict:
    """Runs a notebook without its cells for Colab. Returns the cells by id.

    parameters: name -> value, for all that the cell of parameters sets. folder: for the kernel's files.
    """
    made = read(name)
    made.cells = [cell for cell in made.cells if not tagged(cell, "colab-only")]
    (cell,) = [cell for cell in made.cells if tagged(cell, "parameters")]
    assert set(re.findall(r"^(\w+) = ", cell.source, re.MULTILINE)) == set(parameters)
    write = lambda x: f"Path({str(x)!r})" if isinstance(x, Path) else repr(x)
    cell.source = "\n".join(f"{name} = {write(value)}" for name, value in parameters.items())
    environment = {
        **environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), environ["PYTHONPATH"]]),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    client = NotebookClient(
        made, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(cwd)}}
    )
    client.execute(env=environment)
    return {cell.id: cell for cell in made.cells}


def printed(cell) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def shown(cell, kind: str) -> list[str]:
    return [out.data[kind] for out in cell.outputs if kind in out.get("data", {})]
