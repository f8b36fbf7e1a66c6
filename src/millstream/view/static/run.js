// A run while it trains: polls once per second for changes while the page is visible.
import { query, bytes, colour, showError, count, lineChart, make, short, showTiles, startPage, widthOf } from "./common.js";

const EVERY_MS = 1000, QUIET_MS = 3000; // while training, and otherwise
const TITLES = { val_auroc: "AUROC on validation", val_macro_f1: "macro F1 on validation", val_accuracy: "accuracy on validation", loss: "loss", lr: "learning rate", records_per_s: "records/s", waiting: "fraction of time waiting for data", memory: "memory, bytes", step: "steps" };
const STROKES = ["solid", "dashed", "dotted", "dash and dot"];
const at = (id) => document.getElementById(id);
const seedOf = (entry) => [`${entry.seed}`, entry.fold && `fold ${entry.fold}`, entry.labels && `${entry.labels} labels`].filter(Boolean).join(", ");
const jobName = (entry) => `${entry.model}\n${seedOf(entry)}`;

let generation = 0, since = 0, epochs = null, reportVersion = null, timer = null, sentence = "", shownRows = "", shownTiles = "";
let curves = new Map(), fits = new Map(), memory = null, run = null;
const hidden = new Set();

await startPage("run");
query("settings").then(showSettings, (error) => showError(at("settings"), error));
at("second").addEventListener("change", drawCurves);
at("make").addEventListener("click", async () => {
  try { showReport(await query("make-report", {}, "POST")); } catch (error) { at("report-text").textContent = error.message; }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
let drawn = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawn || !run) return;
  drawn = innerWidth;
  drawCurves();
  drawMemory();
});
follow();

