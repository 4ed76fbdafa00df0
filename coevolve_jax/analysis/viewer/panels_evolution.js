// How the training set grows: signals, what they asked for, and what became of it.

const SIGNALS = ["forgetting", "boundary", "rare"];
const BINS = 120; // bars at most: a longer run is averaged

const binned = (run, values) => {
  const size = Math.ceil(run.metrics.step.length / BINS);
  const starts = run.metrics.step.map((_, i) => i).filter((i) => i % size === 0);
  const mean = (part) => part.reduce((a, b) => a + (b ?? 0), 0) / part.length;
  return {
    x: starts.map((i) => run.metrics.step[i]),
    values: values.map((v) => starts.map((i) => mean(v.slice(i, i + size)))),
  };
};

// Kinds of signals, those of the paper first. What else the strategy counts is no signal.
const signalNames = (run) => {
  const found = Object.keys(run.metrics)
    .filter((n) => n.startsWith("signals/"))
    .map((n) => n.slice(8))
    .filter((s) => SIGNALS.includes(s) || run.signal_kinds.includes(s));
  return [...SIGNALS.filter((s) => found.includes(s)), ...found.filter((s) => !SIGNALS.includes(s))];
};

// A task with a gain. The scores of a held-out query are not told.
const visitedTwice = (task) => task.visits > 1 && taskGain(task) !== null;

const EVOLUTION = [
  {
    title: "Weakness signals",
    reading: "Signals per step, stacked: fewer over time means steadier behaviour on the tasks at hand.",
    has: (run) => signalNames(run).some((s) => metric(run, `signals/${s}`).some((n) => n > 0)),
    missing: "No signal has fired.",
    draw: (host, run) => {
      const names = signalNames(run);
      const { x, values } = binned(
        run,
        names.map((s) => metric(run, `signals/${s}`)),
      );
      const series = names.map((label, k) => ({ label, values: values[k], colour: colourOf(label) }));
      chart(host, {
        x,
        series: stacked(series, { bars: {} }),
        sync: "steps",
        range: [0, 1.08 * Math.max(...stacked(series)[0].values, 1)],
        xrange: [x[0] - 0.7, x.at(-1) + 0.7],
      });
    },
  },
  {
    title: "Growth of the training set",
    reading: "Tasks in D_t by what asked for them. Each step up is an evolution.",
    has: (run) => run.tasks.length,
    missing: "tasks.jsonl is not there yet.",
    draw: (host, run) => {
      const from = (t) => (t.joined === null ? 0 : t.joined + 1); // D_0 is there before step 0
      const last = Math.max(...run.metrics.step.slice(-1), ...run.tasks.map(from)) + 1; // what the last one added is seen
      const x = Array.from({ length: last + 1 }, (_, i) => i);
      const origins = originsOf(run.tasks);
      const series = origins.map((label) => {
        const born = new Map();
        run.tasks
          .filter((t) => t.origin === label)
          .forEach((t) => born.set(from(t), (born.get(from(t)) ?? 0) + 1));
        let sum = 0;
        return { label, values: x.map((step) => (sum += born.get(step) ?? 0)), colour: colourOf(label) };
      });
      chart(host, {
        x,
        series: stacked(series, { area: "steps" }),
        range: [0, 1.05 * run.tasks.length],
        ylabel: "tasks",
        sync: "steps",
      });
    },
  },
  {
    title: "Validation pass rate",
    reading: "Share of proposed tasks that ran well in a fresh environment; a point is an evolution.",
    has: (run) => measured(run, "evolution/pass_rate"),
    missing: "The training set has not evolved.",
    draw: (host, run) =>
      chart(host, {
        x: run.metrics.step,
        series: [{ label: "pass rate", values: metric(run, "evolution/pass_rate"), colour: "--rare", points: true }],
        sync: "steps",
        ...FRACTION,
      }),
  },
  {
    title: "Similarity to evaluation tasks",
    reading:
      "How near each task of D_t comes to being refused as a leak: its cosine to the nearest evaluation task, over the threshold of the measure that comes closest. Left means that less of the evaluation leaks.",
    has: (run) => run.tasks.length && Object.keys(run.leak_thresholds).length,
    missing: "tasks.jsonl is not there yet, or the run has no leak control.",
    draw: (host, run) => {
      const x = Array.from({ length: 44 }, (_, i) => i / 40);
      const count = (old) => {
        const bins = x.map(() => 0);
        run.tasks
          .filter((t) => (t.origin === "initial") === old && t.leak !== null)
          .forEach((t) => bins[Math.min(43, Math.floor(40 * t.leak))]++);
        return bins;
      };
      const series = [
        { label: "initial", values: count(true), colour: "--initial" },
        { label: "new", values: count(false), colour: "--random" },
      ];
      const sums = stacked(series, { bars: { align: 1 } });
      const thresholds = Object.entries(run.leak_thresholds).map(([name, value]) => `${name} ${value}`);
      chart(host, {
        x,
        series: sums,
        xrange: [0, 1.1],
        range: [0, 1.1 * Math.max(...sums[0].values, 1)],
        ylabel: "tasks",
        xlabel: `cosine / threshold (${thresholds.join(", ")})`,
        mark: { x: 1, label: "refused from here" },
      });
    },
  },
  {
    title: "Gain by what asked for the task",
    reading: "Mean reward at a task's last visit less that at its first, mean over the tasks visited twice or more.",
    has: (run) => run.tasks.some(visitedTwice),
    missing: "No task has been visited twice.",
    draw: (host, run) => {
      const rows = originsOf(run.tasks).map((origin) => {
        const gains = run.tasks.filter((t) => t.origin === origin && visitedTwice(t)).map(taskGain);
        return { origin, n: gains.length, mean: gains.reduce((a, b) => a + b, 0) / gains.length };
      }).filter((row) => row.n);
      barTable(
        host,
        rows.map(({ origin, n, mean }) => [
          `${origin}, ${n} ${n === 1 ? "task" : "tasks"}`,
          Math.max(0, mean),
          `${points(mean)} points`,
          colourOf(origin),
        ]),
      );
    },
  },
  {
    title: "What became of the proposed tasks",
    reading:
      "Proposed are those added and those refused. Passed execution: the whole sequence reproduces; in part: its first turns do. Leaks and duplicates are refused after it.",
    has: (run) => run.fate.some(([, n]) => n),
    missing: "No task has been proposed.",
    draw: (host, run) =>
      barTable(
        host,
        run.fate.map(([name, n]) => [
          name.replaceAll("_", " "),
          n,
          plain(n),
          /^(refused|not proposed)/.test(name) ? "--forgetting" : "--rare",
        ]),
      ),
  },
];
