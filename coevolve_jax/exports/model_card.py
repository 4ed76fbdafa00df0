"""The card of a trained policy: README.md beside its weights, as model hubs show it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis.loading import fate, load_forked
from coevolve_jax.analysis.summary import fork_line, held_out_lines
from coevolve_jax.records.files import write_text

RUN_CONFIG = "run_config.json"  # beside the card
ADAPTER = "adapter"  # folder beside the card, of a run with LoRA
AGAIN = (
    "",
    "## Again",
    "",
    "In the folder where the run was started, since its config may name files by where they lie from "
    f"there; {RUN_CONFIG} lies beside this card:",
    "",
    f"    mkdir again && cp POLICY/{RUN_CONFIG} again/config.json && coevolve train --workdir=again",
    "",
    "The same versions on a machine of the same kind give the same bits where the in-process engine "
    "generates.",
)


def write(folder: str | os.PathLike, config: ConfigDict, summary: Mapping[str, Any]) -> None:
    """Writes the card and the run's config into the folder of its policy, `policy` in the run's workdir.

    summary: of summary.json.
    """
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    write_text(folder / RUN_CONFIG, configs.to_json(config))
    write_text(folder / "README.md", card(config, summary, load_forked(folder.parent)))


def card(config: ConfigDict, summary: Mapping[str, Any], forked: Mapping[str, Any] | None = None) -> str:
    """Returns the card's text: base, data, method, held-out figures with intervals, versions, command.

    forked: forked.json of a fork. Beyond step 0 its card has no command: its config alone does not make it.
    """
    c, learner = config, config.learner
    warm, trained, started = summary.get("warm_start"), "all", "none"
    if learner.lora_rank:
        onto = ", on the policy after the warm start: the run's `warm_start/policy`" if warm else ""
        trained = f"LoRA of rank {learner.lora_rank} (`{ADAPTER}/`, for peft{onto})"
    if warm:
        started = f"{warm['steps']} supervised updates, those up to {warm['best_step']} kept"
    base = {"base model": f"`{c.model}`", "warm start": started, "trained parameters": trained}
    method = {
        "strategy": f"`{c.strategy.name}`",
        **({"fork": fork_line(forked)} if forked else {}),
        "updates": f"{summary['steps']} GRPO steps, seed {c.seed}",
        "batch": f"{c.rollout.tasks_per_step} tasks, {c.rollout.group_size} rollouts each",
        "learning rate": f"{learner.learning_rate:g}, KL coefficient {learner.kl_coef:g}",
    }
    data = {
        "environment": f"`{c.environment.name}`, splits `{c.environment.train_split}` for training",
        "explorer": f"`{c.explorer.name}`" + (f", {m}" if (m := summary.get("explorer_model")) else ""),
        **{f"tasks, {name}": f"{count:,}" for name, count in fate(summary["tasks"])},
        "tasks at the end": f"{summary['tasks']['final']:,}",
        "compared with, against leaks": ", ".join((summary["held_out_split"], *c.data.leak_splits)),
    }
    before, after = (summary["held_out"][when] for when in ("before", "after"))
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [reinforcement-learning, tool-use, grpo, coevolve]",
            "---",
            "",
            "# A policy trained with CoEvolve",
            "",
            "Written by the run itself with coevolve_jax, which implements CoEvolve (arXiv 2604.15840).",
            *_section("Base", base),
            *_section("Method", method),
            *_section("Data", data),
            *_section(
                f"Success on {summary['held_out_tasks']} held-out tasks",
                {
                    name: ", ".join(filter(None, (v.strip(), note)))
                    for name, v, note in held_out_lines(summary)
                },
            ),
            "",
            f"The tasks are synthetic, of the split `{summary['held_out_split']}`, whose answers are not "
            f"trained on; {before['samples']} rollouts each before and {after['samples']} after, at "
            f"temperature {after['temperature']:g}. They say whether the run learned what its training set "
            "teaches. They are no score of a benchmark.",
            *_section("Versions", summary["versions"]),
            *([] if forked and forked["step"] else AGAIN),
            "",
        ]
    )


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    return ["", f"## {title}", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
