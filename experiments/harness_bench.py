"""Measures campaigns on planted faults: is the right lever found, and is the fault mended?

    python experiments/harness_bench.py --faults=slow,leash,short --arms=evolving,fixed,placebo \\
        --campaign_seeds=0:2 --workdir=runs/faults --jobs=2

Each fault, arm and seed is a campaign in WORKDIR/campaigns. They share their runs in WORKDIR/store.
campaigns.csv has a row for each that has ended, of this command or an earlier one with the same settings. The
same command goes on.
"""

import datetime
import shlex
import sys
from pathlib import Path

from absl import flags

from coevolve_jax.config import command_line

_FAULTS = flags.DEFINE_list("faults", ["slow"], "Of coevolve_jax/harness/bench.py.")
_ARMS = flags.DEFINE_list("arms", ["evolving", "fixed", "placebo"], "Of coevolve_jax/harness/bench.py.")
_SEEDS = flags.DEFINE_string("campaign_seeds", "0:2", "A range such as 0:2, or a list such as 0,3.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that this writes.")
_CONFIG = flags.DEFINE_string("config", "configs/bfcl_harness.py", "Config file with the argument fault.")
_VERSIONS = flags.DEFINE_integer("versions", 6, "Versions that a campaign trains.", lower_bound=1)
_FRESH = flags.DEFINE_string("fresh_seeds", "100:102", "Seeds of the runs that the gains are read on.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
flags.mark_flags_as_required(["workdir"])


def run() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.comparison import cells, plan
    from coevolve_jax.harness import bench, campaign, final, launch, loop
    from coevolve_jax.harness.start import settled, without_harness
    from coevolve_jax.harness.store import Store, other_cores
    from coevolve_jax.models import hf_io

    folder, fresh = Path(_WORKDIR.value), plan.parse_seeds(_FRESH.value, "fresh_seeds")
    configs.check_output("workdir", folder, folder=True)
    seeds = plan.parse_seeds(_SEEDS.value, "campaign_seeds")
    final.check_fresh("fresh_seeds", fresh, seeds)
    for flag, known in ((_FAULTS, bench.FAULTS), (_ARMS, bench.ARMS)):
        bench.check_names(flag.name, flag.value, known)
    cores = bench.cores_of_campaigns(folder / "campaigns", _JOBS.value)
    told = {
        "command": shlex.join(["python", "experiments/harness_bench.py", *sys.argv[1:]]),
        "machine": cells.machine(),
        "cores": cores,
        "commit": cells.commit(),
        "date": f"{datetime.date.today()}",
    }
    path = folder / "campaigns.csv"
    settings = f"{_CONFIG.value} --versions={_VERSIONS.value} --fresh_seeds={','.join(map(str, fresh))}"
    bench.read_rows(path, settings)  # refuses a file of other settings before anything is run
    compiled, say = folder / "store" / "compiled", lambda text: print(text, flush=True)
    store_of = lambda start: Store(
        folder / "store", start, launch.programs(start, compiled), _JOBS.value, cores
    )
    answers = folder / "readings"
    read = lambda name, config, start: bench.success(store_of(start), answers, name, config, fresh)
    # All are checked before anything is run: a campaign's folder takes no other config later.
    starting = {
        fault: settled(configs.load_file(_CONFIG.value, f"fault={fault}"))
        for fault in dict.fromkeys(["none", *_FAULTS.value])
    }
    healthy = without_harness(starting["none"])
    hf_io.load_config(healthy.model)
    if note := other_cores(cores, _JOBS.value):
        say(note)
    for fault in _FAULTS.value:
        for seed in seeds:
            for arm in _ARMS.value:
                own = {"seed": seed, "seeds": (seed,), "versions": _VERSIONS.value, **bench.ARMS[arm]}
                values = {f"harness.{key}": value for key, value in own.items()}
                config = configs.override(starting[fault], values)
                start, name = without_harness(config), f"{fault}_{arm}_{seed}"
                asked = {"config": configs.plain(config), "told": {**told, "jobs": _JOBS.value}}
                begun = campaign.begin(folder / "campaigns" / name, asked)
                with begun.claimed():
                    say(f"{fault}, {arm}, seed {seed}:")
                    evolution = loop.Evolution(begun, config, store_of(start), say)
                    evolution.run()
                known = evolution.versions
                verdicts = {v: known.verdict(v) for v in begun.versions()[1:]}
                proposals = {v: known.proposal(v) for v in verdicts}
                trained = [v for v in verdicts if known.row(v)]
                number = {v: n for n, v in enumerate(trained, 1)}
                reached = {
                    n: read(f"{name}_{v}", known.config(v), start)
                    for v, n in number.items()
                    if verdicts[v].kind == "promoted"
                }
                moves = [(proposals[v].lever, proposals[v].move, verdict) for v, verdict in verdicts.items()]
                faulty = read(f"{fault}_start", start, start)
                whole = read("healthy", healthy, healthy)
                selected = number.get(begun.selected(), 0)
                row = bench.row(
                    fault, arm, seed, settings, moves, reached, selected, faulty, whole, len(trained) + 1
                )
                rows = bench.read_rows(path, settings)  # another command may have written some meanwhile
                bench.write_rows(path, [*(rows | {row[:3]: row}).values()])
                say(f"  {dict(row._asdict())}")


if __name__ == "__main__":
    command_line.start(run, resumes=True)
