"""Checks this machine's accelerators in ten minutes, and writes a page to read or to send.

    python experiments/smoke_device.py --output=runs/smoke

It compares kernels with plain code, and the engine's tokens with the CPU's. It measures memory and products,
and trains ten steps. smoke.md has a row per check, smoke.json all figures. Exit status 1: a check failed; the
end of the page says what to send. On a CPU everything runs small and interpreted.
"""

import datetime
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # an SGLang server needs memory too

from absl import flags

from coevolve_jax.config import command_line

NO_ACCELERATOR = (
    "JAX found no accelerator, so everything ran small on the CPU. On a machine with a GPU install "
    "jax[cuda13], on a TPU VM jax[tpu], for this Python."
)
_OUTPUT = flags.DEFINE_string("output", "runs/smoke", "Folder to write; a new one, or an empty one.")
_ONLY = flags.DEFINE_list("only", [], "Checks to make, by the beginnings of their names; none: all.")


def main() -> int:
    folder = Path(_OUTPUT.value).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output={folder} cannot be written ({error.strerror}): choose another.") from None
    if any(folder.iterdir()):
        raise ValueError(f"--output={folder} is not empty: choose another.")
    import jax

    from coevolve_jax.testing import device
    from coevolve_jax.train import train

    none = ""
    size = device.FULL
    if jax.default_backend() == "cpu":
        size, none = device.SMALL, NO_ACCELERATOR
    made = device.checks(size, folder, train)
    chosen = {n: f for n, f in made.items() if not _ONLY.value or n.startswith(tuple(_ONLY.value))}
    if not chosen:
        raise ValueError(f"--only={','.join(_ONLY.value)} begins none of {', '.join(made)}.")
    rows, date = [], f"{datetime.date.today()}"
    for name, check in chosen.items():
        rows.append(row_of(name, check))
        # After each check: a device that hangs in one must not hide the others.
        (folder / "smoke.json").write_text(json.dumps({"date": date, "checks": rows}, indent=1))
        (folder / "smoke.md").write_text(page(rows, date, folder, list(chosen)[len(rows) :], none))
    print(folder / "smoke.md", none, sep="\n" if none else "")
    return int(any(row["state"] == "failed" for row in rows))


def row_of(name: str, check) -> dict:
    """Makes a check. Whatever it raises is its result: one failure must not hide the others."""
    from coevolve_jax.testing.device import LeftOut

    start, figures, why = time.perf_counter(), {}, ""
    try:
        figures, state = check(), "passed"
    except LeftOut as error:
        state, why = "left out", str(error)
    except Exception as error:
        state, why = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:500]
    seconds = round(time.perf_counter() - start, 1)
    print(f"{state:>9}  {name} ({seconds} s) {why}", flush=True)
    return {"name": name, "state": state, "why": why, "seconds": seconds, "figures": figures}


def page(rows: list[dict], date: str, folder: Path, rest: Sequence[str] = (), none: str = "") -> str:
    """Markdown: a row for each check, and what to send.

    rest: names of the checks that are not made yet. none: a sentence where no accelerator was found.
    """
    shown = lambda value: f"{value:.4g}" if isinstance(value, float) else f"{value}"
    lines = [f"# Checks of a device, {date}", "", "| check | state | figures |", "|---|---|---|"]
    for row in rows:
        figures = ", ".join(f"{key} {shown(value)}" for key, value in row["figures"].items())
        told = (row["why"] or figures).replace("\n", " ").replace("|", "\\|")
        lines.append(f"| {row['name']} | {row['state']} | {told} |")
    failed = [row["name"] for row in rows if row["state"] == "failed"]
    said = [none] if none else []
    if rest:
        said.append(f"It ended in the check {rest[0]!r}, {len(rest)} before the end.")
    if failed:
        said.append(f"Failed: {'; '.join(failed)}.")
    if rest or failed:
        said.append(f"Send smoke.json, this page and the *.log files of {folder}.")
    else:
        said.append("Nothing failed.")
    return "\n".join([*lines, "", " ".join(said), ""])


if __name__ == "__main__":
    command_line.start(main, interrupted="--output holds the checks that ended.")
