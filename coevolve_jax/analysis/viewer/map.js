// The map of D_t: tasks as points, close where leak control finds them similar; evaluation tasks as open squares.

const MAP_EDGE = 16; // pixels around the points
const REACH = 14; // pixels within which the pointer means a point

// taskMap(host, tasks, choose): mark(task, matches) draws with one task chosen; matches(task) is false for pale ones.
const taskMap = (host, tasks, choose) => {
  const canvas = h("canvas", { role: "img", "aria-label": "Map of the training set; the list holds the same tasks" });
  const tip = h("div", { class: "tip", hidden: true });
  host.append(canvas, tip);
  const span = (axis) => {
    const values = tasks.map((t) => t[axis]);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return high > low ? [low, high] : [low - 1, high + 1];
  };
  const [[left, right], [bottom, top]] = tasks.length
    ? [span("x"), span("y")]
    : [
        [0, 1],
        [0, 1],
      ];
  const byId = new Map(tasks.map((t) => [t.id, t]));
  let [width, height, chosen, matches] = [0, 0, null, () => true];
  const place = (t) => [
    MAP_EDGE + ((t.x - left) / (right - left)) * (width - 2 * MAP_EDGE),
    height - MAP_EDGE - ((t.y - bottom) / (top - bottom)) * (height - 2 * MAP_EDGE),
  ];
  const paint = () => {
    if (!width) return;
    const ctx = canvas.getContext("2d");
    ctx.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    const size = tasks.length > 2000 ? 2 : tasks.length > 400 ? 3 : 4;
    const line = (a, b, colour, dash) => {
      ctx.strokeStyle = css(colour);
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(...place(a));
      ctx.lineTo(...place(b));
      ctx.stroke();
      ctx.setLineDash([]);
    };
    const hues = new Map();
    for (const task of [...tasks].sort((a, b) => matches(a) - matches(b))) {
      const name = colourOf(task.origin);
      if (!hues.has(name)) hues.set(name, css(name));
      const [x, y] = place(task);
      ctx.globalAlpha = !matches(task) ? 0.12 : task.origin === "evaluation" ? 0.6 : 0.9;
      ctx.strokeStyle = ctx.fillStyle = hues.get(name);
      ctx.lineWidth = 1.3;
      ctx.beginPath();
      if (task.origin === "evaluation") {
        ctx.rect(x - size + 0.5, y - size + 0.5, 2 * size - 1, 2 * size - 1);
        ctx.stroke();
      } else {
        ctx.arc(x, y, size, 0, 7);
        ctx.fill();
      }
    }
    ctx.globalAlpha = 1;
    if (!chosen) return;
    ctx.lineWidth = 1.5;
    for (let task = chosen, parent; (parent = byId.get(task.lineage.parent)) && parent !== task; task = parent)
      line(task, parent, "--ink", []);
    const nearest = byId.get(chosen.lineage.nearest);
    if (nearest) line(chosen, nearest, "--bad", [4, 3]);
    ctx.strokeStyle = css("--ink");
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.arc(...place(chosen), size + 4, 0, 7);
    ctx.stroke();
  };
  const near = (event) => {
    const { left: x0, top: y0 } = canvas.getBoundingClientRect();
    let [best, distance] = [null, REACH];
    for (const task of tasks) {
      const [x, y] = place(task);
      const d = Math.hypot(x - event.clientX + x0, y - event.clientY + y0);
      if (d < distance && matches(task)) [best, distance] = [task, d];
    }
    return best;
  };
  canvas.addEventListener("pointermove", (event) => {
    const task = near(event);
    tip.hidden = !task;
    canvas.style.cursor = task ? "pointer" : "default";
    if (!task) return;
    const [x, y] = place(task);
    tip.replaceChildren(h("b", {}, task.id), ` ${task.origin} · `, (task.turns[0]?.query ?? "").slice(0, 110));
    tip.style.left = `${Math.min(x, width - 250)}px`;
    tip.style.top = `${y > height / 2 ? y - 76 : y + 12}px`;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("click", (event) => {
    const task = near(event);
    if (task) choose(task);
  });
  host.fit = () => {
    [width, height] = [host.clientWidth, host.clientHeight];
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    paint();
  };
  resized.observe(host);
  return {
    redraw: paint,
    mark: (task, found) => {
      [chosen, matches] = [task, found];
      paint();
    },
  };
};
