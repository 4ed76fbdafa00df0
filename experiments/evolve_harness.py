"""Evolves the training harness beside the policy: a campaign (EvoTrainer, arXiv 2606.03108).

    python experiments/evolve_harness.py --config=configs/bfcl_harness.py --workdir=runs/harness --jobs=2

A campaign is a tree of versions. A version is its parent's config with one lever moved, trained as ordinary
runs, and promoted only if code says so. The same command goes on after a kill; on SIGTERM or SIGUSR1 the runs
save and it exits with status 75. docs/harness.md explains all of it.

    --gate=design     a person decides before each version is trained: --approve=v003, or --refuse=v003
    --gate=verdict    a person decides before each verdict counts
    --final           trains start and selected harness on fresh seeds, and reads the test, once
    --reference=...   with --final: so is this harness, which the selected one is compared with
    --replay          judges everything again from the files; exit status 1 where anything differs
"""

import datetime
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from coevolve_jax.config import command_line

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file of the start, e.g. configs/bfcl_harness.py.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the campaign.")
_STORE = flags.DEFINE_string(
    "store",
    None,
    "Folder of the runs, which campaigns may share; none: the campaign's own, at first WORKDIR/store.",
)
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side; they share the cores evenly.", lower_bound=1)
_VERSIONS = flags.DEFINE_integer("versions", None, "config.harness.versions: versions to train.")
_SEEDS = flags.DEFINE_string(
    "seeds", None, "config.harness.seeds: a range such as 0:2, or a list such as 0,3."
)
_PROPOSER = flags.DEFINE_string(
    "proposer", None, "config.harness.proposer: scripted, llm, placebo, score, search."
)
_DIAGNOSTICS = flags.DEFINE_enum("diagnostics", None, ["evolving", "fixed"], "config.harness.diagnostics.")
_AUDIT = flags.DEFINE_enum("audit", None, ["replay", "none"], "config.harness.audit.")
_GATE = flags.DEFINE_enum("gate", "none", ["none", "design", "verdict"], "Where a person decides.")
_APPROVE = flags.DEFINE_string("approve", None, "A version that waits for a person.")
_REFUSE = flags.DEFINE_string("refuse", None, "A version that waits for a person.")
_WHY = flags.DEFINE_string("why", "", "The person's reason.")
_REPLAY = flags.DEFINE_bool("replay", False, "Judge everything again from the files, and write nothing.")
_FINAL = flags.DEFINE_bool(
    "final", False, "At the end: train start and selected harness anew, read the test, once."
)
_FINAL_SEEDS = flags.DEFINE_string("final_seeds", "100:108", "Fresh seeds of --final.")
_REFERENCE = flags.DEFINE_multi_string(
    "reference",
    [],
    "With --final: also train this harness, and compare the selected one with it. A config file, or the "
    "folder of another campaign. May be given several times.",
)
_REOPEN = flags.DEFINE_bool("reopen", False, "Read the test once more; the page says so.")
flags.mark_flags_as_required(["config", "workdir"])


def main() -> int:
    from coevolve_jax.harness.loop import Waiting

    try:
        return run()
    except Waiting as waiting:
        print(waiting, file=sys.stderr)
        return 0


def check_flags() -> None:
    """Raises ValueError for a flag that another one contradicts, or that does nothing without another."""
    told = lambda flag, value: f"--{flag.name}" if value is True else f"--{flag.name}={value}"
    decided = [told(flag, flag.value) for flag in (_APPROVE, _REFUSE) if flag.value]
    final = [told(flag, True) for flag in (_FINAL, _REOPEN) if flag.value]
    if len(decided) > 1:
        raise ValueError(f"{decided[0]} and {decided[1]} contradict each other: give one of them.")
    if _REPLAY.value and (others := [*decided, *final]):
        raise ValueError(f"--replay writes nothing, so {others[0]} has no effect with it: give one of them.")
    if _WHY.value and not decided:
        raise ValueError(f"{told(_WHY, _WHY.value)} has no effect without --approve or --refuse: give one.")
    alone = [*(told(_REFERENCE, given) for given in _REFERENCE.value), *final]
    if alone and not _FINAL.value:
        raise ValueError(f"{alone[0]} has no effect without --final: give both.")


