"use strict";
(() => {
  // Names of a trace may have control characters and marks that change the order of text.
  const hidden = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;
  const visible = (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  const found = JSON.parse(document.getElementById("diagnosis").textContent,
    (key, value) => typeof value === "string" ? value.replace(hidden, visible) : value);
  const main = document.getElementById("diagnose");
  const phases = JSON.parse(document.getElementById("colours").textContent);
  const COLOURS = { compute: phases.train, sampling: phases.rollout, sync: phases.sync, reward: phases.reward,
    communication: 1, slow_rank: 4, wait: 4, copy: 8, host: 7, imbalance: 10, idle_trainers: 11, idle_samplers: 11 };
  const DASHED = { host: "3 2", copy: "6 2", imbalance: "1 2", idle_trainers: "2 4", idle_samplers: "2 4" };
  const SVG = "http://www.w3.org/2000/svg";

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function shape(name, attributes, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text && name === "text") made.textContent = text;
    if (text && name !== "text") made.append(shape("title", {}), "");
    if (text && name !== "text") made.firstChild.textContent = text;
    return made;
  }
  function seconds(value) {
    if (value === null || value === undefined) return "";
    const rounded = Math.round(value);
    if (value >= 100) return `${Math.floor(rounded / 60)}m${String(rounded % 60).padStart(2, "0")}s`;
    return value > 0 && value < 0.1 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
  }
  function bytes(value) {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
    return `${value} B`;
  }
  const plain = (value) => value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(3)));

  function table(head, rows) {
    const line = (cells, kind) => element("tr", {}, ...cells.map((text, i) =>
      element(kind === "th" || i === 0 ? "th" : "td",
        { ...(kind === "th" ? { scope: "col" } : i === 0 ? { scope: "row" } : {}), ...(i ? { class: "num" } : {}) }, text)));
    return element("table", {}, element("thead", {}, line(head, "th")),
      element("tbody", {}, ...rows.map((row) => line(row, "td"))));
  }
  function section(name, about, ...children) {
    main.append(element("section", {}, element("h2", {}, name),
      ...(about ? [element("p", { class: "note" }, about)] : []), ...children));
  }
  const below = (rows) => element("details", { class: "values" }, element("summary", {}, "values"), rows);
  const wide = (rows) => element("div", { class: "wide" }, rows);

  function block(cause, x, y, width, height, text) {
    return shape("rect", { class: `f${COLOURS[cause] ?? 6}`, x: x.toFixed(2), y, width: Math.max(width, 0.3).toFixed(2),
      height, ...(DASHED[cause] ? { "fill-opacity": 0.45, class: `f${COLOURS[cause]} l${COLOURS[cause]}`,
        "stroke-dasharray": DASHED[cause], "stroke-width": 0.7 } : {}) }, text);
  }
  function tiles() {
    const rows = [["time of a step", seconds(found.step_s), `mean of ${found.steps.length} steps`]];
    if (found.ratio !== null) rows.push(["computation / communication", plain(found.ratio), "in the phase train"]);
    if (found.slow_down !== null)
      rows.push(["profiler", `${plain(found.slow_down)} x`, "time of a step with it / without it"]);
    const first = found.costs[0];
    if (first) rows.push(["largest cost", `${Math.round(first.share * 100)} %`, first.title]);
    main.append(element("section", { class: "tiles" }, ...rows.map(([name, value, more]) =>
      element("div", { class: "tile" }, element("span", {}, name), element("b", {}, value), element("small", {}, more)))));
  }
  function costs() {
    section("The three largest costs", "", element("ol", { class: "costs" }, ...found.costs.slice(0, 3).map((cost) =>
      element("li", {}, element("b", {}, `${Math.round(cost.share * 100)} % of a step (${seconds(cost.seconds)}): ${cost.title}`),
        ...(cost.detail ? [element("p", { class: "detail" }, cost.detail)] : []), element("p", {}, cost.change)))));
  }
  function waterfall() {
    let at = 0;
    const rows = found.costs.filter((cost) => cost.share >= 0.002).map((cost) => {
      const bar = shape("svg", { viewBox: "0 0 1000 12", preserveAspectRatio: "none", "aria-hidden": "true" });
      bar.append(shape("rect", { class: "back", width: 1000, height: 12 }),
        block(cost.cause, at * 1000, 0, cost.share * 1000, 12));
      at += cost.share;
      return element("div", {}, element("p", {}, `${seconds(cost.seconds)} (${(cost.share * 100).toFixed(1)} %) ${cost.title}`), bar);
    });
    section("A step, by cause", "The mean of all ranks and steps; the causes add up to the time of a step.",
      element("figure", { class: "fall" }, ...rows, below(table(["cause", "seconds", "share"], found.costs.map((cost) =>
        [cost.title, seconds(cost.seconds), `${(cost.share * 100).toFixed(1)} %`])))));
  }
  function tables() {
    if (found.collectives.length) section("Collectives",
      "Of a rank in a step, the mean. wait: until the last rank arrives; GB/s is of the rest.",
      wide(table(["collective", "number", "bytes", "time", "wait", "GB/s"], found.collectives.map((one) =>
        [one.name, plain(one.num), bytes(Math.round(one.bytes)), seconds(one.seconds), seconds(one.wait_s), plain(one.gb_per_s)]))));
    section("Phases", "In a step, the mean. wall = compute + exposed + copy + host + idle. exposed: communication without computation; " +
      "overlapped: communication during computation; host: in a command, without an operation; idle: no command.",
      wide(table(["phase", "rank", "wall", "compute", "exposed", "overlapped", "copy", "host", "idle", "compute / comm."],
        found.phases.map((one) => [one.phase, String(one.rank), ...["wall", "compute", "exposed", "overlapped", "copy",
          "host", "idle"].map((key) => seconds(one[key])), plain(one.ratio)]))));
    const stages = ["cast", "load", "verify", "wait", "latency"].filter((stage) => `${stage}_s` in found.sync);
    if (stages.length) section("Weight sync by stage", `${bytes(Math.round(found.sync.num_bytes || 0))} in each sync, ` +
      `${plain(found.sync.gb_per_s || 0)} GB/s. latency: the phase sync of the controller.`,
      wide(table(["stage", "seconds of the slowest rank"], stages.map((stage) => [stage, seconds(found.sync[`${stage}_s`])]))));
    if (found.stragglers.length) section("The latest rank of each phase", "By how much it arrives later than the others in a step.",
      wide(table(["phase", "rank", "later by", "verdict"], found.stragglers.map((one) => [one.phase, String(one.rank),
        seconds(one.late_s), one.is_named ? "slow in nearly every step" : "not named: too little, or too rare"]))));
    if (found.gaps.length) section("Longest gaps of the training", "No operation, collective or copy runs in them.",
      wide(table(["rank", "length", "where"], found.gaps.slice(0, 10).map((one) =>
        [String(one.rank), seconds((one.end_ns - one.start_ns) / 1e9), one.where]))));
    if (found.memory.length) {
      const parts = [...new Set(found.memory.flatMap((one) => Object.keys(one.parts)))];
      section("Memory by phase", "The highest memory of a rank so far at the end of a phase, and its parts. other: " +
        "activations, gathered parameters, caches, Python and its libraries.",
        wide(table(["phase", "rank", "peak", ...parts], found.memory.map((one) => [one.phase, String(one.rank), bytes(one.peak),
          ...parts.map((part) => part in one.parts ? bytes(one.parts[part]) : "")]))));
    }
    if (found.notes.length) section("What is missing", "",
      element("ul", { class: "notes-list" }, ...found.notes.map((note) => element("li", {}, note))));
  }

  main.replaceChildren();
  tiles(); costs(); waterfall(); tables();
})();
