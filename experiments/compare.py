"""Compares methods on the same tasks, seeds and budget.

    python experiments/compare.py --config=configs/bfcl_headroom.py --seeds=0:5 --workdir=runs/pilot \\
        --arms=static,random,placebo,coevolve,oracle
    python experiments/compare.py --config=configs/bfcl_tiny.py --seeds=0:3 --workdir=runs/every \\
        --arms=coevolve --grid=evolution.every=5,10,20

--arms=help lists the arms. Each cell (arm, setting, seed) is an ordinary run in WORKDIR/cells. The arms of a
seed share their initial state: D_0, held-out sets and first evaluation. WORKDIR/outcomes.csv has every raw
number, comparison.json the statistics. report.html shows both.

The same command resumes a comparison. On SIGTERM or SIGUSR1 its runs save, and it exits with status 75. A run
that diverges counts as a result. Only --retry_diverged tries it again.

--bundle=DIR writes the finished cells into a small folder. --join=DIR takes such a folder in: the comparison
goes on from it, or it gets the arms of others (docs/guides/enter_the_arena.md).
"""

import contextlib
import datetime
import os
import shlex
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags

from coevolve_jax.config import command_line

_CONFIG = flags.DEFINE_string(
    "config", None, "Config file, with its argument if any, e.g. configs/bfcl_headroom.py."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that the comparison writes.")
_ARMS = flags.DEFINE_list(
    "arms", [], "Arms by name; help lists them. The dotted path of a strategy's module is an arm too."
)
_SEEDS = flags.DEFINE_string("seeds", "0:3", "A range such as 0:3, or a list such as 0,3,7.")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all cells.")
_GRID = flags.DEFINE_multi_string(
    "grid", [], "KEY=VALUE,VALUE,...: every arm with every combination of these."
)
_SEARCH = flags.DEFINE_multi_string(
    "search", [], "KEY=LOW:HIGH[:log]: every arm with --samples random settings."
)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Settings of --search.", lower_bound=1)
_PLANNED = flags.DEFINE_list(
    "planned",
    [],
    "Differences to test in each setting, such as oracle-random; none: the usual ones. "
    "Later commands cannot remove any; plan.json dates those that they add.",
)
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
_SHARD = flags.DEFINE_string(
    "shard",
    "0/1",
    "I/N: run part I (from 0) of N parts of the seeds; experiments/sweep.py prints such commands.",
)
_RUN = flags.DEFINE_list(
    "run", [], "Those of --arms to run now; none: all. The plan keeps the others for a later command."
)
_ONLY_READ = flags.DEFINE_bool(
    "only_read",
    False,
    "Run nothing: write the tables of the finished runs. With only some of the comparison's arms, seeds or "
    "settings, print them and write nothing.",
)
_BUNDLE = flags.DEFINE_string(
    "bundle", None, "Folder: write the finished cells there, small enough for git, for --join elsewhere."
)
_JOIN = flags.DEFINE_list(
    "join",
    [],
    "Bundles to check and take in: cells of this comparison count as finished, those of other arms join it.",
)
_RETRY = flags.DEFINE_bool(
    "retry_diverged",
    False,
    "Resume runs that diverged. On the same machine with the same code they diverge again.",
)


def main() -> None:
    if _ARMS.value == ["help"]:
        from coevolve_jax.comparison.arms import ARMS

        print("\n".join(f"{name:>22}  {a.why}" for name, a in ARMS.items()))
        return
    if failures := run():
        lines = [f"{len(failures)} of the runs failed; the same command tries them again:"]
        lines += [f"  {f.name}: {f.why} (log: {f.log})" for f in failures]
        sys.exit("\n".join(lines))


def run() -> list:
    for flag in (_CONFIG, _WORKDIR, _ARMS):
        if not flag.value:
            raise ValueError(f"Give --{flag.name}, see --help.")
    from coevolve_jax import config as configs
    from coevolve_jax import shipped
    from coevolve_jax.analysis import report
    from coevolve_jax.comparison import bundle, cells, plan, plan_file, results, variations
    from coevolve_jax.comparison.table import table

    folder, part = Path(_WORKDIR.value), plan.parse_shard(_SHARD.value)
    if _BUNDLE.value:
        bundle.check_target(Path(_BUNDLE.value))
    path, _, arg = _CONFIG.value.partition(":")
    config = configs.load_file(path, arg)
    if _GRID.value and _SEARCH.value:
        raise ValueError(
            f"--grid={_GRID.value[0]} and --search={_SEARCH.value[0]} exclude each other: give one of them."
        )
    config = variations.with_values(config, _SET.value)
    configs.check(config)
    if _SEARCH.value:
        settings = variations.search(config, _SEARCH.value, _SAMPLES.value, config.seed)
    else:
        settings = variations.grid(config, _GRID.value)
    if unknown := [name for name in _RUN.value if name not in _ARMS.value]:
        raise ValueError(f"--run={','.join(unknown)} is none of --arms={','.join(_ARMS.value)}.")
    before = plan_file.read(folder)
    if _ONLY_READ.value and before is None and not _JOIN.value:
        raise ValueError(
            f"--only_read finds no comparison in {folder} (no plan.json): mend --workdir, or leave out "
            "--only_read."
        )
    settings, seeds = plan_file.as_before(before, settings), plan.parse_seeds(_SEEDS.value)
    chosen = plan.cells(_ARMS.value, seeds, settings)
    bundles = [bundle.read(Path(path)) for path in _JOIN.value]
    joined = [c for c in bundle.joined(before) if c not in chosen]
    joined += [c for b in bundles for c in b.cells if c not in chosen and c not in joined]
    about = {
        "machine": f"{cells.machine()}, {_JOBS.value} runs at once",
        "date": f"{datetime.date.today()}",
        "commit": cells.commit(),
        "command": f"{shipped.command('compare')} {shlex.join(sys.argv[1:])}",
    }
    planned = plan.pairs(_PLANNED.value, [*chosen, *joined])
    made, whole = plan_file.made(config, _ARMS.value, seeds, settings, planned, **about), True
    theirs = plan_file.written(folder, made) or bundle.plan_of(bundles, made)
    elsewhere = {c.column for c in (*joined, *(c for b in bundles for c in b.cells))}
    if _ONLY_READ.value:
        made, whole = plan_file.as_read(theirs, made, bool(_PLANNED.value), elsewhere)
    else:
        made = plan_file.continued(folder, theirs, made, bool(_PLANNED.value), elsewhere)
    plan.check(folder, config, chosen)
    if not _ONLY_READ.value:
        plan.check_configs(config, chosen, variations.by_key("set", _SET.value))
    failures = []
    # Nothing is written before the part is claimed: a command that is refused leaves the plan as it was.
    with contextlib.nullcontext() if _ONLY_READ.value else plan_file.claimed(folder, *part):
        before = (theirs or {}).get("joined", [])
        made["joined"] = _take_in(folder, bundles, config, made, chosen, before, whole)
        if whole:
            plan_file.write(folder, made)
        if not _ONLY_READ.value:
            failures = _run_cells(folder, config, made, chosen, joined, *part)
    print(table(results.read(folder, made, [*chosen, *joined], keep=whole)))
    for path in {c.workdir(folder) for b in bundles for c in b.cells}:
        if not (path / "report.html").exists():
            report.write_report(path)
    if whole:
        report.write_report(folder)
    else:
        print(
            f"\nNothing was written: {folder} holds a comparison of other arms, seeds or settings than these."
        )
    if _BUNDLE.value:
        told = {"commit": cells.commit(), "machine": cells.machine(), "date": f"{datetime.date.today()}"}
        count, digest = bundle.write(folder, made, chosen, Path(_BUNDLE.value), **told)
        print(f"\n{_BUNDLE.value} holds {count} of {len(chosen)} cells, digest {digest}.")
    return failures


def _run_cells(folder, config, made, chosen, joined, index: int, count: int) -> list:
    """Runs the cells of this part of the seeds. Returns the failures."""
    from tqdm import tqdm

    from coevolve_jax.comparison import cells, plan, results

    seeds = plan.parse_seeds(_SEEDS.value)[index::count]
    mine = [c for c in chosen if c.seed in seeds and c.arm in (_RUN.value or _ARMS.value)]
    ended = cells.finished if _RETRY.value else cells.ended
    there = sum(ended(c.workdir(folder)) for c in mine)
    with tqdm(total=len(mine), initial=there, unit="run") as bar:

        def on_done(cell, failure):
            bar.update(failure is None)
            lost = cells.diverged(cell.workdir(folder))
            said = f"diverged at step {lost['step']}: {lost['why']}" if lost else "done"
            bar.write(f"{cell.column}, seed {cell.seed}: {failure.why if failure else said}", file=sys.stderr)
            if count == 1:  # with several machines, the last command writes the results of all
                results.read(folder, made, [*chosen, *joined], keep=True)

        return cells.run_all(folder, config, mine, _JOBS.value, on_done, _RETRY.value, [*chosen, *joined])


def _take_in(folder, bundles, config, made, chosen, before, whole: bool) -> list:
    """Moves the bundles' cells into the comparison. Returns the plan's "joined"; before: what it was."""
    from coevolve_jax.comparison import bundle, plan_file

    if not bundles:
        return before
    if not (whole and _SHARD.value == "0/1"):
        raise ValueError(
            f"--join={','.join(_JOIN.value)} changes the whole comparison in {folder}: name all the arms, "
            "seeds and settings of its plan.json, without --shard, or choose another --workdir."
        )

    def keep(found):
        plan_file.write(folder, {**made, "joined": bundle.merged(before, found)})

    found = bundle.join(folder, bundles, config, {**made, "joined": before}, chosen, keep)
    return bundle.merged(before, found)


if __name__ == "__main__":
    command_line.start(main, resumes=True)