def run() -> int:
    check_flags()
    from coevolve_jax import config as configs
    from coevolve_jax import shipped
    from coevolve_jax.analysis import report
    from coevolve_jax.comparison import cells, plan
    from coevolve_jax.harness import campaign, claim, final, launch, loop, parts, references, start, summary
    from coevolve_jax.harness.store import Store, cores_of_a_run, other_cores
    from coevolve_jax.models import hf_io

    fresh = plan.parse_seeds(_FINAL_SEEDS.value, "final_seeds")
    given = {
        "versions": _VERSIONS.value,
        "seeds": None if _SEEDS.value is None else tuple(plan.parse_seeds(_SEEDS.value)),
        "proposer": _PROPOSER.value,
        "diagnostics": _DIAGNOSTICS.value,
        "audit": _AUDIT.value,
    }
    changes = {f"harness.{name}": value for name, value in given.items() if value is not None}
    config, folder = configs.override(_CONFIG.value, changes), Path(_WORKDIR.value)
    # A campaign's folder takes no other config later: what can be checked is checked before it is made.
    configs.check_output("workdir", folder, folder=True)
    store_folder = Path(_STORE.value or campaign.Campaign(folder).store() or folder / "store")
    if not _REPLAY.value:
        configs.check_output("store", store_folder, folder=True)
    note = start.shared(config, config_flags.get_override_values(flags.FLAGS["config"]))
    config = start.settled(config)
    if _FINAL.value:
        final.check_fresh("final_seeds", fresh, config.harness.seeds)
    if not (folder / "campaign.json").exists():
        if _REPLAY.value or _APPROVE.value or _REFUSE.value:
            raise ValueError(f"--workdir={folder} holds no campaign.json: name the folder of a campaign.")
        hf_io.load_config(config.model)
        parts.proposer_of(config)
        if note:
            print(note, flush=True)
    told = {
        "command": f"{shipped.command('harness')} {shlex.join(sys.argv[1:])}",
        "machine": cells.machine(),
        "cores": cores_of_a_run(_JOBS.value),
        "commit": cells.commit(),
        "date": f"{datetime.date.today()}",
    }
    asked = {"config": configs.plain(config), "told": {**told, "jobs": _JOBS.value}}
    found = campaign.begin(folder, asked)
    with found.claimed():
        first = start.without_harness(config)
        programs = launch.programs(first, store_folder / "compiled")
        say = lambda text: print(text, flush=True)
        began = found.plan()["told"].get("cores", told["cores"])
        if note := other_cores(began, _JOBS.value):
            say(note)
        store = Store(store_folder, first, programs, _JOBS.value, began)
        others = {given: references.changes(given, config, store) for given in _REFERENCE.value}
        page = lambda: report.write_report(folder)
        evolution = loop.Evolution(found, config, store, say, page)
        if _REPLAY.value:
            differences = [*evolution.replay(), *final.differences(evolution)]
            print("\n".join(differences) or "Everything is as the runs give it.")
            return 1 if differences else 0
        if version := _APPROVE.value or _REFUSE.value:
            evolution.decide(version, bool(_APPROVE.value), _WHY.value)
        try:
            evolution.run(_GATE.value)
        finally:
            page()  # also where a person is waited for, or a file was changed
        print(summary.table(evolution))
        if _FINAL.value:
            final.open_test(evolution, fresh, told, _REOPEN.value, others)
            final.read(evolution, fresh)
            page()
            print(claim.table(final.result_of(folder)))
    return 0


if __name__ == "__main__":
    command_line.start(main, resumes=True)
