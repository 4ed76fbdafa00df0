"""Measures what a campaign's rules rest on: the noise between runs, and what each planted fault costs.

    python experiments/calibrate_harness.py --faults=none --seeds=0:8 --workdir=runs/faults --jobs=2
    python experiments/calibrate_harness.py --faults=all --seeds=0:4 --workdir=runs/faults --jobs=2
    python experiments/calibrate_harness.py --faults=none --seeds=0 --salts=0:32 --workdir=runs/luck --fresh

Each fault, seed and salt is an ordinary run of the start, without a campaign. The runs are in WORKDIR/store,
where experiments/harness_bench.py finds them if code, cores and --jobs are the same. WORKDIR/starts.csv has a
row for each that has ended. What has a row is not run again, so the same command goes on, also elsewhere from
this file alone.
"""

from pathlib import Path

from absl import flags

from coevolve_jax.config import command_line

_FAULTS = flags.DEFINE_list("faults", ["none"], "Of coevolve_jax/harness/bench.py; none: healthy; all: all.")
_SEEDS = flags.DEFINE_string("seeds", "0:4", "A range such as 0:4, or a list such as 0,3.")
_SALTS = flags.DEFINE_string("salts", "0", "Values of rollout.salt: other luck from the same start.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that this writes.")
_CONFIG = flags.DEFINE_string("config", "configs/bfcl_harness.py", "Config file of the healthy start.")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all runs.")
_FRESH = flags.DEFINE_bool("fresh", False, "Read each policy on fresh development tasks too.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
flags.mark_flags_as_required(["workdir"])


def run() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.comparison import plan, variations
    from coevolve_jax.comparison.cell_files import finished
    from coevolve_jax.harness import bench, calibration, launch, progress
    from coevolve_jax.harness.start import settled, without_harness
    from coevolve_jax.harness.store import Store

    folder, names = Path(_WORKDIR.value), _FAULTS.value
    if names == ["all"]:
        names = [name for name in bench.FAULTS if name != "none"]
    bench.check_names(_FAULTS.name, names, bench.FAULTS)
    configs.check_output("workdir", folder, folder=True)
    healthy = configs.load_file(_CONFIG.value)
    seeds, salts = plan.parse_seeds(_SEEDS.value), plan.parse_seeds(_SALTS.value, "salts")
    starting = {
        fault: settled(
            variations.with_values(configs.override(healthy, bench.FAULTS[fault].changes), _SET.value)
        )
        for fault in dict.fromkeys(["none", *names])
    }

    def config_of(fault: str, salt: int):
        return configs.override(without_harness(starting[fault]), {"rollout.salt": salt})

    path, failures, say = folder / "starts.csv", [], lambda text: print(text, flush=True)
    settings = " ".join([_CONFIG.value, *_SET.value])
    rows = calibration.read_rows(path, settings)
    if unread := [row for row in rows.values() if _FRESH.value and row.fresh is None]:
        raise ValueError(
            f"{path} has runs without --fresh, such as fault {unread[0].fault} of seed {unread[0].seed}: "
            "move that file away. The runs are kept in the store."
        )
    for fault in names:
        asked = [(seed, salt) for salt in salts for seed in seeds if (fault, seed, salt) not in rows]
        due = {(seed, salt): (config_of(fault, salt), seed) for seed, salt in asked}
        if not due:
            continue
        programs = launch.programs(config_of(fault, 0), folder / "store" / "compiled")
        store = Store(folder / "store", config_of(fault, 0), programs, _JOBS.value)
        done = lambda: sum(finished(store.workdir(*run)) for run in due.values())
        counted = progress.Counted(len(due), done())
        told = lambda: f"{fault}: {counted(done())}"
        with progress.said(say, told):
            begun = store.begin(list(dict.fromkeys(seed for seed, _ in due)))
            why = begun or store.train_all(list(due.values()))
        failures += [f"  {fault}: {text}" for text in why.values()]
        ended = {key: run for key, run in due.items() if finished(store.workdir(*run))}
        fresh = {}
        if _FRESH.value and ended:
            found = bench.fresh(store, folder / "fresh", list(ended.values()))
            fresh = {key: (own.solved, own.trials) for key, own in zip(ended, found, strict=True)}
        for (seed, salt), run in ended.items():
            own = fresh.get((seed, salt), (None, None))
            try:
                row = calibration.read(fault, seed, salt, settings, run[0], store.workdir(*run), own)
            except ValueError as error:
                failures.append(f"  {fault}: {error}")
            else:
                rows[fault, seed, salt] = row
        calibration.write_rows(path, rows.values())
        say(told())
    say(calibration.table(list(rows.values()), starting["none"].harness.noise))
    if failures:
        raise ValueError("\n".join(["Some runs failed; the same command tries them again:", *failures]))


if __name__ == "__main__":
    command_line.start(run, resumes=True)
