// Charts by uPlot in the page's colours: lines with bands or whiskers, bars, stacked areas; a legend that shows values.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (name, alpha) => {
  const [r, g, b] = css(name)
    .match(/\w\w/g)
    .map((x) => parseInt(x, 16));
  return `rgba(${r},${g},${b},${alpha})`;
};

const drawn = new Set(); // charts on the page
const redrawCharts = () => drawn.forEach((chart) => chart.redraw());
const forgetCharts = () => {
  drawn.forEach((chart) => chart.destroy());
  drawn.clear();
};
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) if (contentRect.width) target.fit?.(contentRect.width);
});

const movingAverage = (values, window) => {
  const half = Math.floor(window / 2);
  const known = values.map((v, i) => (Number.isFinite(v) ? i : -1)).filter((i) => i >= 0);
  return values.map((_, i) => {
    if (!known.length || i < known[0] || i > known.at(-1)) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter(Number.isFinite);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
};

// Dashes of lines that share a colour, the first none: lengths of line and gap in pixels.
const DASHES = [undefined, [4, 4], [10, 4], [10, 3, 2, 3], [2, 3], [14, 8]];

// chart(host, {x, series, ...}): draws into host.
//   x: [T]. series: [{label, values [T], colour: CSS variable, low, high [T] (95% intervals), whiskers, points, line,
//   bars, area, smooth}]. smooth: thin as it is, thick as a moving average over so many points.
//   format: of values. range: of y. xlabel, ylabel: with units. height: pixels. xformat, mark: {x, label}, sync: group.
const chart = (
  host,
  { x, series, format = plain, range, xrange, xlabel = "GRPO step", ylabel, height = 210, mark, sync, xformat = plain },
) => {
  const shown = []; // uPlot's series: one of ours may need several
  const bands = [];
  const data = [x];
  const add = (values, options) => data.push(values) && shown.push(options);
  series.forEach((s) => {
    const colour = () => css(s.colour);
    const lone = s.values.filter(Number.isFinite).length < 2; // a line that would not be seen
    const points = { show: Boolean(s.points) || lone, size: 7, fill: colour, stroke: colour };
    if (s.low && !s.whiskers) {
      add(s.high, { stroke: "transparent", points: { show: false } });
      add(s.low, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [data.length - 2, data.length - 1], fill: () => faint(s.colour, 0.16) });
    }
    if (s.smooth) {
      add(s.values, { stroke: () => faint(s.colour, 0.35), width: 1, points: { show: false } });
      add(movingAverage(s.values, s.smooth), { stroke: colour, width: 2, spanGaps: true, points });
    } else if (s.bars) {
      add(s.values, {
        fill: () => css(s.colour),
        stroke: "transparent",
        width: 0,
        points: { show: false },
        paths: uPlot.paths.bars({ size: [0.9, 60], align: s.bars.align ?? 0 }),
      });
    } else if (s.area) {
      add(s.values, {
        fill: () => css(s.colour),
        stroke: colour,
        width: 0.5,
        points: { show: false },
        paths: s.area === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
      });
    } else {
      const line = s.line === false ? { paths: () => null } : {};
      add(s.values, { stroke: colour, width: 2, spanGaps: true, points, dash: s.dash, ...line });
    }
  });
  const legend = chartLegend(series, format);
  const whole = xrange ?? (x.length === 1 ? [x[0] - 1, x[0] + 1] : [x[0], x.at(-1)]);
  const axis = (more) => ({
    stroke: () => css("--soft"),
    font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif",
    labelSize: 16,
    labelGap: 0,
    grid: { stroke: () => css("--line"), width: 1 },
    ticks: { show: false },
    gap: 4,
    ...more,
  });
  const options = {
    width: Math.max(host.clientWidth, 200),
    height,
    padding: [10, 10, 0, 0],
    legend: { show: false },
    cursor: {
      sync: sync && { key: sync, setSeries: false },
      points: { size: 6 },
      y: false,
      drag: { x: true, y: false },
    },
    scales: {
      x: { time: false, range: (u, low, high) => (low === x[0] && high === x.at(-1) ? whole : [low, high]) }, // else zoomed
      y: {
        range: range ? () => range : (u, low, high) => uPlot.rangeNum(low, high === low ? low + 1 : high, 0.08, true),
      },
    },
    axes: [
      axis({
        size: 22,
        label: xlabel,
        grid: { show: false },
        values: (u, found) => found.map((v) => (v % 1 && xformat === plain ? String(+v.toFixed(2)) : xformat(v))),
        incrs: x.every(Number.isInteger)
          ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5]
          : undefined,
      }),
      axis({
        size: (u, values) => 14 + 6.4 * Math.max(2, ...(values ?? []).map((v) => v.length)),
        values: (u, found) => found.map((v) => format(v)),
        label: ylabel,
        space: height > 180 ? 34 : 24,
      }),
    ],
    series: [{}, ...shown],
    bands,
    hooks: {
      setCursor: [(u) => legend.say(u.cursor.idx)],
      draw: [(u) => whiskers(u, x, series), (u) => mark && verticalMark(u, mark)],
    },
  };
  const place = h("div", { class: "plot" });
  host.append(legend.node, place);
  const plot = new uPlot(options, data, place);
  host.fit = (width) => width !== plot.width && plot.setSize({ width, height });
  resized.observe(host);
  drawn.add(plot);
  return plot;
};