async function follow() {
  clearTimeout(timer);
  try {
    const news = await query("state", { generation, since });
    at("problem").replaceChildren();
    take(news);
  } catch (error) {
    showError(at("problem"), new Error(`${error.message}. Is millstream view still running?`));
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(follow, run?.state === "training" ? EVERY_MS : QUIET_MS);
}

function take(news) {
  if (news.begins) curves = new Map();
  const drew = news.begins || news.curves.length > 0;
  for (const curve of news.curves) curves.set(jobName(curve), curve);
  fits = new Map(news.fits.map((fit) => [jobName(fit), fit]));
  generation = news.generation;
  since = news.lines;
  // The report of a finished run comes first; moving the frame later would reload it.
  if (run === null && news.state !== "training" && news.report.version !== null) at("status").after(at("report"));
  run = news;
  if (news.memory) memory = news.memory;
  showState();
  if (drew) { chooseModels(); drawCurves(); }
  const rows = JSON.stringify([news.fits, news.missing, news.at_work]);
  if (drew || rows !== shownRows) showModels(); // unchanged rows stay, so that text in them can be selected
  shownRows = rows;
  if (news.memory) drawMemory();
  showReport(news.report);
}

function showState() {
  at("status").dataset.state = run.state;
  at("state").textContent = { waiting: "Not started", training: "Training", finished: "Finished", stopped: "Stopped", quiet: "Not training" }[run.state];
  const job = run.at_work;
  const place = job && job.epoch !== null ? `, epoch ${job.epoch + 1}${epochs ? ` of at most ${epochs}` : ""}` : "";
  at("at-work").textContent = job ? `${job.model}, seed ${seedOf(job)}${place}` : run.state === "training" ? "a model that has logged nothing yet" : "";
  const damaged = run.damaged ? ` ${count(run.damaged)} log lines are damaged.` : "";
  if (sentence !== run.text + damaged) at("text").textContent = sentence = run.text + damaged;
  const best = [...curves.values()].filter((curve) => curve.best !== null).sort((a, b) => b.best - a.best)[0];
  const last = memory?.bytes.at(-1);
  const tiles = [
    [count(fits.size), fits.size === 1 ? "fit finished" : "fits finished"],
    best && [short(best.best, 4), `best ${title(best.measure)}: ${best.model}`],
    run.elapsed_s !== null && [duration(run.elapsed_s), "training time"],
    last && [bytes(last), run.state === "training" ? `memory${memory.budget ? ` of ${bytes(memory.budget)}` : ""}` : "memory at the end"],
  ].filter(Boolean);
  if (JSON.stringify(tiles) === shownTiles) return;
  shownTiles = JSON.stringify(tiles);
  showTiles(at("tiles"), tiles);
}

function models() {
  return [...new Set([...curves.values()].map((curve) => curve.model))];
}

function chooseModels() {
  at("curves").hidden = curves.size === 0;
  const focused = document.activeElement?.value;
  at("chosen").replaceChildren(...models().map((model, place) => {
    const box = make("input", { type: "checkbox", value: model, checked: !hidden.has(model), onchange: () => {
      if (box.checked) hidden.delete(model); else hidden.add(model);
      drawCurves();
    } });
    const label = make("label", {}, box, make("i", { "aria-hidden": "true" }), model);
    label.style.setProperty("--mark", colour(place));
    if (focused === model) queueMicrotask(() => box.focus());
    return label;
  }));
  const names = [...new Set([...curves.values()].flatMap((curve) => Object.keys(curve.columns)))].filter((name) => name !== "epoch" && name !== "step" && !name.startsWith("val_"));
  const second = at("second"), before = second.value;
  if ([...second.options].map((option) => option.value).join() === names.join()) return;
  second.replaceChildren(...names.map((name) => make("option", { value: name }, title(name))));
  second.value = names.includes(before) ? before : names.includes("loss") ? "loss" : names[0];
}

function drawCurves() {
  if (!curves.size) return;
  const measure = [...curves.values()].map((curve) => curve.measure).find((name) => name) ?? "loss";
  at("first-title").textContent = title(measure);
  draw(at("first-chart"), measure);
  draw(at("second-chart"), at("second").value);
}

function draw(place, name) {
  const order = models();
  const lines = [...curves.values()].filter((curve) => !hidden.has(curve.model) && curve.columns[name]).map((curve) => ({
    name: `${curve.model}, seed ${seedOf(curve)}`, x: curve.columns.epoch.map((epoch) => epoch + 1), y: curve.columns[name],
    colour: colour(order.indexOf(curve.model)), dash: [null, "6 3", "2 3", "8 3 2 3"][curve.seed % 4],
  }));
  const seeds = [...new Set([...curves.values()].map((curve) => curve.seed))].sort((a, b) => a - b);
  at("seeds").textContent = seeds.length > 1 ? `Line styles: ${seeds.map((seed) => `seed ${seed} ${STROKES[seed % 4]}`).join(", ")}.` : "";
  const few = lines.every((line) => line.x.length <= 60);
  place.replaceChildren(lineChart({ lines, label: `${title(name)} by epoch: ${lines.map((line) => line.name).join("; ")}`, xLabel: "epoch", width: widthOf(place), height: 220, points: few, whole: true }));
}

function showModels() {
  const jobs = new Map([...fits, ...curves].map(([key, entry]) => [key, { model: entry.model, seed: entry.seed, fold: entry.fold, labels: entry.labels }]));
  if (run.at_work) jobs.set(jobName(run.at_work), run.at_work);
  at("models").hidden = jobs.size === 0 && run.missing.length === 0;
  const measures = [...curves.values()].map((curve) => curve.measure).filter(Boolean);
  if (measures.length) at("measure").textContent = `best ${title(measures[0])}`;
  const order = models();
  const best = Math.max(...[...curves.values()].map((curve) => curve.best ?? -Infinity));
  const rows = [...jobs].map(([key, job]) => ({ ...job, key, curve: curves.get(key), fit: fits.get(key) }));
  rows.sort((a, b) => (b.curve ? 1 : 0) - (a.curve ? 1 : 0) || (order.indexOf(a.model) - order.indexOf(b.model)) || a.model.localeCompare(b.model) || a.seed - b.seed || (a.fold ?? 0) - (b.fold ?? 0) || (a.labels ?? 0) - (b.labels ?? 0));
  rows.forEach((row, place) => { row.same = place > 0 && rows[place - 1].model === row.model && rows[place - 1].fit; });
  at("rows").replaceChildren(...rows.map((row) => {
    const working = run.at_work && jobName(run.at_work) === row.key;
    const name = make("th", { scope: "row" }, order.includes(row.model) ? make("i", { "aria-hidden": "true" }) : null, row.model, row.fit?.title && !row.same ? make("span", { class: "about" }, row.fit.title) : null);
    name.style.setProperty("--mark", colour(Math.max(0, order.indexOf(row.model))));
    const columns = row.curve?.columns;
    return make("tr", { class: working ? "at-work" : null }, name, make("td", {}, seedOf(row)),
      make("td", {}, row.fit ? (row.fit.family === "baseline" ? "baseline, done" : "done") : working ? "training" : "not finished"),
      number(row.curve ? short(row.curve.best, 4) : "–", row.curve && row.curve.best === best), number(row.curve?.best_epoch == null ? "–" : row.curve.best_epoch + 1),
      number(row.curve ? count(row.curve.num_epochs) : "–"), number(columns?.records_per_s ? count(Math.round(mean(columns.records_per_s))) : "–"),
      number(columns?.waiting ? `${(100 * mean(columns.waiting)).toFixed(0)} %` : "–"), number(count(row.fit?.parameters)),
      number(row.fit ? duration(row.fit.fit_s) : "–"), number(row.fit ? duration(row.fit.score_s) : "–"));
  }));
  at("missing").replaceChildren(...run.missing.map(({ model, why }) => make("li", {}, make("strong", {}, model), `: left out, ${why}`)));
}

function drawMemory() {
  at("memory").hidden = !memory.bytes.length;
  if (!memory.bytes.length) return;
  const peak = Math.max(...memory.bytes), unit = peak >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
  const long = memory.time_s.at(-1) > 7200 ? [3600, "hours"] : memory.time_s.at(-1) > 120 ? [60, "minutes"] : [1, "seconds"];
  const x = memory.time_s.map((time) => time / long[0]), lines = [{ name: "memory", x, y: memory.bytes.map((size) => size / unit[0]) }];
  if (memory.budget) lines.push({ name: "budget", x: [x[0], x.at(-1)], y: [memory.budget / unit[0], memory.budget / unit[0]], colour: "var(--line1)", dash: "5 4" });
  const share = memory.budget ? `, ${(100 * peak / memory.budget).toFixed(0)} % of the budget of ${bytes(memory.budget)} (dashed)` : "";
  at("memory-title").textContent = `Memory, ${unit[1]}`;
  at("memory-text").textContent = `Peak of the process and its children: ${bytes(peak)}${share}.`;
  at("memory-chart").replaceChildren(lineChart({ lines, label: `Memory over time, peak ${bytes(peak)}${share}`, xLabel: `${long[1]} since start`, width: widthOf(at("memory-chart")), height: 190, yMin: 0 }));
}

function showReport(report) {
  const there = report.version !== null;
  at("alone").hidden = at("frame").hidden = !there;
  at("make").hidden = !report.can_be_made || (there && !report.is_older);
  at("make").textContent = there ? "Update the report" : "Make the report";
  at("make").disabled = report.is_being_made;
  const text = report.is_being_made ? "Making the report; this takes a few seconds."
    : report.error ? report.error
    : there && report.is_older ? "There are newer scores than this report."
    : there ? "" : report.can_be_made ? "Scores are available; no report yet." : "Available when the first model is finished.";
  if (at("report-text").textContent !== text) at("report-text").textContent = text;
  if (there && report.version !== reportVersion) at("frame").src = `files/report?version=${report.version}`;
  reportVersion = report.version;
}

function showSettings(found) {
  epochs = found.epochs;
  at("settings").replaceChildren(...Object.entries(found.tables).map(([name, rows]) => make("details", { open: name !== "Environment" }, make("summary", {}, name),
    make("dl", { class: "facts" }, ...rows.flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)])))));
  if (run) showState();
}

function number(text, best = false) {
  return make("td", { class: best ? "number best" : "number" }, text);
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.reduce((sum, value) => sum + value, 0) / Math.max(known.length, 1);
}

function title(name) {
  return TITLES[name] ?? name.replace(/^val_/, "validation ").replaceAll("_", " ");
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${short(seconds, 2)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
