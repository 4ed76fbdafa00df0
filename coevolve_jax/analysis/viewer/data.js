// The data of the page: packed JSON in the page itself or, where it is large, in files beside it.

const unpack = async (text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
};

const awaited = new Map(); // number of a part whose file is being read -> what takes its text
globalThis.coevolvePart = (number, text) => awaited.get(number)?.(text);

const partFromFile = (folder, number) =>
  new Promise((resolve, reject) => {
    const name = `part_${String(number).padStart(3, "0")}.js`;
    awaited.set(number, resolve);
    const script = h("script", { src: `${encodeURIComponent(folder)}/${name}` });
    script.onerror = () => reject(new Error(`${folder}/${name} is not beside this page: it must travel with it.`));
    document.head.append(script);
  });

// The trajectories of a view: columns to list them by, and each in full once it is asked for.
const trajectoryStore = (view, from) => {
  const columns = view.trajectories;
  const count = columns.step?.length ?? 0;
  const starts = view.part_starts;
  const parts = new Map();
  const part = (number) => {
    if (!parts.has(number)) {
      const element = from.getElementById(`part-${number}`);
      const text = element ? Promise.resolve(element.textContent) : partFromFile(view.part_folder, number);
      parts.set(number, text.then(unpack));
      parts.get(number).catch(() => parts.delete(number));
    }
    return parts.get(number);
  };
  const partOf = (index) => {
    let low = 0;
    for (let high = starts.length; high - low > 1; ) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= index) low = middle;
      else high = middle;
    }
    return low;
  };
  let texts = null; // lower case, of every trajectory, once someone searches
  return {
    count,
    columns,
    // Of a trajectory or, from `count` on, of what is behind a task.
    full: async (index) => {
      const number = partOf(index);
      return (await part(number)).rows[index - starts[number]];
    },
    // Lower-case texts of all trajectories; said(done, of) is called as they come.
    texts: async (said = () => {}) => {
      if (texts) return texts;
      const found = [];
      const last = count ? partOf(count - 1) + 1 : 0; // what comes after them is no trajectory
      for (let number = 0; number < last; number++) {
        found.push(...(await part(number)).rows.slice(0, count - starts[number]).map(searchText));
        said(number + 1, last);
      }
      texts = found;
      return texts;
    },
    find: (step, task, rollout) => {
      for (let i = 0; i < count; i++)
        if (columns.step[i] === step && columns.task[i] === task && columns.rollout[i] === rollout) return i;
      return -1;
    },
  };
};

const searchText = (row) =>
  [row.task_id, row.stop, ...row.queries, ...row.steps.flatMap((s) => [s.text, s.observation])]
    .join("\n")
    .toLowerCase();