// A dashed line of its series, as a background.
const dashed = ({ colour, dash }) => {
  const ends = [];
  dash.forEach((length, i) => ends.push(length + (ends[i - 1] ?? 0)));
  const stops = ends.map((end, i) => `${i % 2 ? "transparent" : `var(${colour})`} ${ends[i - 1] ?? 0}px ${end}px`);
  return `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
};

const chartLegend = (series, format) => {
  const inOrder = series.some((s) => s.shown) ? series.toReversed() : series; // stacked ones are drawn from the top
  const entries = inOrder
    .filter((s) => s.label)
    .map((s) => {
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = `var(${s.colour})`;
      if (s.dash) {
        swatch.classList.add("dashed");
        swatch.style.background = dashed(s);
      }
      const value = h("span", { class: "value" });
      return { s, value, node: h("span", { class: "entry" }, swatch, s.label, value) };
    });
  const say = (index) =>
    entries.forEach(({ s, value }) => {
      const shown = (s.shown ?? s.values)[index];
      const spread =
        s.low && Number.isFinite(s.low[index]) ? ` (${format(s.low[index])} to ${format(s.high[index])})` : "";
      value.textContent =
        index === null || index === undefined || !Number.isFinite(shown) ? "" : ` ${format(shown)}${spread}`;
    });
  return {
    node: h(
      "div",
      { class: "legend" },
      entries.map((e) => e.node),
    ),
    say,
  };
};

// Draws 95% intervals as lines at their points.
const whiskers = (u, x, series) => {
  const { ctx } = u;
  const scale = devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.5 * scale;
  for (const s of series.filter((s) => s.whiskers && s.low)) {
    ctx.strokeStyle = css(s.colour);
    ctx.beginPath();
    s.low.forEach((low, i) => {
      if (!Number.isFinite(low)) return;
      const [at, top, bottom] = [
        u.valToPos(x[i], "x", true),
        u.valToPos(s.high[i], "y", true),
        u.valToPos(low, "y", true),
      ];
      ctx.moveTo(at, top);
      ctx.lineTo(at, bottom);
      for (const end of [top, bottom]) {
        ctx.moveTo(at - 3 * scale, end);
        ctx.lineTo(at + 3 * scale, end);
      }
    });
    ctx.stroke();
  }
  ctx.restore();
};

const verticalMark = (u, { x, label }) => {
  const { ctx, bbox } = u;
  const at = u.valToPos(x, "x", true);
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.fillText(label, at - 5 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
  ctx.restore();
};

// Series on top of each other: [{label, values, colour}] -> what `chart` draws, the largest sum first.
const stacked = (series, more) => {
  const sums = [];
  series.forEach((s, k) => sums.push(s.values.map((v, i) => (v ?? 0) + (k ? sums[k - 1][i] : 0))));
  return series.map((s, k) => ({ ...s, shown: s.values, values: sums[k], ...more })).reverse();
};

// Values as horizontal bars: [[label, value, text, colour]].
const barTable = (host, rows) => {
  const largest = Math.max(...rows.map((r) => r[1]), 1e-9);
  host.append(
    h(
      "div",
      { class: "bars" },
      rows.map(([label, value, text, colour = "--boundary"]) => {
        const bar = h("i", {});
        bar.style.width = `${(100 * value) / largest}%`;
        bar.style.background = `var(${colour})`;
        return [h("span", {}, label), h("span", { class: "track" }, bar), h("span", { class: "number" }, text)];
      }),
    ),
  );
};

// A panel is {title, reading, has(run), missing, draw(host, run), width}: a card with a chart and how to read it.
const panelCard = (panel, run) => {
  const card = h("figure", { class: `panel ${panel.width ?? ""}` }, h("figcaption", {}, h("h3", {}, panel.title)));
  if (panel.has(run)) {
    const host = h("div", { class: "chart", role: "img", "aria-label": panel.title });
    card.append(host, h("p", { class: "note" }, panel.reading));
    card.draw = () => panel.draw(host, run);
  } else card.append(h("p", { class: "missing" }, panel.missing));
  return card;
};
const panelSection = (title, panels, run) =>
  h(
    "section",
    { class: "group" },
    h("h2", {}, title),
    h(
      "div",
      { class: "grid" },
      panels.map((p) => panelCard(p, run)),
    ),
  );
