"""Asks whether the backtests of a campaign are right: what they refuse is trained all the same.

    python experiments/check_backtests.py --config=configs/bfcl_harness.py --workdir=runs/refused --jobs=2

1. The start is run under some values of rollout.salt.
2. Every move of every lever is backtested on the first of these runs: WORKDIR/backtests.csv.
3. Some of the moves that are refused, and some that pass, are trained under these: WORKDIR/trained.csv.
4. A table tells how they fared.

The same command goes on. With larger numbers it trains the same moves first, and then more.
"""

from pathlib import Path

from absl import flags

from coevolve_jax.config import command_line

_CONFIG = flags.DEFINE_string("config", "configs/bfcl_harness.py", "Config file, as for evolve_harness.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that this writes.")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all runs.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the start.", lower_bound=0)
_SALTS = flags.DEFINE_string("salts", "0:2", "Values of rollout.salt for each trained config: other luck.")
_REFUSED = flags.DEFINE_integer("refused", 24, "Refused moves that are trained, at most.", lower_bound=0)
_PASSED = flags.DEFINE_integer("passed", 12, "Passed moves that are trained, at most.", lower_bound=0)
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
flags.mark_flags_as_required(["workdir"])


def run() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.comparison import plan, variations
    from coevolve_jax.comparison.cell_files import finished
    from coevolve_jax.harness import calibration, evidence, launch, progress, refusals
    from coevolve_jax.harness.backtest import Check
    from coevolve_jax.harness.levers import changed
    from coevolve_jax.harness.start import settled, without_harness
    from coevolve_jax.harness.store import Store, config_id, cores_of_starts, is_run, other_cores
    from coevolve_jax.seeding import rng_for

    folder, seed, say = Path(_WORKDIR.value), _SEED.value, lambda text: print(text, flush=True)
    configs.check_output("workdir", folder, folder=True)
    salts = plan.parse_seeds(_SALTS.value, "salts")
    settings = " ".join([_CONFIG.value, *_SET.value])
    path = folder / "trained.csv"
    rows = calibration.read_rows(path, settings)
    config = settled(variations.with_values(configs.load_file(_CONFIG.value), _SET.value))
    start = without_harness(config)
    programs = launch.programs(start, folder / "store" / "compiled")
    cores = cores_of_starts(folder / "store", _JOBS.value)
    if note := other_cores(cores, _JOBS.value):
        say(note)
    store = Store(folder / "store", start, programs, _JOBS.value, cores)

    own = {salt: configs.override(start, {"rollout.salt": salt}) for salt in salts}
    file = folder / "backtests.csv"
    backtested_on, before = refusals.read(file)
    by_name = {f"{lever} {move}": changes for lever, move, changes in refusals.moves(config)}
    first = store.workdir(own[salts[0]], seed)
    here, untried = f"{first.parent.name}/{first.name}", by_name.keys() - before.keys()
    # A whole set of backtests may be of older code, so that its table can be printed again.
    same = here == backtested_on if untried else is_run(Path(backtested_on), own[salts[0]], seed)
    if before and not same:
        raise ValueError(
            f"{file} has backtests on {backtested_on}, and these are on {here}: name another --workdir."
        )
    failed: dict[tuple[str, int], str] = {}

    def train(runs: dict) -> None:
        """Trains {(name, salt): config}, and keeps a row of each that has ended, or why it has none."""
        due = {key: config for key, config in runs.items() if (key[0], seed, key[1]) not in rows}
        workdirs = {key: store.workdir(config, seed) for key, config in due.items()}
        counted = progress.Counted(len(due), sum(map(finished, workdirs.values())))

        def keep() -> str:
            """Writes the rows of what has ended. Returns a sentence."""
            ended = [key for key, run in workdirs.items() if finished(run)]
            for name, salt in ended:
                if (name, seed, salt) not in rows:
                    run = due[name, salt], workdirs[name, salt]
                    try:
                        rows[name, seed, salt] = calibration.read(name, seed, salt, settings, *run)
                    except ValueError as error:  # all of its trials are lost
                        failed[name, salt] = f"{error}"
            calibration.write_rows(path, rows.values())
            return counted(len(ended))

        if due:
            if why := store.begin([seed]):
                raise ValueError(f"The start failed: {why[seed]}")
            with progress.said(say, keep):
                why = store.train_all([(config, seed) for config in due.values()])
            say(keep())
            failed.update({list(due)[i]: text for i, text in why.items()})
            for name, salt in due:
                if (name, salt) in failed:
                    say(f"{name} {salt} failed: {failed[name, salt]}")

    train({("none", salt): config for salt, config in own.items()})
    if missing := [salt for salt in salts if ("none", seed, salt) not in rows]:
        why = failed["none", missing[0]].rstrip(".")
        raise ValueError(
            f"The start has no result of salt {missing[0]} ({why}): give the same command again if its run "
            "has not ended, and other --salts if it has."
        )

    if untried:
        if why := store.begin([seed]) or store.train(own[salts[0]], [seed]):
            raise ValueError(f"The start failed: {why[seed]}")
        compared = folder / "gradients" / here
        gradients = lambda child: {
            check: Check(*told)
            for check, told in store.gradients(first, child, compared / config_id(child)).items()
        }
        for row in refusals.tried(config, start, [evidence.groups(first)], gradients, dict(before)):
            before[row.name] = row
            refusals.write(file, here, before.values())
            say(f"{row.name}: {row.why or 'passes.'}")

    known = list(before.values())
    chosen = refusals.drawn(known, _REFUSED.value, _PASSED.value, rng_for(seed, "refusals"))
    if gone := [r.name for r in chosen if r.name not in by_name]:
        raise ValueError(f"{file} has {gone[0]}, which is no move of this start: name another --workdir.")
    train({(r.name, salt): changed(own[salt], by_name[r.name]) for salt in salts for r in chosen})
    noise, told = config.harness.noise, {salt: rows["none", seed, salt].success for salt in salts}
    gains = {
        row.name: [
            ended.success - told[salt] if (ended := rows.get((row.name, seed, salt))) else None
            for salt in salts
        ]
        for row in chosen
    }
    trained = [refusals.Trained(row, *refusals.judge(gains[row.name], noise)) for row in chosen]
    say(refusals.table(known, list(told.values()), trained, noise))


if __name__ == "__main__":
    command_line.start(run, resumes=True)
