"""The card of a trained policy: README.md beside its weights, as model hubs show it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import shipped
from coevolve_jax.analysis.loading import fate, load_forked
from coevolve_jax.analysis.summary import fork_line, held_out_lines
from coevolve_jax.records.files import write_text

RUN_CONFIG = "run_config.json"  # beside the card
ADAPTER = "adapter"  # folder beside the card, of a run with LoRA
CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/")  # in the path of a folder of the Hub's cache
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def write(folder: str | os.PathLike, config: ConfigDict, summary: Mapping[str, Any]) -> None:
    """Writes the card and the run's config into the folder of its policy, `policy` in the run's workdir.

    The config names no folder of checkpoints: a second run would go on from those of the first.

    summary: of summary.json.
    """
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    write_text(folder / RUN_CONFIG, configs.to_json(configs.override(config, {"checkpoint.folder": ""})))
    write_text(folder / "README.md", card(config, summary, load_forked(folder.parent)))


def card(config: ConfigDict, summary: Mapping[str, Any], forked: Mapping[str, Any] | None = None) -> str:
    """Returns the card's text: base, data, method, held-out figures with intervals, versions, command.

    forked: forked.json of a fork. Beyond step 0 its card has no command: its config alone does not make it.
    """
    c, learner = config, config.learner
    warm, trained, started = summary.get("warm_start"), "all", "none"
    if learner.lora_rank:
        base = "policy after the warm start, the run's `warm_start/policy`," if warm else "base model"
        onto = f"for peft, on the {base} in {learner.dtype}"
        trained = f"LoRA of rank {learner.lora_rank} (`{ADAPTER}/`, {onto})"
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
        "first tasks": f"{summary['tasks']['initial']:,}, {_origin(c)}",
        **{f"tasks, {name}": f"{count:,}" for name, count in fate(summary["tasks"])},
        "tasks at the end": f"{summary['tasks']['final']:,}",
        "compared with, against leaks": ", ".join(
            dict.fromkeys((summary["held_out_split"], *c.data.leak_splits))
        ),
    }
    before, after = (summary["held_out"][when] for when in ("before", "after"))
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            *([f"base_model: {name}"] if (name := hub_name(c.model)) else []),
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
            f"The tasks are {_held_out(c, summary)}. Their answers are not trained on. Rollouts of "
            f"each: {before['samples']} before and {after['samples']} after, at temperature "
            f"{after['temperature']:g}. {_meaning(c, summary)}",
            *_section("Versions", summary["versions"]),
            *([] if forked and forked["step"] else _again(c, summary)),
            "",
        ]
    )


def hub_name(model: str) -> str | None:
    """The name on the Hub of the model of a folder: that of the Hub's cache, or the one in config.json.

    A path such as models/mine looks like such a name and is none, so the path itself tells nothing.
    """
    folder = shipped.folder(model)
    if cached := CACHED.search(f"{folder.resolve()}/"):
        return "/".join(cached.groups())
    try:
        name = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    except (AttributeError, OSError, ValueError):
        return None
    named = isinstance(name, str) and HUB_NAME.fullmatch(name)
    return name if named and not shipped.folder(name).is_dir() else None


def _origin(config: ConfigDict) -> str:
    """Says where D_0 came from."""
    if config.data.initial_file:
        return f"from the file `{config.data.initial_file}`"
    if config.data.own_tasks:
        return f"the environment's own of the split `{config.environment.train_split}`"
    return "explored"


def _held_out(config: ConfigDict, summary: Mapping[str, Any]) -> str:
    split = f"of the split `{summary['held_out_split']}`"
    if not config.data.own_tasks:
        return f"synthetic, {split}"
    return f"the environment's own, {split}, without those that are also in the training split"


def _meaning(config: ConfigDict, summary: Mapping[str, Any]) -> str:
    """Says what the held-out figures tell."""
    if not config.data.own_tasks:
        return (
            "They say whether the run learned what its training set teaches. They are no score of a "
            "benchmark."
        )
    others = [name for name in ("balanced", "queries") if summary.get(name)]
    return (
        "The figures hold under the prompts and limits of this run. A published score of a benchmark may "
        "have a protocol of its own."
        + (f" The tasks of other sets ({', '.join(others)}) are synthetic." if others else "")
    )


def _again(config: ConfigDict, summary: Mapping[str, Any]) -> list[str]:
    """Says how to make the run again, and whether it then gives the same bits."""
    c = config
    apart = {
        f"the engine `{c.engine.name}` generates": c.engine.name != "native",
        "rollouts are sampled beside updates (`rollout.max_staleness`)": c.rollout.max_staleness > 0,
        "a model explores": "explorer_model" in summary or configs.asks_policy(c),
    }
    whys = " and ".join(why for why, given in apart.items() if given)
    same = "The same versions on a machine of the same kind give the same bits."
    return [
        "",
        "## Again",
        "",
        "In the folder where the run was started, since its config may name files by where they lie from "
        f"there; {RUN_CONFIG} lies beside this card:",
        "",
        f"    mkdir again && cp POLICY/{RUN_CONFIG} again/config.json && coevolve train --workdir=again",
        "",
        f"It need not give the same bits, since {whys}." if whys else same,
    ]


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    return ["", f"## {title}", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
