"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const index = JSON.parse($("index").textContent);
  const { files, groups, answers, words, starts } = index;
  const count = answers.group.length, ROW = 58, TOKENS_SHOWN = 1500, TOKENS_OF_A_GROUP = 16000, TEXT_SHOWN = 100000;
  const first = new Int32Array(groups.id.length + 1).fill(count);  // first answer of each group
  for (let row = count - 1; row >= 0; row--) first[answers.group[row]] = row;
  const stepOf = (row) => files[groups.file[answers.group[row]]];
  const begins = [];  // first group of each file
  groups.file.forEach((file, i) => { begins[file] ??= i; });
  const numberOf = (group) => group - begins[groups.file[group]] + 1;
  const nameOf = (row) => `${stepOf(row).name}/${numberOf(answers.group[row])}/${answers.answer[row]}`;
  const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const chunkOf = (row) => {
    let low = 0, high = starts.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (starts[mid] <= row) low = mid; else high = mid; }
    return low;
  };

  // Control characters, marks that change the direction of text and half surrogates are shown as \xNN or \uNNNN.
  const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]/gu;
  const printable = (text) => String(text).replace(CONTROL, (c) => {
    const code = c.charCodeAt(0).toString(16);
    return code.length < 3 ? "\\x" + code.padStart(2, "0") : "\\u" + code.padStart(4, "0");
  });
  const plain = (value) => typeof value === "string" ? value : value == null ? "" : JSON.stringify(value);
  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text !== undefined) element.textContent = printable(text);
    return element;
  };
  const short = (value) => value == null ? "–" : String(Number(Number(value).toPrecision(3))).replace(/^-/, "−");

  // ---- chunks, decoded on demand

  const loaded = document.readyState === "loading"
    ? new Promise((done) => document.addEventListener("DOMContentLoaded", done)) : Promise.resolve();
  const unpack = async (id) => {
    if (!$(id)) await loaded;
    const text = $(id).textContent.trim();
    if (!text) return null;
    const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  };
  const readTexts = async (chunk) => JSON.parse(new TextDecoder().decode(await unpack("texts" + chunk)));
  const recent = new Map();
  const readChunk = (chunk) => {
    if (!recent.has(chunk)) {
      if (recent.size > 6) recent.delete(recent.keys().next().value);
      recent.set(chunk, (async () => {
        const [texts, data] = await Promise.all([readTexts(chunk), unpack("values" + chunk)]);
        let size = 0;
        for (const answer of texts) for (const turn of answer.turns) { turn.begin = size; size += turn.tokens; }
        const further = index.columns.map((_, k) => 8 + 4 * k), next = 8 + 4 * further.length;
        const bytes = (k) => new Uint8Array(data, (next + k) * size, size);
        const columns = data && {
          version: new Int32Array(data, 0, size), advantage: new Float32Array(data, 4 * size, size),
          further: further.map((k) => new Float32Array(data, k * size, size)),
          characters: new Uint16Array(data, next * size, size), ratio: bytes(2), sampled: bytes(3), entropy: bytes(4),
          trained: bytes(5),
        };
        return { texts, columns };
      })());
    }
    return recent.get(chunk);
  };
  const root = (byte) => byte === 255 ? NaN : index.max_nats * (byte / 254) ** 2;
  const logRatio = (byte) => byte === 0 ? NaN : byte === 128 ? 0 : Math.sign(byte - 128) * 1e-6 * 10 ** ((Math.abs(byte - 128) - 1) / 18);

  // ---- search in the texts: each chunk is one long text in lower case, with segments of prompts and answers

  const haystacks = [];
  const partText = (part) => part && part.type === "text" ? plain(part.text) : part && part.type === "image" ? "" : plain(part);
  const contentText = (content) => Array.isArray(content) ? content.map(partText).join(" ") : plain(content);
  const messageText = (message) => typeof message === "object" && message ? contentText(message.content) + " " + plain(message.tool_calls) : plain(message);
  const haystack = async (chunk) => {
    if (haystacks[chunk]) return haystacks[chunk];
    const texts = await readTexts(chunk), parts = [], ends = [], from = [], to = [];
    let length = 0;
    const add = (text, begin, end) => { parts.push(text); length += text.length + 1; ends.push(length); from.push(begin); to.push(end); };
    texts.forEach((answer, k) => {
      const row = starts[chunk] + k, group = answers.group[row];
      if (answer.prompt) add((answer.prompt.messages || []).map(messageText).join(" ").toLowerCase(), row, Math.max(row + 1, first[group] === row ? first[group + 1] : row + 1));
      add(answer.turns.map((turn) => turn.messages.map(messageText).join(" ") + " " + turn.text).join(" ").toLowerCase(), row, row + 1);
    });
    return haystacks[chunk] = { text: parts.join("\n"), ends, from, to };
  };
  const pause = () => new Promise((done) => setTimeout(done));
  const search = async (wanted, isCurrent, progress) => {
    const hits = new Uint8Array(count);
    let since = performance.now();
    for (let chunk = 0; chunk + 1 < starts.length; chunk++) {
      const { text, ends, from, to } = haystacks[chunk] || await haystack(chunk);
      for (let at = text.indexOf(wanted), k = 0; at >= 0; at = text.indexOf(wanted, ends[k])) {
        while (ends[k] <= at) k++;
        hits.fill(1, from[k], to[k]);
      }
      if (performance.now() - since > 50) {
        progress((chunk + 1) / (starts.length - 1));
        await pause();
        if (!isCurrent()) return null;
        since = performance.now();
      }
    }
    return hits;
  };
  const prepare = async () => {  // decodes all texts while the page is idle
    await loaded;
    for (let chunk = 0; chunk + 1 < starts.length; chunk++) {
      await new Promise((done) => (window.requestIdleCallback || setTimeout)(done));
      await haystack(chunk);
    }
    performance.mark("texts");
    document.documentElement.dataset.texts = "ready";
  };

  // ---- the list

  const list = $("list"), rows = $("rows");
  let shown = Int32Array.from({ length: count }, (_, row) => row), chosen = -1, hits = null, wanted = "", searches = 0;
  const draw = () => {
    const begin = Math.max(0, Math.floor(list.scrollTop / ROW) - 4), end = Math.min(shown.length, begin + Math.ceil(list.clientHeight / ROW) + 9);
    rows.style.height = shown.length * ROW + "px";
    rows.replaceChildren(...Array.from({ length: Math.max(0, end - begin) }, (_, k) => {
      const row = shown[begin + k], group = answers.group[row], element = make("div", "row");
      element.style.top = (begin + k) * ROW + "px";
      element.id = "row" + row;
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", row === chosen);
      const facts = make("div", "facts"), age = answers.age[row];
      facts.append(`${nameOf(row)} · reward `, make("b", "", short(answers.reward[row])),
        printable(` · ${counted(answers.tokens[row], "token")} · ${words.stop[answers.stop[row]]}${answers.turns[row] > 1 ? ` · ${answers.turns[row]} turns` : ""}${age ? ` · age ${age}` : ""}`));
      element.append(facts, make("div", "asked", `${groups.prompt[group]}: ${groups.asked[group]}`), make("div", "", answers.text[row]));
      element.onclick = () => choose(row);
      return element;
    }));
  };
  const number = (id) => $(id).value === "" ? NaN : Number($(id).value);
  const apply = () => {
    const kind = $("kind").value, status = $("status").value, stop = $("stop").value, sort = $("sort").value;
    const limits = [["from", "to", (row) => stepOf(row).step], ["low", "high", (row) => answers.reward[row]],
      ["short", "long", (row) => answers.tokens[row]], ["age", null, (row) => answers.age[row]]]
      .map(([low, high, value]) => ({ low: number(low), high: high ? number(high) : NaN, value })).filter(({ low, high }) => low === low || high === high);
    const found = [];
    for (let row = 0; row < count; row++) {
      if (hits && !hits[row]) continue;
      if (kind && stepOf(row).kind !== kind || $("wrong").checked && answers.passed[row]) continue;
      if (status && answers.status[row] !== +status || stop && answers.stop[row] !== +stop) continue;
      if (limits.some(({ low, high, value }) => { const v = value(row); return v == null || v < low || v > high; })) continue;
      found.push(row);
    }
    if (sort) {
      const column = answers[sort.replace("-", "")], sign = sort[0] === "-" ? -1 : 1;
      const of = (row) => column[row] == null ? Infinity : sign * column[row];
      found.sort((a, b) => of(a) - of(b) || a - b);
    }
    shown = found;
    const known = found.filter((row) => answers.reward[row] != null);
    const mean = known.reduce((sum, row) => sum + answers.reward[row], 0) / known.length;
    $("count").textContent = `${found.length.toLocaleString("en")} of ${counted(count, "answer")}` + (known.length ? `, mean reward ${short(mean)}` : "");
    list.scrollTop = 0;
    draw();
    if (!shown.length) empty("note", count ? "No answers match." : "This page has no answers.");
    else if (chosen < 0) choose(shown[0]);
  };
  const empty = (css, text) => {
    opening++;
    chosen = -1;
    drawn = current = null;
    $("bar").hidden = true;
    $("group").replaceChildren(make("p", css, text));
  };
  const filter = async () => {
    const text = $("text").value.toLowerCase(), mine = ++searches;
    if (text !== wanted || text && !hits) {
      const found = text ? await search(text, () => mine === searches, (share) => { $("count").textContent = `searching: ${Math.round(100 * share)} %`; }) : null;
      if (mine !== searches) return;
      hits = found;
      wanted = text;
    }
    apply();
  };
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(filter, 40); };
  for (const [name, select] of [["status", $("status")], ["stop", $("stop")]]) {
    words[name].forEach((word, i) => { const option = make("option", "", word); option.value = i; select.append(option); });
  }
  $("filters").addEventListener("input", later);
  $("filters").addEventListener("reset", () => setTimeout(filter));
  $("filters").addEventListener("submit", (event) => { event.preventDefault(); filter(); });
  list.addEventListener("scroll", () => requestAnimationFrame(draw));
  window.addEventListener("resize", draw);
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!by || !shown.length) return;
    event.preventDefault();
    const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(chosen) + by));
    list.scrollTop = Math.min(list.scrollTop, at * ROW);
    list.scrollTop = Math.max(list.scrollTop, (at + 1) * ROW - list.clientHeight);
    choose(shown[at]);
  });

  // ---- a group

  const SCALES = {
    none: "", logprob: "darker: less likely under the sampler, up to −6 nats",
    ratio: "green: the trainer finds the token more likely than the sampler, orange: less; darkest: by a factor of e, palest: by 1e-5",
    entropy: "darker: higher entropy of the trainer's distribution, up to 4 nats",
    advantage: "green: above 0, orange: below; darkest: the largest of this group",
    mask: "green: trained, grey: not", version: "one colour for each version of the weights",
  };
  let colour = "logprob", current = null, drawn = null;
  const values = (columns, i) => {
    const sampled = -root(columns.sampled[i]), log = logRatio(columns.ratio[i]);
    return { sampled, log, trainer: sampled + log, entropy: root(columns.entropy[i]), advantage: columns.advantage[i],
      trained: columns.trained[i], version: columns.version[i] };
  };
  const level = (share) => "s" + Math.min(8, Math.max(0, Math.round(8 * share)));
  const paint = (token, scale) => {
    const v = values(token.columns, token.i);
    let css = "";
    if (colour === "logprob") css = "much " + level(-v.sampled / 6);
    else if (colour === "entropy") css = v.entropy === v.entropy ? "much " + level(v.entropy / 4) : "";
    else if (colour === "ratio") css = v.log ? (v.log > 0 ? "up " : "down ") + level((Math.log10(Math.abs(v.log)) + 5.5) / 5.5) : "";
    else if (colour === "advantage") css = v.advantage ? (v.advantage > 0 ? "up " : "down ") + level(Math.abs(v.advantage) / scale) : "";
    else if (colour === "mask") css = v.trained ? "up s4" : "grey s2";
    else if (colour === "version") css = `v${((v.version % 6) + 6) % 6} s4`;
    token.element.className = `t ${css}${token.joined ? " joined" : ""}`;
  };
  const paintAll = () => {
    if (!drawn) return;
    let scale = 1e-9;
    for (const token of drawn.tokens) { const a = Math.abs(token.columns.advantage[token.i]); if (a > scale) scale = a; }
    for (const token of drawn.tokens) paint(token, scale);
    if (drawn.marked) drawn.marked.element.classList.add("marked");
    if (current) current.element.classList.add("current");
  };
  const link = (row, turn, token) => "#" + nameOf(row) + (turn === undefined ? "" : `&turn=${turn}&token=${token}`);
  const show = (token) => {
    if (current) current.element.classList.remove("current");
    current = token;
    $("bar").hidden = !token;
    if (!token) return;
    token.element.classList.add("current");
    const v = values(token.columns, token.i), fact = (name, text) => make("span", "", ` ${name} ${text}`);
    const address = make("a", "", "link to this token");
    address.href = link(token.row, token.turn, token.at);
    const known = (x) => x === x ? short(x) : "–";
    $("bar").replaceChildren(`token ${token.at} `, make("code", "", JSON.stringify(token.text)),
      fact("logprob", `${known(v.sampled)} (p ${known(Math.exp(v.sampled))})`), fact("trainer", known(v.trainer)),
      fact("ratio", v.log === v.log ? 1 + Math.expm1(v.log) === 1 ? "1" : (1 + Math.expm1(v.log)).toPrecision(6) : "–"),
      fact("entropy", known(v.entropy)), fact("advantage", known(v.advantage)),
      ...index.columns.map((name, k) => fact(name, known(token.columns.further[k][token.i]))), fact("", v.trained ? "trained" : "not trained"),
      fact("weights", `version ${v.version}`), " ", address);
  };

  const tokenBox = (answer, turn, row, number, columns, wantedToken) => {
    const box = make("div", "text-box tokens"), own = [];
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `tokens of turn ${number}; arrow keys move`);
    const characters = columns.characters.subarray(turn.begin, turn.begin + turn.tokens);
    const text = /[\ud800-\udfff]/.test(turn.text) ? [...turn.text] : turn.text;
    const cut = (a, b) => typeof text === "string" ? text.slice(a, b) : text.slice(a, b).join("");
    let begin = Math.floor(Math.max(0, wantedToken) / TOKENS_SHOWN) * TOKENS_SHOWN, place = 0;
    for (let k = 0; k < begin; k++) place += characters[k];
    const fill = () => {
      box.replaceChildren();
      const end = Math.min(turn.tokens, begin + TOKENS_SHOWN);
      if (begin) box.append(more(`… ${begin} earlier tokens`, () => open(row, number, Math.max(0, begin - 1))));
      for (let k = begin; k < end; k++) {
        const piece = k + 1 === turn.tokens ? cut(place) : cut(place, place + characters[k]);
        place += characters[k];
        const visible = piece.replace(/\n/g, "↵\n");
        const token = { element: make("span", "t", visible === "" ? "◌" : visible.length > 2000 ? visible.slice(0, 2000) + "…" : visible),
          columns, i: turn.begin + k, at: k, row, turn: number, text: piece.slice(0, 200), joined: visible === "" };
        own.push(token);
        box.append(token.element);
        token.element.token = token;
      }
      if (end < turn.tokens) box.append(more(`… ${turn.tokens - end} more tokens`, () => open(row, number, end)));
    };
    fill();
    box.addEventListener("pointerover", (event) => { if (event.target.token) show(event.target.token); });
    box.addEventListener("click", (event) => { if (event.target.token) mark(event.target.token); });
    box.addEventListener("focus", () => { if (!current || !own.includes(current)) show(own[0]); });
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      const at = own.indexOf(current);
      if (by) {
        event.preventDefault();
        show(own[Math.min(own.length - 1, Math.max(0, at + by))]);
        current.element.scrollIntoView({ block: "nearest" });
      } else if (event.key === "Enter" && at >= 0) mark(own[at]);
    });
    return { box, own };
  };
  const mark = (token) => {
    if (drawn.marked) drawn.marked.element.classList.remove("marked");
    drawn.marked = token;
    token.element.classList.add("marked");
    history.replaceState(null, "", link(token.row, token.turn, token.at));
    show(token);
  };
  const more = (text, then) => {
    const button = make("button", "more", text);
    button.type = "button";
    button.onclick = then;
    return button;
  };
  const textBox = (text) => {
    const box = make("div", "text-box", text.slice(0, TEXT_SHOWN));
    if (text.length > TEXT_SHOWN) {
      const rest = more(`… ${text.length - TEXT_SHOWN} more characters`, () => { rest.replaceWith(printable(text.slice(TEXT_SHOWN))); });
      box.append(rest);
    }
    return box;
  };
  const imageBox = (media, name) => {
    const of = media && media[name] || { source: name, num_tokens: 0 }, data = of.digest && $("image-" + of.digest), box = make("span", "image");
    if (data) {
      const image = make("img");
      image.src = "data:image/jpeg;base64," + data.textContent;
      image.alt = "";
      box.append(image);
    }
    box.append(make("small", "", `${data ? "" : "no thumbnail: "}${of.source} · ${counted(of.num_tokens, "token")}`));
    return box;
  };
  const messageBox = (message, media) => {
    const box = document.createDocumentFragment(), role = plain(message && message.role) || "message", of = make("div", "role");
    of.append(make("b", "", role), printable(message && message.name ? ` ${plain(message.name)}` : ""));
    const inner = make("div", role === "tool" ? "tool" : "");
    const content = message && typeof message === "object" ? message.content : message;
    if (Array.isArray(content)) inner.append(of, make("br"), ...content.map((part) => part && part.type === "image" ? imageBox(media, plain(part.image)) : textBox(partText(part))));
    else inner.append(of, textBox(plain(content)));
    if (message && message.tool_calls) inner.append(make("div", "call", plain(message.tool_calls)));
    box.append(inner);
    return box;
  };
  const callsIn = (text) => [...text.matchAll(/<tool_call>([^]*?)<\/tool_call>/g)].map((found) => {
    try { const call = JSON.parse(found[1]); return `calls ${plain(call.name)}(${plain(call.arguments)})`; } catch { return `calls a tool with ${found[1].trim()}`; }
  });
  const inOrder = (turns) => {  // [turn number, depth]: each turn after the one that it continues
    const children = turns.map(() => []), roots = [], order = [];
    turns.forEach((turn, i) => (turn.parent >= 0 && turn.parent < i ? children[turn.parent] : roots).push(i));
    const left = roots.map((i) => [i, roots.length > 1 ? 1 : 0]).reverse();
    while (left.length) {
      const [i, depth] = left.pop();
      order.push([i, depth]);
      for (const child of children[i].toReversed()) left.push([child, depth + (children[i].length > 1 ? 1 : 0)]);
    }
    return order;
  };
  const termsOf = (answer) => {
    const table = make("table", "terms");
    table.append(make("caption", "", "reward terms"));
    for (const [name, value] of Object.entries(answer.rewards)) {
      const line = make("tr"), failed = value && typeof value === "object";
      line.append(make("td", "", name), make("td", failed ? "bad" : "", failed ? `failed: ${plain(value.failure && value.failure.message)}` : value == null ? "does not apply" : typeof value === "number" ? short(value) : plain(value)));
      table.append(line);
    }
    return table;
  };
  const answerCard = (answer, row, columns, place, withTokens, media) => {
    const card = make("article", "card" + (row === place.row ? " chosen" : "")), title = make("h3"), age = answers.age[row];
    const status = words.status[answers.status[row]];
    const address = make("a", "", nameOf(row));
    address.href = link(row);
    title.append(address, make("span", "", `reward ${short(answers.reward[row])}`),
      make("small", status === "failed" ? "bad" : "", `${status} · ${counted(answers.tokens[row], "token")}${age == null ? "" : ` · age ${age}`}`));
    card.append(title, termsOf(answer));
    if (answer.failure) card.append(make("div", "bad", `${plain(answer.failure.kind)}: ${plain(answer.failure.message)}`));
    for (const [number, depth] of inOrder(answer.turns)) {
      const turn = answer.turns[number], part = make("div", "turn" + (depth ? " branch" : ""));
      part.style.marginLeft = Math.min(depth, 8) * 12 + "px";
      turn.messages.forEach((message) => part.append(messageBox(message, media)));
      const of = make("div", "role");
      of.append(make("b", "", answer.turns.length > 1 ? `turn ${number}` : "answer"),
        printable(` · ${turn.stop_reason}${turn.parent >= 0 ? ` · continues turn ${turn.parent}` : ""}${turn.reward == null ? "" : ` · reward ${short(turn.reward)}`}${turn.took && ` · ${turn.took}`}${turn.source && ` · ${turn.source}`}`));
      part.append(of);
      if (columns && turn.tokens && (withTokens || row === place.row)) {
        const { box, own } = tokenBox(answer, turn, row, number, columns, row === place.row && number === place.turn ? place.token : 0);
        drawn.tokens.push(...own);
        part.append(box);
      } else {
        part.append(textBox(turn.text));
        if (columns && turn.tokens) part.append(more("show its tokens", () => open(row)));
      }
      callsIn(turn.text).forEach((call) => part.append(make("div", "call", call)));
      card.append(part);
    }
    if (!answer.turns.length) card.append(make("p", "note", "no turn"));
    return card;
  };
  let samePrompt = null;
  const others = (group) => {
    if (!samePrompt) {
      samePrompt = new Map();
      groups.prompt.forEach((id, i) => { if (!samePrompt.has(id)) samePrompt.set(id, []); samePrompt.get(id).push(i); });
    }
    const chips = make("nav", "chips"), same = samePrompt.get(groups.prompt[group]);
    chips.setAttribute("aria-label", "this prompt in other steps");
    for (const other of same.slice(0, 200)) {
      const of = answers.reward.slice(first[other], first[other + 1]).filter((r) => r != null), at = files[groups.file[other]];
      const mean = of.length ? short(of.reduce((a, b) => a + b, 0) / of.length) : "–";
      const chip = make("a", "", `${at.kind} ${at.step}: ${mean} (${first[other + 1] - first[other]})`);
      chip.href = link(first[other]);
      chip.setAttribute("aria-current", other === group);
      chips.append(chip);
    }
    chips.prepend(`this prompt: mean reward (answers) in ${same.length} ${same.length === 1 ? "file" : "files"}`);
    return chips;
  };
  let opening = 0;
  const open = async (row, turn = -1, token = -1) => {
    const mine = ++opening, group = answers.group[row], chunk = chunkOf(row), { texts, columns } = await readChunk(chunk);
    if (mine !== opening) return;
    const members = Array.from({ length: first[group + 1] - first[group] }, (_, k) => first[group] + k);
    const of = (member) => texts[member - starts[chunk]], at = stepOf(row), place = { row, turn, token };
    const prompt = members.map((member) => of(member).prompt).find((p) => p) || {};
    const title = make("h2", "", groups.prompt[group] || groups.id[group]), asked = make("div", "card");
    title.append(" ", make("small", "", `${at.kind === "eval" ? "evaluation after step" : "step"} ${at.step} · group ${numberOf(group)} · ${counted(members.length, "answer")}`));
    (prompt.messages || []).forEach((message) => asked.append(messageBox(message, prompt.media)));
    if (!(prompt.messages || []).length) {
      asked.append(make("p", "note", groups.asked[group]), ...Object.keys(prompt.media || {}).map((name) => imageBox(prompt.media, name)));
    }
    if (prompt.answer != null) asked.append(make("div", "role", "expected answer"), textBox(plain(prompt.answer)));
    const choice = make("div", "colour"), select = make("select"), legend = make("span", "", SCALES[colour]), label = make("label", "", "colour tokens by ");
    for (const name of Object.keys(SCALES)) { const option = make("option", "", name); option.selected = name === colour; select.append(option); }
    select.id = "colour";
    select.onchange = () => { colour = select.value; legend.textContent = SCALES[colour]; paintAll(); };
    label.append(select);
    choice.append(label, legend);
    drawn = { tokens: [], marked: null };
    current = null;
    $("bar").hidden = true;
    const total = members.reduce((sum, member) => sum + Math.min(answers.tokens[member], TOKENS_SHOWN), 0);
    const cards = make("div", "answers");
    cards.append(...members.map((member) => answerCard(of(member), member, columns, place, total <= TOKENS_OF_A_GROUP, prompt.media)));
    $("group").replaceChildren(title, others(group), asked, choice, cards);
    paintAll();
    chosen = row;
    draw();
    const target = turn >= 0 && drawn.tokens.find((t) => t.row === row && t.turn === turn && t.at === token);
    if (target) {
      mark(target);
      target.element.scrollIntoView({ block: "center", inline: "center" });
    } else {
      history.replaceState(null, "", link(row));
      const card = cards.querySelector(".chosen");
      if (card) cards.scrollLeft = card.offsetLeft - cards.offsetLeft;
    }
    document.documentElement.dataset.open = link(row);
  };
  const choose = (row) => { chosen = row; draw(); return open(row); };
  const follow = () => {
    if (location.hash.length < 2) return;
    const given = new URLSearchParams("answer=" + location.hash.slice(1)), name = given.get("answer");
    const [, step, id, answer] = name.match(/^(\w+)\/(.+)\/(\d+)$/) || [], file = files.findIndex((one) => one.name === step);
    const find = (isIt) => groups.id.findIndex((own, i) => groups.file[i] === file && isIt(own, i));
    let group = find((_, i) => String(numberOf(i)) === id);
    if (group < 0) group = find((own, i) => own === id || groups.prompt[i] === id);
    let row = group < 0 ? -1 : first[group];
    while (row >= 0 && row < first[group + 1] && answers.answer[row] !== Number(answer)) row++;
    if (row < 0 || row >= first[group + 1]) {
      empty("bad", `This page does not have ${name}.`);
      return;
    }
    const at = shown.indexOf(row);
    if (at >= 0) list.scrollTop = Math.max(0, (at - 2) * ROW);
    open(row, given.has("turn") ? Number(given.get("turn")) : -1, Number(given.get("token") || 0));
  };
  window.addEventListener("hashchange", follow);
  apply();
  performance.mark("list");
  document.documentElement.dataset.list = "ready";
  follow();
  prepare();
})();
