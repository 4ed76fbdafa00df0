"""Installs the packages of an environment family, which no extra of pip can name.

    python experiments/set_up.py bfcl         into the environment of this interpreter
    python experiments/set_up.py textworld    into .textworld, which the family's configs name; needs gcc
    python experiments/set_up.py tau2         into .tau2
    python experiments/set_up.py appworld     into .appworld, with six tasks of our own
    python experiments/set_up.py mcp          mcp-server-sqlite into .mcp/sqlite, and shops into runs/mcp_shop

Versions are pinned in requirements/. All but the last are installed without their dependencies: what they
declare is gigabytes that no environment imports here, or has versions that exclude each other.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parent / "requirements"
FAMILIES = ("bfcl", "textworld", "tau2", "appworld", "mcp")
FOLDERS = {"mcp": ".mcp/sqlite"}  # where it is not .FAMILY
# Parts of a folder that are made anew, where the others are data that may have been downloaded.
RENEWED = {"appworld": ("bin", "include", "lib", "lib64", "pyvenv.cfg", "own")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument(
        "--folder", type=Path, help="virtual environment to make, by default .FAMILY or as above"
    )
    parser.error = lambda message: sys.exit(f"Error: {message}.")
    given = parser.parse_args()
    if given.folder and given.family == "bfcl":
        sys.exit(
            f"Error: --folder={given.folder} has no effect on bfcl, whose packages go into the environment "
            "of this interpreter: leave it out."
        )
    try:
        if given.family == "bfcl":
            install(sys.executable, given.family)
            print(f"BFCL's packages are in the environment of {sys.executable}.")
        else:
            folder = given.folder or Path(FOLDERS.get(given.family, f".{given.family}"))
            set_up(given.family, folder)
            print(f"{given.family} has its interpreter in {folder / 'bin' / 'python'}.")
    except subprocess.CalledProcessError as error:
        sys.exit(f"Error: {' '.join(error.cmd)} failed: its output stands above.")
    except KeyboardInterrupt:
        sys.exit(130)


def set_up(family: str, folder: Path) -> None:
    """Makes a virtual environment with the packages of a family. One that is there is replaced."""
    held = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if held and not (folder / "pyvenv.cfg").is_file():
        sys.exit(
            f"Error: {folder} is there and is no virtual environment, and what it holds would be deleted: "
            "empty it, or name another folder by --folder."
        )
    compiler = os.environ.get("CC", "cc")  # jericho, which TextWorld needs, is compiled
    if family == "textworld" and not shutil.which(compiler):
        sys.exit(f"Error: TextWorld needs a C compiler, and there is no {compiler}: install gcc, or set CC.")
    for name in RENEWED.get(family, (".",)):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install(python, family)
    if family == "appworld":
        cache = {**os.environ, "APPWORLD_CACHE": str(folder / "cache")}
        # Its apps lie encrypted in the wheel.
        subprocess.run([str(folder / "bin" / "appworld"), "install"], env=cache, check=True)
        subprocess.run([python, "-m", "compileall", "-q", str(folder / "lib")], check=True)
        subprocess.run([python, "-P", str(HERE / "appworld_tasks.py")], check=True)
    if family == "mcp":
        shops = [str(HERE.parent / "examples" / "mcp_shop.py"), "runs/mcp_shop"]
        subprocess.run([sys.executable, *shops], check=True)
        print("Twelve shops for each split are in runs/mcp_shop.")


def install(python: str, family: str) -> None:
    """Installs the pinned packages of a family for an interpreter, without their dependencies but for MCP."""
    pinned = REQUIREMENTS / f"{family}.txt"
    if python == sys.executable and importlib.util.find_spec("pip") is None:
        sys.exit(f"Error: {python} has no pip: run `uv pip install --no-deps -r {pinned}` instead.")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pinned)]
    subprocess.run(command if family == "mcp" else [*command, "--no-deps"], check=True)


if __name__ == "__main__":
    main()
