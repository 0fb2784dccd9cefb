"use strict";
// One routing section: its data is the JSON inside it. Text enters the page as text only, never as markup.

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/^ +$/g, (s) => "␣".repeat(s.length)).replace(/\x00/g, "␀");
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (100 * value).toFixed(1) + " %";

function row(cells, tag = "td") {
  return element("tr", {}, ...cells.map((cell) => element(tag, { textContent: cell })));
}

function table(caption, head, rows) {
  const body = element("tbody", {}, ...rows.map((cells) => row(cells)));
  return element("table", {}, element("caption", { textContent: caption }), element("thead", {}, row(head, "th")), body);
}

function mount(section) {
  const data = JSON.parse(section.querySelector("script").textContent);
  const find = (selector) => section.querySelector(selector);
  const numLayers = data.layers.length;
  const numTokens = data.tokens.length;
  const unit = data.settings.scheme === "early_exit" ? "exits" : "routed layers";
  const box = find(".tokens");
  const canvas = find("canvas");
  const details = find(".details");
  const letters = data.tokens.map((text, t) => {
    const shown = text.endsWith("\n") ? text.slice(0, -1) + "↵\n" : text === "\x00" ? "␀" : text;
    const letter = element("span", { id: `${section.id}-${t}`, textContent: shown, role: "option" });
    letter.dataset.t = t;
    if (t && t % data.context === 0) letter.classList.add("window");
    if (t >= data.num_given) letter.classList.add("made");
    return letter;
  });
  box.append(...letters);
  let view = "causal";
  let current = 0;

  const pass = () => (view === "lookahead" ? data.lookahead : data.causal);
  const taken = (layer, t) => pass().chosen[layer][t] === "1";
  const best = (layer, t) => pass().best[layer][t] === "1";
  const count = (test) => {
    let total = 0;
    for (let layer = 0; layer < numLayers; layer++) total += test(layer);
    return total;
  };
  const depth = (t) => count((layer) => taken(layer, t));
  const extra = (t) => count((layer) => taken(layer, t) && !best(layer, t));
  const missed = (t) => count((layer) => !taken(layer, t) && best(layer, t));

  function shade() {
    box.dataset.view = view;
    letters.forEach((letter, t) => {
      const amount = view === "difference" ? extra(t) : depth(t);
      letter.style.setProperty("--d", amount / numLayers);
      letter.style.setProperty("--m", view === "difference" ? missed(t) / numLayers : 0);
      letter.dataset.depth = amount;
      const said = view === "difference" ? `${amount} too many, ${missed(t)} missed` : `${amount} of ${numLayers} ${unit}`;
      letter.setAttribute("aria-label", `${visible(data.tokens[t])}: ${said}`);
      letter.setAttribute("aria-selected", t === current);
    });
    const scale = find(".scale");
    scale.replaceChildren(...(view === "difference" ? differenceScale() : depthScale()));
  }

  function swatch(text, colour) {
    const made = element("i", { textContent: text });
    made.style.background = colour;
    return made;
  }

  function depthScale() {
    const steps = Array.from({ length: numLayers + 1 }, (_, n) => n).filter((n) => numLayers < 13 || n % Math.ceil(numLayers / 12) === 0);
    const colour = (n) => `color-mix(in oklab, var(--hot) ${(100 * n) / numLayers}%, transparent)`;
    return [`${unit} that a token went through: `, ...steps.map((n) => swatch(n, colour(n)))];
  }

  function differenceScale() {
    return ["against what training would choose by the same scores: ", swatch("taken, not chosen there", "var(--extra)"), swatch("chosen there, missed", "var(--missed)")];
  }

  function show(t, scroll = false) {
    letters[current].classList.remove("now");
    letters[current].setAttribute("aria-selected", false);
    current = Math.max(0, Math.min(numTokens - 1, t));
    const letter = letters[current];
    letter.classList.add("now");
    letter.setAttribute("aria-selected", true);
    box.setAttribute("aria-activedescendant", letter.id);
    if (scroll) bringIntoView(letter);
    const p = pass();
    const rows = data.layers.map((index, layer) => {
      const verdict = (taken(layer, current) ? "✓" : "–") + (taken(layer, current) === best(layer, current) ? "" : best(layer, current) ? " missed" : " extra");
      const guess = p.guesses ? [number(p.guesses[layer][current])] : [];
      return [String(index), verdict, number(p.scores[layer][current]), ...guess, number(p.gates[layer][current])];
    });
    const head = ["layer", "through", "score", ...(p.guesses ? ["guess"] : []), "gate"];
    details.replaceChildren(
      element("h3", { textContent: visible(data.tokens[current]) }),
      element("p", { textContent: `token ${current + 1} of ${numTokens}, through ${depth(current)} of ${numLayers} ${unit}` }),
      element("p", { textContent: `surprise ${number(p.surprise[current], 2)} nats; its own prediction has an entropy of ${number(p.entropy[current], 2)}` }),
      table("", head, rows),
    );
    point();
  }

  // Within the text and within the map: the page itself stays where it is, under the reader's pointer.
  function bringIntoView(letter) {
    const above = letter.offsetTop - box.scrollTop;
    if (above < 0 || above + letter.offsetHeight > box.clientHeight) box.scrollTop = letter.offsetTop - box.clientHeight / 2;
    const map = find(".map");
    const left = axis + current * cellWidth - map.scrollLeft;
    if (left < axis || left + cellWidth > map.clientWidth) map.scrollLeft = axis + current * cellWidth - map.clientWidth / 2;
  }

  function point() {
    const cursor = find(".cursor");
    cursor.style.left = `${axis + current * cellWidth - 1}px`;
    cursor.style.width = `${cellWidth + 1}px`;
    cursor.style.height = canvas.style.height;
  }

  const cellHeight = Math.max(6, Math.min(22, Math.floor(240 / numLayers)));
  const axis = 34;
  let cellWidth = 4;
  function drawMap() {
    const room = find(".map").clientWidth;
    cellWidth = Math.max(2, Math.min(14, Math.floor((room - axis) / numTokens)));
    const width = axis + cellWidth * numTokens;
    const height = cellHeight * numLayers + 2;
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / width);
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(section);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [hot, both, over, under, ink, line] = ["--hot", "--both", "--extra", "--missed", "--ink", "--line"].map(colour);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    for (let layer = 0; layer < numLayers; layer++) {
      const y = (numLayers - 1 - layer) * cellHeight + 1;  // the first layer below, as in the paper
      pen.fillStyle = ink;
      pen.font = `${Math.min(12, cellHeight)}px sans-serif`;
      pen.textBaseline = "middle";
      pen.fillText(data.layers[layer], 4, y + cellHeight / 2);
      for (let t = 0; t < numTokens; t++) {
        const is = taken(layer, t);
        const top = best(layer, t);
        let fill = is ? hot : null;
        if (view === "difference") fill = is && top ? both : is ? over : top ? under : null;
        if (fill === null) continue;
        pen.fillStyle = fill;
        pen.fillRect(axis + t * cellWidth, y, Math.max(1, cellWidth - (cellWidth > 3)), cellHeight - 1);
      }
    }
    pen.fillStyle = line;
    for (let t = data.context; t < numTokens; t += data.context) pen.fillRect(axis + t * cellWidth - 1, 0, 1, height);
    point();
  }

  function drawHistogram() {
    const p = pass();
    const values = [[], []];
    p.gates.forEach((gates, layer) => gates.forEach((gate, t) => gate !== null && values[+taken(layer, t)].push(gate)));
    const all = values.flat().sort((a, b) => a - b);
    const picture = find(".histogram");
    picture.replaceChildren();
    if (!all.length) return;
    const low = all[Math.floor(0.005 * (all.length - 1))];
    const high = Math.max(all[Math.ceil(0.995 * (all.length - 1))], low + 1e-6);
    const bins = 48;
    const counts = values.map((group) => {
      const found = new Array(bins).fill(0);
      for (const value of group) found[Math.max(0, Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins)))]++;
      return found;
    });
    const most = Math.max(...counts[0].map((n, bin) => n + counts[1][bin]));
    const draw = (name, attributes, text) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      picture.append(made);
    };
    const scale = (n) => (n / most) * 150;
    for (let bin = 0; bin < bins; bin++) {
      const [skipped, chosen] = [scale(counts[0][bin]), scale(counts[1][bin])];
      const x = 4 + bin * 10;
      draw("rect", { class: "skipped", x, width: 9, y: 160 - skipped, height: skipped });
      draw("rect", { class: "chosen", x, width: 9, y: 160 - skipped - chosen, height: chosen });
    }
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      draw("text", { x: 4 + part * 479, y: 176, "text-anchor": anchor }, (low + part * (high - low)).toPrecision(3));
    }
    picture.setAttribute("aria-label", `Gate values from ${low.toPrecision(3)} to ${high.toPrecision(3)}: ${values[1].length} of chosen tokens, ${values[0].length} of skipped ones`);
  }

  function numbers() {
    const p = pass();
    const rows = data.layers.map((index, layer) => {
      const found = p.layers[layer];
      return [`layer ${index}`, percent(data.capacities[layer]), percent(found.capacity), percent(found.precision), percent(found.recall)];
    });
    find(".layers").replaceChildren(
      table("Precision: of the tokens that were taken, how many training would choose by the same scores. Recall: of those that training would choose, how many were taken.",
        ["", "capacity", "realised", "precision", "recall"], rows),
    );
    const c = p.correlation;
    const interval = c && c.low !== null ? ` (95 % interval ${number(c.low, 2)} to ${number(c.high, 2)})` : "";
    find(".correlation").textContent = c
      ? `Tokens that go through more layers and the entropy of the prediction made at them: Spearman's correlation is ${number(c.mean, 2)}${interval}, over ${numTokens} tokens.`
      : "All tokens went through the same number of layers: there is nothing to correlate with the entropy of predictions.";
    find(".loss").textContent = `Loss ${number(data.causal.loss)} nats per token with causal routing, ${number(data.lookahead.loss)} with look-ahead.`;
    const types = (caption, list) => table(caption, ["token", "layers", "seen"], list.map(([text, mean, seen]) => [visible(text), number(mean, 2), String(seen)]));
    find(".types").replaceChildren(types("Most processed", p.most), types("Least processed", p.least));
  }

  function all() {
    shade();
    drawMap();
    show(current);
    drawHistogram();
    numbers();
  }

  function neighbourLine(direction) {
    const from = letters[current];
    let found = current;
    for (let t = current + direction; t >= 0 && t < numTokens; t += direction) {
      const top = letters[t].offsetTop;
      if (top === from.offsetTop) continue;
      if (found !== current && top !== letters[found].offsetTop) break;
      const nearer = Math.abs(letters[t].offsetLeft - from.offsetLeft) < Math.abs(letters[found].offsetLeft - from.offsetLeft);
      if (found === current || nearer) found = t;
    }
    return found;
  }

  const at = (event) => event.target.closest?.("[data-t]")?.dataset.t;
  for (const kind of ["pointerover", "click"]) {
    box.addEventListener(kind, (event) => {
      const t = at(event);
      if (t !== undefined) show(+t);
    });
  }
  const moves = { ArrowRight: () => current + 1, ArrowLeft: () => current - 1, ArrowUp: () => neighbourLine(-1),
    ArrowDown: () => neighbourLine(1), Home: () => 0, End: () => numTokens - 1 };
  for (const part of [box, find(".map")]) {
    part.addEventListener("keydown", (event) => {
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(moves[event.key](), true);
    });
  }
  for (const kind of ["pointermove", "click"]) {
    canvas.addEventListener(kind, (event) => {
      const t = Math.floor((event.offsetX - axis) / cellWidth);
      if (t >= 0 && t < numTokens && t !== current) show(t, true);
    });
  }
  section.querySelectorAll("input").forEach((input) => input.addEventListener("change", () => {
    view = input.value;
    all();
  }));
  window.addEventListener("resize", drawMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
  all();
}

document.querySelectorAll(".routing").forEach(mount);
