"""Times this repository's update step and generation against other libraries', interleaved in one run.

    make bench                                   every case against every library
    make bench BENCH="--case=small-even,small-ragged --peer=trl"

Each implementation has a process and a virtual environment of its own. All use the same random Qwen3 weights
and the same float32 data. They run one after the other, never at the same time. Each first tries several
settings (micro-batches above all); the comparison uses its fastest. `--shrink` tries the machinery on small
shapes.
"""

import dataclasses
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import reference
from absl import app, flags
from cases import CASES, Case, operations, random_data, useful_tokens, write
from protocol import Worker

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5  # absolute, of the loss: losses are of order 0.1 to 1

_CASE = flags.DEFINE_list("case", list(CASES), "Cases to run.")
_PEER = flags.DEFINE_list("peer", ["tunix", "trl"], "Libraries to compare with; none: only ours.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each implementation.")
_SHRINK = flags.DEFINE_boolean("shrink", False, "Small shapes, to try the machinery; the times mean nothing.")
_OUTPUT = flags.DEFINE_string("output", "runs/bench/results.json", "JSON file to append the results to.")

# Settings to try, by implementation, kind and vocabulary size. The shorter of two timed runs decides, or one
# that takes more than ENOUGH seconds.
ENOUGH = 10.0
_ROWS = lambda *pairs: [{"pack_length": length, "rows_per_microbatch": rows} for length, rows in pairs]
_MICRO = lambda *sizes: [{"micro": size} for size in sizes]  # padded sequences of a micro-batch
SETTINGS = {
    ("ours", "update", "small"): _ROWS((512, 2), (1024, 1), (2048, 1), (2176, 1)),
    ("ours", "update", "large"): [{**rows, "remat": True} for rows in _ROWS((2048, 1), (2176, 1))],
    ("tunix", "update", "small"): _MICRO(4, 8, 16, 32),
    ("tunix", "update", "large"): _MICRO(2, 4),
    ("trl", "update", "small"): _MICRO(4, 8, 16, 32),
    ("trl", "update", "large"): _MICRO(4),
    ("trl", "generate", "small"): [{}, {"cache_implementation": "static"}],
    ("trl", "generate", "large"): [{}, {"cache_implementation": "static"}],
}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """name: "ours" or a peer's. python: the interpreter of its virtual environment."""

    name: str
    python: Path

    def start(self, folder: Path, setting: dict, logs: Path) -> Worker:
        script = ROOT / "benchmarks" / f"worker_{self.name}.py"
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return Worker(
            self.python, script, {"folder": str(folder), "setting": setting}, logs / f"{self.name}.log", env
        )

    def settings(self, case: Case) -> list[dict]:
        tried = SETTINGS.get((self.name, case.kind, "large" if case.tied else "small"), [{}])
        return [setting for setting in tried if setting.get("micro", 1) <= case.rows]


def implementations() -> list[Implementation]:
    """Ours and the installed peers; it prints the missing ones."""
    found = [Implementation("ours", Path(sys.executable))]
    for name in filter(None, _PEER.value):
        folder = ROOT / ".bench" / name
        if (folder / ".installed").exists():
            found.append(Implementation(name, folder / "bin" / "python"))
        else:
            print(f"{name} is left out: {folder} holds none. `make bench` makes one where pip can.")
    return found


