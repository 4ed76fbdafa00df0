"""Times this repository's update step and generation against other libraries', by turns in one run.

    make bench                                   every case against every library
    make bench BENCH="--case=small-even,small-ragged --peer=trl"

Each implementation has a process and a virtual environment of its own. All use the same random weights of a
Qwen3 or a Llama and the same float32 data. They run one after the other, never at the same time. Each first
tries several settings (micro-batches above all); the comparison uses its fastest. Settings with a dtype below
float32 are a row of their own, "reduced". Where a case names a trial, memory holds one implementation at a
time: a process ends before the next one starts. `--shrink` tries the machinery on small shapes.
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
# Absolute, of the loss: losses are of order 0.1 to 1.
TOLERANCE, REDUCED_TOLERANCE = 1e-5, 2e-3

_CASE = flags.DEFINE_list("case", list(CASES), "Cases to run.")
_PEER = flags.DEFINE_list(
    "peer", ["tunix", "trl", "llama_cpp"], "Libraries to compare with; none: only ours."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each implementation.")
_SHRINK = flags.DEFINE_boolean("shrink", False, "Small shapes, to try the machinery; the times mean nothing.")
_OUTPUT = flags.DEFINE_string("output", "runs/bench/results.json", "JSON file to append the results to.")

# Settings to try, by implementation, kind and model; those without any take no part. The shorter of two timed
# runs decides, or one that takes more than ENOUGH seconds.
ENOUGH = 10.0
_ROWS = lambda *pairs: [{"pack_length": length, "rows_per_microbatch": rows} for length, rows in pairs]
_MICRO = lambda *sizes: [{"micro": size} for size in sizes]  # padded sequences of a micro-batch
_ALSO_BFLOAT16 = lambda settings: settings + [{**setting, "dtype": "bfloat16"} for setting in settings]
_CACHES = [{}, {"cache_implementation": "static"}]
SETTINGS = {
    ("ours", "update", "small"): _ROWS((512, 2), (1024, 1), (2048, 1), (2176, 1)),
    ("ours", "update", "large"): [{**rows, "remat": True} for rows in _ROWS((2048, 1), (2176, 1))],
    ("tunix", "update", "small"): _MICRO(4, 8, 16, 32),
    ("tunix", "update", "large"): _MICRO(2, 4),
    ("trl", "update", "small"): _MICRO(4, 8, 16, 32),
    ("trl", "update", "large"): _MICRO(4),
    **{(name, "generate", size): [{}] for name in ("ours", "tunix") for size in ("small", "large")},
    **{("trl", "generate", size): _CACHES for size in ("small", "large")},
    ("ours", "update", "smollm2"): _ALSO_BFLOAT16(
        [
            {"pack_length": 2048, "rows_per_microbatch": 1, "prefix_sharing": True},
            # Any group of smollm2-agent fits into a row of 3456.
            {
                "pack_length": 3456,
                "rows_per_microbatch": 1,
                "pack_length_buckets": [2304, 2688, 3072],
                "prefix_sharing": True,
            },
        ]
    ),
    ("tunix", "update", "smollm2"): _MICRO(1, 2, 4),
    ("trl", "update", "smollm2"): _ALSO_BFLOAT16(_MICRO(4, 8, 16)),
    ("ours", "generate", "smollm2"): _ALSO_BFLOAT16([{}]),
    ("tunix", "generate", "smollm2"): [{}],
    ("trl", "generate", "smollm2"): _ALSO_BFLOAT16(_CACHES),
    ("llama_cpp", "generate", "smollm2"): [
        {"dtype": dtype} for dtype in ("float32", "bfloat16", "float16", "q8_0")
    ],
}
OURS = ("ours", "ours reduced")  # rows of the table


def dtype(setting: dict) -> str:
    return setting.get("dtype", "float32")


def bounds(settings: dict[str, dict]) -> dict[str, float]:
    """The tolerance of each implementation's loss."""
    return {
        name: TOLERANCE if dtype(setting) == "float32" else REDUCED_TOLERANCE
        for name, setting in settings.items()
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
            self.python,
            script,
            {"folder": str(folder), "setting": setting},
            logs / f"{self.name}-{dtype(setting)}.log",
            env,
        )

    def settings(self, case: Case) -> dict[str, list[dict]]:
        """Lists the settings to try, by row of the table: a float32 row, and a reduced one if it has any."""
        model = "smollm2" if case.family == "llama" else "large" if case.tied else "small"
        rows: dict[str, list[dict]] = {}
        for setting in SETTINGS.get((self.name, case.kind, model), []):
            if _SHRINK.value and "pack_length" in setting:
                lengths = [length // 8 for length in setting.get("pack_length_buckets", [])]
                setting = {**setting, "pack_length": setting["pack_length"] // 8}
                setting |= {"pack_length_buckets": lengths} if lengths else {}
            row = self.name if dtype(setting) == "float32" else f"{self.name} reduced"
            if setting.get("micro", 1) <= case.rows:
                rows.setdefault(row, []).append(setting)
        return rows


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


def matmul_rate(size: int) -> float:
    """Operations per second of one float32 product of two matrices on all cores."""
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    start = time.perf_counter()
    a @ a
    return 2 * size**3 / (time.perf_counter() - start)


def fastest(implementation: Implementation, tried: list[dict], case: Case, folder: Path, logs: Path) -> dict:
    """The setting with the shortest run; each first run compiles and does not count.

    Raises RuntimeError where every setting ends its worker.
    """
    seconds, errors = {}, []
    for i, setting in enumerate(tried):
        try:
            with implementation.start(folder, setting, logs) as worker:
                if len(tried) == 1:
                    return setting
                worker.ask("run")
                answer = worker.ask("run")
                runs = [answer["seconds"]]
                if runs[0] < ENOUGH:
                    answer = worker.ask("run")
                    runs.append(answer["seconds"])
        except RuntimeError as error:
            errors.append(error)
            print(f"  {case.name} {implementation.name:<9} {json.dumps(setting):<77} {reason(error)}")
            continue
        seconds[i] = min(runs)
        print(
            f"  {case.name} {implementation.name:<9} {json.dumps(setting):<77} {seconds[i]:8.2f} s "
            f"{answer['peak'] / 2**30:6.2f} GiB",
            flush=True,
        )
    if not seconds:
        raise errors[0]
    return tried[min(seconds, key=seconds.__getitem__)]


def reason(error: RuntimeError) -> str:
    """How a worker ended, and the last line of its log."""
    text = str(error).strip()
    return f"{text.split(';')[0]}: {text.splitlines()[-1]}"


def compare(case: Case, chosen: list[Implementation], folder: Path, logs: Path) -> dict:
    """Compares one case: first the results, then the times. Returns the entry of the results file."""
    trial = dataclasses.replace(case, rows=case.trial or case.rows)
    write(trial, folder)
    rows, settings, failed = {}, {}, {}
    for i in chosen:
        for name, tried in i.settings(trial).items():
            try:
                settings[name], rows[name] = fastest(i, tried, trial, folder, logs), i
            except RuntimeError as error:
                if i.name == "ours":
                    raise
                failed[name] = reason(error)
    write(case, folder)
    data = random_data(case, seed=3)
    # Where the vocabulary makes the reference too slow, ours takes its place.
    exact = case.kind == "update" and case.vocab_size < 100_000
    truth = reference.loss(folder, case, data) if exact else None
    size = 256 if _SHRINK.value else 2048
    rates, rounds = [matmul_rate(size) for _ in range(3)], [{} for _ in range(_REPEATS.value)]
    about, first, agreement = {}, {}, {}
    for names in [[name] for name in rows] if case.trial else [list(rows)]:
        try:
            with ExitStack() as stack:
                workers = {n: stack.enter_context(rows[n].start(folder, settings[n], logs)) for n in names}
                about |= {name: worker.about for name, worker in workers.items()}
                first |= {name: worker.ask("run") for name, worker in workers.items()}
                agreement |= check(case, folder, data, truth, workers, settings, first)
                for answers in rounds:
                    answers |= {name: worker.ask("run") for name, worker in workers.items()}
                    rates.append(matmul_rate(size))
        except RuntimeError as error:
            if not case.trial or rows[names[0]].name == "ours":
                raise
            failed[names[0]] = reason(error)
    if case.kind == "update":
        left = {name: setting for name, setting in settings.items() if name not in failed}
        for name, told in reference.updated(bounds(left), first, rounds[0]).items():
            if isinstance(told, float):
                agreement[name]["updated_loss_difference"] = told
            else:
                failed[name] = told
    rate, tokens = max(rates), useful_tokens(case, data)
    results = {}
    for name in rows:
        if name in failed:
            continue
        seconds = [answers[name]["seconds"] for answers in rounds]
        results[name] = {
            **about[name],
            "setting": settings[name],
            "dtype": dtype(settings[name]),
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
        "failed": failed,
    }


def check(
    case: Case,
    folder: Path,
    data: dict,
    truth: float | None,
    workers: dict[str, Worker],
    settings: dict,
    first: dict,
) -> dict[str, dict]:
    """How far each worker's implementation is from the float64 reference.

    truth: the loss by that reference. None: ours takes its place. first: answers of these workers, and of
    ours.

    Raises ValueError if a loss is off by more than its tolerance, or messages have another length.
    """
    if case.kind == "generate":
        short = {name: first[name]["tokens"] for name in workers}
        if set(short.values()) != {case.rows * case.completion}:
            raise ValueError(f"{case.name}: {case.rows} times {case.completion} tokens are due, not {short}.")
        rows = min(4, case.rows)
        greedy = {name: np.asarray(worker.ask("greedy")["ids"])[:rows] for name, worker in workers.items()}
        return {
            name: {"greedy_share": reference.greedy_share(folder, data["prompts"][:rows], ids)}
            for name, ids in greedy.items()
        }
    against = "ours" if truth is None else "float64 reference"
    truth = first["ours"]["loss"] if truth is None else truth
    apart = {name: abs(first[name]["loss"] - truth) for name in workers}
    bound = bounds(settings)
    wrong = {name: value for name, value in apart.items() if not value <= bound[name]}
    if wrong:
        raise ValueError(
            f"{case.name}: the loss is {truth:.8f}, and these differ by {wrong}, more than "
            f"{TOLERANCE:g} ({REDUCED_TOLERANCE:g} below float32)."
        )
    return {
        name: {
            "loss_difference": value,
            "tolerance": bound[name],
            "against": against,
        }
        for name, value in apart.items()
    }


def show(result: dict) -> None:
    """Prints a case as a table, and how many times as long as ours the others take."""
    case, found = result["case"], result["implementations"]
    print(
        f"\n{case['name']}: {result['useful_tokens']} useful tokens, floor {result['floor_seconds']:.2f} s "
        f"({result['operations'] / 1e9:.0f} GFLOP at {result['matmul_rate'] / 1e9:.0f} GFLOP/s)"
    )
    print(
        f"{'':<18}{'dtype':<10}{'median s':>10}{'tokens/s':>11}{'of floor':>10}{'peak GiB':>10}  "
        f"{'setting':<77} agreement"
    )
    for name, r in found.items():
        agreement = (
            f"loss {r['loss_difference']:.1e} of {r['tolerance']:g} from {r['against']}, after an update "
            f"{r['updated_loss_difference']:.1e} from ours"
            if case["kind"] == "update"
            else f"greedy {r['greedy_share']:.1%}"
        )
        print(
            f"{name:<18}{r['dtype']:<10}{r['median']:>10.2f}{r['tokens_per_second']:>11.0f}"
            f"{result['floor_seconds'] / r['median']:>10.1%}{r['peak_bytes'] / 2**30:>10.2f}"
            f"  {json.dumps(r['setting']):<77} {agreement}"
        )
    for name, why in result["failed"].items():
        print(f"{name:<18}failed: {why}")
    others = {name: r for name, r in found.items() if name not in OURS}
    for own in (name for name in OURS if name in found and others):
        times = [
            f"{name} ({r['dtype']}) {r['median'] / found[own]['median']:.2f}" for name, r in others.items()
        ]
        print(f"{own} ({found[own]['dtype']}) = 1: {', '.join(times)}")
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
