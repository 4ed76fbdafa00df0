"""Notebooks, executed in a real kernel with other parameters."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from tests.support import wheels
from tests.support.paths import ROOT

FOLDER = ROOT / "experiments" / "notebooks"
COLAB = "python3.12"  # the Python of Colab


def read(name: str):
    return nbformat.read(FOLDER / name, as_version=4)


def tagged(cell, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def executed(name: str, parameters: dict[str, Any], folder: Path, environ: dict, on_colab: bool) -> dict:
    """Runs a notebook in a folder that is no checkout. Returns its cells by id.

    on_colab: in `colab`, beginning with the cell that installs the wheel. The other cells for Colab are left
    out. parameters: name -> value, for all that the cell of parameters sets.
    """
    made = read(name)
    installs = ["install"] if on_colab else []
    made.cells = [cell for cell in made.cells if cell.id in installs or not tagged(cell, "colab-only")]
    (cell,) = [cell for cell in made.cells if tagged(cell, "parameters")]
    assert set(re.findall(r"^(\w+) = ", cell.source, re.MULTILINE)) == set(parameters)
    write = lambda x: f"Path({str(x)!r})" if isinstance(x, Path) else repr(x)
    cell.source = "\n".join(f"{name} = {write(value)}" for name, value in parameters.items())
    path = os.pathsep.join([str(ROOT), environ["PYTHONPATH"]])
    environment = {
        **environ,
        "PYTHONPATH": "" if on_colab else path,
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    specs = KernelSpecManager(kernel_dirs=[str(colab(folder))]) if on_colab else KernelSpecManager()
    kernel = AsyncKernelManager(kernel_name="colab" if on_colab else "python3", kernel_spec_manager=specs)
    client = NotebookClient(made, km=kernel, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return {cell.id: cell for cell in made.cells}


def colab(folder: Path) -> Path:
    """Makes what Colab has: its Python with a kernel, `colab`, and the wheel in the working folder.

    Returns the folder of kernels. Skips the test where there is no such Python.
    """
    on_path = shutil.which(COLAB)  # may be a shim of pyenv's that starts nothing
    found = [*filter(None, [on_path]), *Path.home().glob(f".pyenv/versions/3.12.*/bin/{COLAB}")]
    works = lambda python: not subprocess.run([python, "--version"], capture_output=True).returncode
    if not (python := next(filter(works, found), None)):
        pytest.skip(f"There is no {COLAB}.")
    wheels.build(folder)
    subprocess.run([python, "-m", "venv", folder / "colab"], check=True)
    inside = str(folder / "colab" / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "ipykernel"]
    subprocess.run(pip, check=True)
    spec = folder / "kernels" / "colab"
    spec.mkdir(parents=True)
    command = [inside, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "colab"}))
    return spec.parent


def printed(cell) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def shown(cell, kind: str) -> list[str]:
    return [out.data[kind] for out in cell.outputs if kind in out.get("data", {})]
