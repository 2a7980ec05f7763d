"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("attention").textContent);
  const { tokens, sampled, block, side, heads, layers } = facts;
  const at = (id) => document.getElementById(id);
  const layerBox = at("layer"), headBox = at("head"), canvas = at("map"), text = at("text");
  const TOP = 10, LONGEST = 60;  // characters of tokens in a sentence or a table
  let unit = 1, margin = 44;  // pixels of the canvas for one of the page, at most 2; left of the map
  const decoded = new Map();
  let maps = null, query = Math.max(0, sampled.lastIndexOf(1)), cursor = null;

  const option = (box, value, label) => {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = label;
    box.append(made);
    return made;
  };
  layers.forEach((layer, i) => { option(layerBox, i, layer ? `${i}` : `${i} (no map)`).disabled = !layer; });
  option(headBox, heads, "mean");
  for (let head = 0; head < heads; head++) option(headBox, head, `${head}`);
  const first = layers.findIndex((layer) => layer);

  const shown = (token) => tokens[token].replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +$/, (all) => "␣".repeat(all.length)) || "(empty)";
  const named = (row) => {
    const start = row * block, end = Math.min(tokens.length, start + block);
    const position = end - start > 1 ? `${start}–${end - 1}` : `${start}`;
    let words = "";
    for (let i = start; i < end; i++) words += shown(i);
    return { words: words.length > LONGEST ? words.slice(0, LONGEST) + "…" : words, position };
  };
  const weight = (byte) => (byte / 255) ** 2;
  const value = (row, key) => weight(maps[(Number(headBox.value) * side + row) * side + key]);
  const digits = (w) => w >= 0.1 ? w.toFixed(2) : w >= 0.001 || w === 0 ? w.toFixed(3) : w.toExponential(0);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const channels = (name) => {
    const hex = colour(name).slice(1), full = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
    return [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
  };

  async function decode(layer) {
    if (!decoded.has(layer)) {
      const packed = Uint8Array.from(atob(at(`map${layer}`).textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
      if (decoded.size > 4) decoded.delete(decoded.keys().next().value);
      decoded.set(layer, new Uint8Array(await new Response(stream).arrayBuffer()));
    }
    return decoded.get(layer);
  }

  function paint(target, head) {
    target.width = target.height = side;
    const context = target.getContext("2d"), image = context.createImageData(side, side);
    const [r, g, b] = channels("--c0"), start = head * side * side;
    for (let i = 0; i < side * side; i++) {
      image.data.set([r, g, b, maps[start + i]], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }

  const sheet = document.createElement("canvas");

  function drawMap() {
    unit = Math.max(1, Math.min(2, canvas.width / canvas.clientWidth));
    margin = 44 * unit;
    const context = canvas.getContext("2d"), size = canvas.width - margin - TOP, cell = size / side;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = cell < 1;
    context.drawImage(sheet, margin, TOP, size, size);
    context.strokeStyle = colour("--line");
    context.strokeRect(margin, TOP, size, size);
    context.fillStyle = colour("--soft");
    context.font = `${13 * unit}px system-ui, sans-serif`;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => tokens.length / n <= 8 / unit) || 2000;
    for (let token = 0; token < tokens.length; token += every) {
      const place = (token / block + 0.5) * cell;
      context.textAlign = "end";
      context.fillText(token, margin - 6, TOP + place + 4 * unit);
      context.textAlign = "center";
      context.fillText(token, margin + place, TOP + size + 16 * unit);
    }
    context.fillText("key token", margin + size / 2, TOP + size + 31 * unit);
    context.save();
    context.rotate(-Math.PI / 2);
    context.fillText("query token", -(TOP + size / 2), 11 * unit);
    context.restore();
    context.strokeStyle = colour("--c1");
    context.strokeRect(margin, TOP + Math.floor(query / block) * cell, size, Math.max(cell, 2));
    if (cursor) context.strokeRect(margin + cursor.key * cell, TOP + cursor.row * cell, Math.max(cell, 3), Math.max(cell, 3));
  }

  function describe() {
    if (!cursor) return;
    const { row, key } = cursor, from = named(row), to = named(key);
    at("at").textContent = key > row
      ? `“${to.words}” (${to.position}) comes after “${from.words}” (${from.position})`
      : `“${from.words}” (${from.position}) attends to “${to.words}” (${to.position}) with weight ${digits(value(row, key))}`;
  }

  function drawText() {
    const row = Math.floor(query / block), [r, g, b] = channels("--c0"), start = (Number(headBox.value) * side + row) * side;
    [...text.children].forEach((token, i) => {
      token.style.backgroundColor = i > query ? "" : `rgba(${r}, ${g}, ${b}, ${maps[start + Math.floor(i / block)] / 255 * 0.8})`;
      token.setAttribute("aria-selected", i === query);
    });
    text.setAttribute("aria-activedescendant", `token${query}`);
    const keys = [...Array(row + 1).keys()].sort((a, b2) => maps[start + b2] - maps[start + a]).slice(0, 10);
    const body = at("top").querySelector("tbody");
    body.replaceChildren(...keys.map((key) => {
      const line = document.createElement("tr"), { words, position } = named(key);
      for (const cellText of [words, position, digits(value(row, key))]) {
        const cell = document.createElement("td");
        cell.textContent = cellText;
        line.append(cell);
      }
      line.lastChild.className = "num";
      return line;
    }));
    const head = headBox.selectedOptions[0].textContent, from = named(row);
    at("top").querySelector("caption").textContent =
      `layer ${layerBox.value}, head ${head}: most attended by “${from.words}” (${from.position})`;
  }

  function drawHead() {
    const head = Number(headBox.value), sinks = layers[Number(layerBox.value)];
    paint(sheet, head);
    [...at("heads").children].forEach((button) => button.setAttribute("aria-pressed", Number(button.value) === head));
    const sink = sinks.length && head < heads ? sinks[head] : sinks.reduce((sum, one) => sum + one, 0) / (sinks.length || 1);
    at("sink").textContent = sinks.length ? `${(100 * sink).toFixed(1)} % of the weight is on the attention sink` : "";
    drawMap();
    drawText();
    describe();
  }

  async function drawLayer() {
    at("state").textContent = "reading the layer …";
    maps = await decode(Number(layerBox.value));
    at("state").textContent = "";
    for (const button of at("heads").children) paint(button.querySelector("canvas"), Number(button.value));
    drawHead();
  }

  function choose(token) {
    query = Math.max(0, Math.min(tokens.length - 1, token));
    drawMap();
    drawText();
    const chosen = text.children[query];
    if (chosen.offsetTop < text.scrollTop || chosen.offsetTop > text.scrollTop + text.clientHeight - 30) {
      text.scrollTop = chosen.offsetTop - text.clientHeight / 2;
    }
  }

  function cellOf(event) {
    const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width, size = canvas.width - margin - TOP;
    const place = (offset, edge) => Math.floor((offset * scale - edge) / size * side);
    const key = place(event.clientX - box.left, margin), row = place(event.clientY - box.top, TOP);
    return key >= 0 && row >= 0 && key < side && row < side ? { row, key } : null;
  }

  const point = (cell) => { cursor = cell; drawMap(); describe(); };
  canvas.addEventListener("pointermove", (event) => { if (maps && cellOf(event)) point(cellOf(event)); });
  canvas.addEventListener("click", (event) => { if (maps && cellOf(event)) choose(cellOf(event).row * block); });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" && cursor) choose(cursor.row * block);
    if (!moves || !maps) return;
    event.preventDefault();
    const from = cursor || { row: Math.floor(query / block), key: 0 }, fit = (n) => Math.max(0, Math.min(side - 1, n));
    point({ row: fit(from.row + moves[0]), key: fit(from.key + moves[1]) });
  });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -tokens.length, End: tokens.length }[event.key];
    if (!move || !maps) return;
    event.preventDefault();
    choose(query + move);
  });
  text.addEventListener("click", (event) => {
    const chosen = event.target.closest("[role=option]");
    if (chosen && maps) choose(Number(chosen.id.slice(5)));
  });

  tokens.forEach((token, i) => {
    const made = document.createElement("span");
    made.id = `token${i}`;
    made.setAttribute("role", "option");
    made.className = sampled[i] ? "sampled" : "";
    made.textContent = token || "·";
    text.append(made);
  });
  for (let i = 0; i <= heads; i++) {
    const button = document.createElement("button"), head = (i + heads) % (heads + 1);  // the mean is the first one
    button.type = "button";
    button.value = head;
    button.append(document.createElement("canvas"), head === heads ? "mean" : `head ${head}`);
    button.addEventListener("click", () => { headBox.value = head; drawHead(); });
    at("heads").append(button);
  }
  at("choice").addEventListener("submit", (event) => event.preventDefault());
  layerBox.addEventListener("change", drawLayer);
  headBox.addEventListener("change", drawHead);
  window.addEventListener("resize", () => { if (maps) drawMap(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (maps) drawLayer(); });
  if (first < 0) {
    at("state").textContent = "No layer of this model has softmax attention.";
    return;
  }
  layerBox.value = first;
  drawLayer();
})();
