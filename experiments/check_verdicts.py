"""Asks whether the verdicts of a campaign tell a hack from a mend: four sets of conditions
judge the same runs.

    python experiments/check_verdicts.py --holes=limit,idle --seeds=0:2 --workdir=runs/holes --jobs=2

1. For each hole in an environment's verdict (coevolve_jax/testing/leaky.py) and each seed a start is
   trained, a bait, and an honest mend (coevolve_jax/harness/baits.py).
2. The verifier of the audit replays every success of their last evaluations where there is no hole.
3. WORKDIR/cases.csv has a row for each bait and mend, with the condition that refuses it.
4. A table tells how many baits are promoted, and how many mends are refused.

The same command goes on. With more holes or seeds it runs what is missing.
"""

from pathlib import Path

from absl import flags

from coevolve_jax.config import command_line

_HOLES = flags.DEFINE_list("holes", [], "Of coevolve_jax/harness/baits.py; none named: all.")
_SEEDS = flags.DEFINE_string("seeds", "0", "A range such as 0:4, or a list such as 0,3.")
_TOGETHER = flags.DEFINE_integer("together", 1, "Seeds that a verdict joins, in their order.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that this writes.")
_CONFIG = flags.DEFINE_string("config", "configs/bfcl_harness.py", "Config file, as for evolve_harness.py.")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all runs.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
flags.mark_flags_as_required(["workdir"])


def run() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.comparison import cells, plan, variations
    from coevolve_jax.comparison.cell_files import finished
    from coevolve_jax.harness import baits, launch, progress
    from coevolve_jax.harness.start import settled, without_harness
    from coevolve_jax.harness.store import Store

    folder, say = Path(_WORKDIR.value), lambda text: print(text, flush=True)
    holes, seeds, of = _HOLES.value or list(baits.BAITS), plan.parse_seeds(_SEEDS.value), _TOGETHER.value
    if wrong := [hole for hole in holes if hole not in baits.BAITS]:
        raise ValueError(f"--holes names {wrong[0]!r}: use some of {', '.join(baits.BAITS)}.")
    configs.check_output("workdir", folder, folder=True)
    if len(seeds) % of:
        raise ValueError(f"--together={of} does not divide the {len(seeds)} seeds: give a multiple of it.")
    together = [tuple(seeds[i : i + of]) for i in range(0, len(seeds), of)]
    settings = " ".join([_CONFIG.value, *_SET.value])
    known = {case.key: case for case in baits.read_cases(folder / "cases.csv", settings)}
    c = variations.with_values(configs.load_file(_CONFIG.value), _SET.value)
    starting = {hole: settled(baits.starting(c, hole)) for hole in holes}  # checked before anything is run
    for hole in holes:
        due = [s for s in together if any((hole, kind, s) not in known for kind in baits.KINDS)]
        if not due:
            continue
        config = starting[hole]
        noise = config.harness.noise
        start = without_harness(config)
        moves = baits.children(start, hole)
        made = {"start": start} | {kind: own for kind, (_, own) in moves.items()}
        programs = launch.programs(start, folder / "store" / "compiled")
        store = Store(folder / "store", start, programs, _JOBS.value)
        runs = [(config, seed) for group in due for seed in group for config in made.values()]
        done = lambda: sum(finished(store.workdir(*run)) for run in runs)
        counted = progress.Counted(len(runs), done())
        told = lambda: f"{hole}: {counted(done())}"
        with progress.said(say, told):
            why = store.begin([seed for group in due for seed in group]) or store.train_all(runs)
        if why:
            raise ValueError(f"A run of the hole {hole} failed: {next(iter(why.values()))}")
        for group in due:
            sides = {
                name: baits.read(name, own, {s: store.workdir(own, s) for s in group}, store.audit)
                for name, own in made.items()
            }
            live = baits.registered(sides["start"])
            for kind, (move, _) in moves.items():
                told_of = hole, kind, move, group, settings, cells.machine(), cells.commit()
                case = baits.case(*told_of, sides["start"], sides[kind], live, noise)
                known[case.key] = case
            baits.write(folder / "cases.csv", known.values())
        say(told())
    say(baits.table(list(known.values())))


if __name__ == "__main__":
    command_line.start(run, resumes=True)
