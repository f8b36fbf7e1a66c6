// Shared by all pages: API queries, elements, numbers, charts, light and dark. Texts from the data enter the page only
// as text nodes.

export async function query(name, values = {}, method = "GET") {
  const parameters = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const response = await fetch(`api/${name}?${parameters}`, { method });
  const found = await response.json().catch(() => ({ error: `the server returned ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `the server returned ${response.status}`);
  return found;
}

// make("td", { class: "number", onclick: f }, "text", node, ...)
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

// A string is an integer too large for a JavaScript number.
export const count = (number) => number === null || number === undefined ? "–" : (typeof number === "string" ? BigInt(number) : number).toLocaleString("en");

export function short(number, digits = 3) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  return size !== 0 && (size < 0.001 || size >= 100000) ? number.toExponential(2) : Number(number.toPrecision(digits)).toString();
}

// 13M, 2.5k: for the axes of charts.
export function compact(number) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (Math.abs(number) >= size) return `${Number((number / (unit === "k" ? 1e3 : size)).toPrecision(3))}${unit}`;
  return Number(number.toPrecision(3)).toString();
}

export function bytes(number) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(number) < 1000) return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
    number /= 1000;
  }
  return `${number.toFixed(1)} TB`;
}

export const colour = (place) => `var(--line${place % 7})`;

// The width at which the text of a chart in this place is as large as the text around it.
export const widthOf = (place) => Math.max(260, Math.round(place.getBoundingClientRect().width));

// Key figures in boxes: a value and its name.
export function showTiles(place, tiles) {
  place.replaceChildren(...tiles.map(([value, what]) => make("li", {}, make("b", {}, value), make("span", {}, what))));
}

// A bar whose length is a share of its box.
export function meter(share, mark = null) {
  const bar = make("i");
  bar.style.setProperty("--share", Math.min(1, Math.max(0, share ?? 0)));
  if (mark) bar.style.setProperty("--mark", mark);
  return make("span", { class: "meter", "aria-hidden": "true" }, bar);
}

// Replaces the content of an element with an error message.
export function showError(element, error) {
  element.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
}

// lines: [{ name, x: [...], y: [... or null], colour?, dash? }]. whole: ticks on the x axis are integers (epochs).
export function lineChart({ lines, label, xLabel = "", yLabel = "", width = 560, height = 180, yMin = null, yMax = null, mark = null, points = false, whole = false }) {
  const left = 48, right = 10, top = 10, bottom = 32;
  const xs = lines.flatMap((line) => line.x), ys = lines.flatMap((line) => line.y).filter((y) => y !== null);
  const [x0, x1] = range(xs), [y0, y1] = range(ys, yMin, yMax);
  const px = (x) => left + (width - left - right) * (x - x0) / (x1 - x0);
  const py = (y) => height - bottom - (height - top - bottom) * (y - y0) / (y1 - y0);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks(y0, y1, 4)) {
    chart.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }));
    chart.append(svg("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticks(x0, x1, Math.min(6, width / 70)).filter((tick) => !whole || Number.isInteger(tick))) chart.append(svg("text", { x: px(tick), y: height - bottom + 14, "text-anchor": "middle" }, short(tick)));
  if (xLabel) chart.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  if (yLabel) chart.append(svg("text", { x: 0, y: 9 }, yLabel));
  if (mark !== null) chart.append(svg("line", { class: "mark", stroke: "var(--grey)", "stroke-dasharray": "3 3", x1: px(mark), x2: px(mark), y1: top, y2: height - bottom }));
  lines.forEach((line, place) => {
    const stroke = line.colour ?? colour(place);
    let path = "", pen = false;
    line.x.forEach((x, at) => {
      if (line.y[at] === null || line.y[at] === undefined) { pen = false; return; }
      path += `${pen ? "L" : "M"}${px(x).toFixed(1)} ${py(line.y[at]).toFixed(1)}`;
      pen = true;
    });
    chart.append(svg("path", { class: "line", d: path, stroke, "stroke-dasharray": line.dash }));
    if (points) line.x.forEach((x, at) => {
      if (line.y[at] === null) return;
      chart.append(svg("circle", { cx: px(x), cy: py(line.y[at]), r: 2.6, fill: stroke }, svg("title", {}, `${line.name} at ${short(x)}: ${short(line.y[at])}`)));
    });
  });
  return chart;
}

export function legend(lines) {
  const key = make("p", { class: "legend" });
  lines.forEach((line, place) => {
    const entry = make("span", {}, line.name);
    entry.style.setProperty("--mark", line.colour ?? colour(place));
    key.append(entry);
  });
  return key;
}

// bars: [{ from, to, count }]. grows: bar widths grow, so the x axis is logarithmic.
export function histogram({ bars, label, xLabel = "", width = 560, height = 160, grows = false }) {
  const left = 56, right = 10, top = 10, bottom = 32;
  const x0 = bars[0].from, x1 = bars[bars.length - 1].to, most = Math.max(1, ...bars.map((bar) => bar.count));
  const scale = grows ? (x) => Math.log10(Math.max(x, 0.5)) : (x) => x;
  const px = (x) => left + (width - left - right) * (scale(x) - scale(x0)) / (scale(x1) - scale(x0) || 1);
  const py = (y) => height - bottom - (height - top - bottom) * y / most;
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks(0, most, 3)) {
    chart.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }));
    chart.append(svg("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, compact(tick)));
  }
  for (const bar of bars) {
    chart.append(svg("rect", { x: px(bar.from), y: py(bar.count), width: Math.max(0.5, px(bar.to) - px(bar.from) - 0.5), height: Math.max(0, py(0) - py(bar.count)), fill: "var(--line0)" },
      svg("title", {}, `${barName(bar)}: ${count(bar.count)}`)));
  }
  const below = grows ? ticks(scale(x0), scale(x1), 6).filter(Number.isInteger).map((power) => 10 ** power) : ticks(x0, x1, Math.min(6, width / 70));
  for (const tick of below) chart.append(svg("text", { x: px(tick), y: height - bottom + 14, "text-anchor": "middle" }, compact(tick)));
  if (xLabel) chart.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  return chart;
}

// Bars of integers end before `to`.
function barName(bar) {
  if (!Number.isInteger(bar.from) || !Number.isInteger(bar.to)) return `${short(bar.from)} to ${short(bar.to)}`;
  return bar.to - bar.from === 1 ? count(bar.from) : `${count(bar.from)} to ${count(bar.to - 1)}`;
}

function range(values, low = null, high = null) {
  let least = low ?? Infinity, most = high ?? -Infinity;
  for (const value of values) {
    if (low === null && value < least) least = value;
    if (high === null && value > most) most = value;
  }
  if (!Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
  // Values that differ only in the last digits count as one; ticks between them would never end.
  const size = Math.max(Math.abs(least), Math.abs(most)), room = Math.max(0.5, size / 1000);
  return most - least <= size * 1e-9 ? [least - room, most + room] : [least, most];
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) ?? raw;
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

// The header: title, links to the other views, light or dark.
export async function startPage(name) {
  const about = await (await fetch("../about")).json();
  document.title = `${about.title} – millstream`;
  const theme = make("button", { type: "button", id: "theme" });
  const nav = make("nav", { "aria-label": "Views" }, ...about.views.map((view) =>
    make("a", { href: `../${view.name}/`, "aria-current": view.name === name ? "page" : null }, view.title)));
  const top = make("header", { class: "top" }, make("h1", {}, make("bdi", {}, about.title)), nav, make("span", { class: "right" }, theme));
  document.body.prepend(top);
  window.followTheme(theme); // of theme.js, which the report has, too
  return about;
}
