"""Compiles every command for accelerators in the documents, one by one, and prints the compilers' reports.

    make aot && .venv/bin/python benchmarks/hardware.py

COMMANDS is the list; tests/planning/test_aot.py holds the documents against it. A program of full size takes
minutes of a core, and up to 4 GB.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from absl import app

ROOT = Path(__file__).parents[1]


class Command(NamedTuple):
    """A command in a document.

    place: the file that shows it. rows: of a micro-batch on each device, or on each group of `context`
    devices. quick: `make test` compiles it, if `make aot` has been run.
    """

    place: str
    config: str
    topology: str
    rows: int
    length: int = 25600
    quick: bool = False
    context: int = 1

    def line(self) -> list[str]:
        """The command that compiles it."""
        return [
            "experiments/plan.py",
            "--compile",
            f"--config=configs/{self.config}.py",
            f"--topology={self.topology}",
            f"--rows={self.rows}",
            f"--pack_length={self.length}",
            f"--config.mesh.context={self.context}",
        ]


COMMANDS = (
    Command("configs/bfcl_qwen3_4b.py", "bfcl_qwen3_4b", "h100-4", 2, quick=True),
    Command("configs/bfcl_qwen2_5_7b.py", "bfcl_qwen2_5_7b", "h100-4", 1),
    Command("configs/appworld_qwen3_4b.py", "appworld_qwen3_4b", "h100-4", 2),
    Command("configs/appworld_qwen2_5_7b.py", "appworld_qwen2_5_7b", "h100-4", 1),
    Command("configs/appworld_qwen3_30b_a3b.py", "appworld_qwen3_30b_a3b", "v6e-64", 1),
    Command("configs/appworld_qwen3_30b_a3b.py", "appworld_qwen3_30b_a3b", "h100-16", 1),
    Command("docs/guides/use_llm_explorer.md", "bfcl_qwen3_4b", "h100-4", 2),
    Command("docs/guides/serve_with_sglang.md", "bfcl_qwen3_4b", "h100-4", 2),
    Command("docs/guides/train_your_model.md", "bfcl_qwen3_4b", "h100-8", 1),
    Command("docs/guides/train_your_model.md", "bfcl_qwen3_4b", "h100-8", 1, 131072, context=4),
    Command("docs/guides/run_on_tpu.md", "bfcl_qwen3_4b", "v6e-8", 1),
    Command("docs/guides/run_on_tpu.md", "bfcl_qwen3_4b", "v6e-4", 1),  # a host that the server shares
    Command("configs/bfcl_qwen3_30b_a3b.py", "bfcl_qwen3_30b_a3b", "h100-16", 1),
    Command("configs/bfcl_qwen3_30b_a3b.py", "bfcl_qwen3_30b_a3b", "v6e-64", 1),
)


def main(_) -> None:
    for command in COMMANDS:
        print(f"\n## {command.place}\n\n    python {' '.join(command.line())}\n", flush=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *command.line()], cwd=ROOT, env=environment, check=False)


if __name__ == "__main__":
    app.run(main)
