"""Measures the cost of a slow explorer: evolutions that training waits for, and evolutions beside it.

The tests' server answers, after a pause. Both runs begin with the same D_0 and differ in
config.evolution.async_steps alone.

    python benchmarks/overlap.py --seconds=2
"""

import json
import sys
import tempfile
from pathlib import Path

from absl import app, flags, logging

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from coevolve_jax.config import load_file, override, parse_flags
from coevolve_jax.records.workdir import fork
from coevolve_jax.train import train
from tests.support.openai_server import OpenAIServer

SECONDS = flags.DEFINE_float("seconds", 2.0, "that an answer takes", lower_bound=0)
STEPS = flags.DEFINE_integer("steps", 90, "GRPO steps of a run", lower_bound=4)
EVERY = flags.DEFINE_integer("every", 30, "steps between evolutions, and async_steps", lower_bound=1)

SETTINGS = {
    "evaluation.tasks": 8, "evaluation.num_rollouts": 1, "checkpoint.every": 1000,
    "evolution.freeze_last_steps": 1,
    "evolution.contexts": 12, "evolution.tasks": 12, "evolution.rounds": 1, "evolution.steps": 6,
    "data.initial_tasks": 32,
}  # fmt: skip


def main(_):
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, OpenAIServer() as server:
        begun = Path(folder) / "begun"
        config = override(
            load_file(ROOT / "configs" / "bfcl_tiny.py", "explorer=llm"),
            {
                **SETTINGS,
                "model": str(ROOT / "models" / "tiny_qwen3"),
                "explorer.base_url": server.url,
                "explorer.cache": "",
                "steps": STEPS.value,
                "evolution.every": EVERY.value,
            },
        )
        train(config, begun, until=0)
        server.delay, rows = SECONDS.value, []
        for async_steps in (0, EVERY.value):
            asked, workdir = len(server.seen), Path(folder) / f"async_{async_steps}"
            summary = train(fork(begun, 0, workdir, {"evolution.async_steps": async_steps}), workdir)
            steps = [
                json.loads(line)["seconds"] for line in (workdir / "metrics.jsonl").read_text().splitlines()
            ]
            total, waited = (sum(s[phase] for s in steps) for phase in ("step", "evolution"))
            rows.append(
                (
                    async_steps,
                    len(server.seen) - asked,
                    summary["tasks"]["final"],
                    total,
                    waited,
                    waited / total,
                )
            )
    print(f"\n{STEPS.value} steps, an evolution every {EVERY.value}; an answer takes {SECONDS.value} s")
    print("async_steps | answers | tasks at the end | seconds of all steps | of them waiting for evolution")
    for async_steps, answers, tasks, total, waited, share in rows:
        print(f"{async_steps:11} | {answers:7} | {tasks:16} | {total:20.1f} | {waited:.1f} ({share:.1%})")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
