// How well the policy does: in training, on held-out tasks, and as it goes on.

const metric = (run, name) => run.metrics[name] ?? run.metrics.step.map(() => null);
const measured = (run, ...names) => names.some((name) => run.metrics[name]?.some(Number.isFinite));
const smoothing = (run) => Math.max(3, Math.round(run.metrics.step.length / 8));
const FRACTION = { format: percent, range: [0, 1] };

// Lines of metrics.jsonl over the steps: [[label, name, colour]].
const metricChart = (host, run, lines, more) =>
  chart(host, {
    x: run.metrics.step,
    series: lines.map(([label, name, colour]) => ({
      label,
      values: metric(run, name),
      colour,
      smooth: smoothing(run),
    })),
    sync: "steps",
    ...more,
  });

// Points with 95% intervals, side by side: [{label, colour, at: [x], estimates}] on one axis.
const estimateChart = (host, groups, more) => {
  const x = [...new Set(groups.flatMap((g) => g.at))].sort((a, b) => a - b);
  const series = groups.map((g) => {
    const found = new Map(g.at.map((at, i) => [at, g.estimates[i]]));
    const values = (name) => x.map((at) => found.get(at)?.[name] ?? null);
    const whiskers = g.whiskers || g.at.length < 3; // too few points for a band to be seen
    return { ...g, values: values("value"), low: values("low"), high: values("high"), points: true, whiskers };
  });
  return chart(host, { x, series, ...more });
};

const LEARNING = [
  {
    title: "Success in training",
    reading: "Share of rollouts that solve their task, and mean reward. Thin: steps; thick: moving average.",
    has: (run) => run.metrics.step.length,
    missing: "metrics.jsonl holds no step yet.",
    draw: (host, run) => {
      const same = metric(run, "success").every((v, i) => v === metric(run, "reward")[i]);
      const reward = [same ? "success, which is the reward" : "reward", "reward", "--forgetting"];
      metricChart(
        host,
        run,
        same ? [[reward[0], "success", "--boundary"]] : [reward, ["success", "success", "--boundary"]],
        FRACTION,
      );
    },
  },
  {
    title: "Held-out success",
    reading:
      "Tasks whose answers are never trained on. After one or two evaluations a line through a point is its 95% " +
      "interval over scenarios. From three on the curve has a band of them. Curves of weak tools have no interval.",
    has: (run) => run.held_out || run.evaluations.length,
    missing: "summary.json with the two held-out evaluations is written at the end of the run.",
    draw: (host, run) => {
      // A set has a colour, and each way to count it (with help, lost trials as failures, weak tools) a line of its own.
      const colours = ["--rare", "--random", "--forgetting", "--boundary", "--evaluation", "--other"];
      const setOf = (e) => e.name.replace("+help", "").split(": ")[0];
      const wayOf = (e) => [e.name.includes("+help"), ...e.name.split(": ").slice(1)].join();
      const sets = [...new Set(run.evaluations.map(setOf))];
      const ways = [...new Set(["false", ...run.evaluations.map(wayOf)])];
      const groups = run.evaluations.map((e) => ({
        label: e.name,
        colour: colours[sets.indexOf(setOf(e)) % colours.length],
        dash: DASHES[ways.indexOf(wayOf(e)) % DASHES.length],
        at: e.points.map((p) => p.step),
        estimates: e.points,
      }));
      const last = (run.metrics.step.at(-1) ?? 0) + 1;
      if (run.held_out && !groups.length)
        groups.push({
          label: "held-out",
          colour: "--rare",
          at: [0, last],
          estimates: [run.held_out.before, run.held_out.after],
          whiskers: true,
          dash: [4, 4],
        });
      estimateChart(host, groups, { ...FRACTION, xrange: [-0.03 * last, 1.03 * last] });
      if (run.tasks.some((t) => t.origin === "query"))
        host.append(h("p", { class: "note" }, "The queries are learned from without their answers."));
      const lost = run.evaluations.flatMap((e) =>
        e.points.filter((p) => p.lost).map((p) => `${e.name}, step ${p.step}: ${plain(p.lost)} of ${plain(p.asked)}`),
      );
      if (lost.length) host.append(h("p", { class: "note" }, `Lost trials, neither success nor failure: ${lost.join("; ")}.`));
    },
  },
  {
    title: "Held-out success by number of calls",
    reading: "Calls in the reference solution; lines are 95% intervals over scenarios.",
    has: (run) => run.held_out?.calls.length,
    missing: "summary.json with the two held-out evaluations is written at the end of the run.",
    draw: (host, run) => {
      const { calls, by_calls } = run.held_out;
      const groups = [
        ["before", "--initial", -0.12],
        ["after", "--boundary", 0.12],
      ].map(([when, colour, shift]) => ({
        label: when,
        colour,
        at: calls.map((n) => n + shift),
        estimates: by_calls[when],
        whiskers: true,
        line: false,
      }));
      estimateChart(host, groups, {
        ...FRACTION,
        xlabel: "calls in the reference solution",
        xrange: [calls[0] - 0.6, calls.at(-1) + 0.6],
        xformat: (v) => (Number.isInteger(v) ? String(v) : ""),
      });
    },
  },
  {
    title: "Success on initial and new tasks",
    reading: "Below the initial ones, the new tasks are the harder ones.",
    has: (run) => measured(run, "success_initial", "success_new"),
    missing: "metrics.jsonl holds no step yet.",
    draw: (host, run) =>
      metricChart(
        host,
        run,
        [
          ["initial tasks", "success_initial", "--initial"],
          ["new tasks", "success_new", "--random"],
        ],
        FRACTION,
      ),
  },
];