def matmul_rate(size: int = 2048) -> float:
    """Operations per second of one float32 product of two matrices on all cores."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    start = time.perf_counter()
    a @ a
    return 2 * size**3 / (time.perf_counter() - start)


def fastest(implementation: Implementation, case: Case, folder: Path, logs: Path) -> dict:
    """The setting with the shortest run; each first run compiles and does not count."""
    settings = implementation.settings(case)
    if len(settings) == 1:
        return settings[0]
    seconds = []
    for setting in settings:
        with implementation.start(folder, setting, logs) as worker:
            worker.ask("run")
            answer = worker.ask("run")
            runs = [answer["seconds"]]
            if runs[0] < ENOUGH:
                answer = worker.ask("run")
                runs.append(answer["seconds"])
        seconds.append(min(runs))
        print(
            f"  {case.name} {implementation.name:<6} {json.dumps(setting):<50} {seconds[-1]:8.2f} s "
            f"{answer['peak'] / 2**30:6.2f} GiB",
            flush=True,
        )
    return settings[int(np.argmin(seconds))]


def compare(case: Case, chosen: list[Implementation], folder: Path, logs: Path) -> dict:
    """Compares one case: first the results, then the times. Returns the entry of the results file."""
    write(case, folder)
    data = random_data(case, seed=3)
    settings = {i.name: fastest(i, case, folder, logs) for i in chosen}
    with ExitStack() as stack:
        workers = {i.name: stack.enter_context(i.start(folder, settings[i.name], logs)) for i in chosen}
        first = {name: worker.ask("run") for name, worker in workers.items()}
        agreement = check(case, folder, data, workers, first)
        rates, rounds = [matmul_rate() for _ in range(3)], []
        for _ in range(_REPEATS.value):
            rounds.append({name: worker.ask("run") for name, worker in workers.items()})
            rates.append(matmul_rate())
    rate, tokens = max(rates), useful_tokens(case, data)
    results = {}
    for name, worker in workers.items():
        seconds = [answers[name]["seconds"] for answers in rounds]
        results[name] = {
            **worker.about,
            "setting": settings[name],
            "seconds": seconds,
            "median": statistics.median(seconds),
            "tokens_per_second": tokens / statistics.median(seconds),
            "peak_bytes": rounds[-1][name]["peak"],
            "losses": [answers[name].get("loss") for answers in (first, *rounds)],
            **agreement[name],
        }
    return {
        "case": dataclasses.asdict(case),
        "useful_tokens": tokens,
        "operations": operations(case, data),
        "matmul_rate": rate,
        "floor_seconds": operations(case, data) / rate,
        "implementations": results,
    }


def check(case: Case, folder: Path, data: dict, workers: dict[str, Worker], first: dict) -> dict[str, dict]:
    """How far each implementation is from the float64 reference.

    Where the vocabulary makes the reference too slow, ours takes its place. Raises ValueError if a loss is
    off by more than TOLERANCE.
    """
    if case.kind == "generate":
        rows = min(4, case.rows)
        greedy = {name: np.asarray(worker.ask("greedy")["ids"])[:rows] for name, worker in workers.items()}
        return {
            name: {"greedy_share": reference.greedy_share(folder, data["prompts"][:rows], ids)}
            for name, ids in greedy.items()
        }
    small = not case.tied
    truth = reference.loss(folder, case, data) if small else first["ours"]["loss"]
    apart = {name: abs(answer["loss"] - truth) for name, answer in first.items()}
    wrong = {name: value for name, value in apart.items() if not value <= TOLERANCE}
    if wrong and not case.ragged:
        raise ValueError(
            f"{case.name}: the loss is {truth:.8f} and these differ by more than {TOLERANCE:g}: {wrong}."
        )
    return {
        name: {"loss_difference": value, "against": "float64 reference" if small else "ours"}
        for name, value in apart.items()
    }


def show(result: dict) -> None:
    """Prints a case as a table; "per token" is ours over the best peer's time per useful token."""
    case, found = result["case"], result["implementations"]
    print(
        f"\n{case['name']}: {result['useful_tokens']} useful tokens, floor {result['floor_seconds']:.2f} s "
        f"({result['operations'] / 1e9:.0f} GFLOP at {result['matmul_rate'] / 1e9:.0f} GFLOP/s)"
    )
    print(
        f"{'':<8}{'median s':>10}{'tokens/s':>11}{'of floor':>10}{'peak GiB':>10}  {'setting':<48} agreement"
    )
    for name, r in found.items():
        update = case["kind"] == "update"
        agreement = f"loss {r['loss_difference']:.1e}" if update else f"greedy {r['greedy_share']:.1%}"
        print(
            f"{name:<8}{r['median']:>10.2f}{r['tokens_per_second']:>11.0f}"
            f"{result['floor_seconds'] / r['median']:>10.1%}{r['peak_bytes'] / 2**30:>10.2f}"
            f"  {json.dumps(r['setting']):<48} {agreement}"
        )
    peers = [r["median"] for name, r in found.items() if name != "ours"]
    if peers:
        print(f"ours is {min(peers) / found['ours']['median']:.2f} x as fast as the fastest other")
    for name, r in found.items():
        versions = ", ".join(f"{library} {version}" for library, version in r["versions"].items())
        print(f"  {name} called {', '.join(r['calls'])} ({versions})")


def machine() -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),  # the same for every worker
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def append(path: Path, entry: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*entries, entry], indent=1) + "\n")


def main(_) -> None:
    unknown = set(_CASE.value) - set(CASES)
    if unknown:
        raise app.UsageError(f"--case names {sorted(unknown)}, but the cases are {list(CASES)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no stopped worker behind
    chosen, here = implementations(), machine()
    print(here, flush=True)
    for name in _CASE.value:
        case = CASES[name].shrunk() if _SHRINK.value else CASES[name]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            result = compare(case, chosen, Path(folder), Path(folder))
        append(
            Path(_OUTPUT.value),
            {
                "date": datetime.datetime.now().isoformat(timespec="seconds"),
                "machine": here,
                "shrunk": _SHRINK.value,
                **result,
            },
        )
        show(result)


if __name__ == "__main__":
    app.run(main)
