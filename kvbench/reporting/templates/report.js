"use strict";
// Sortable tables: a click on a header sorts the rows by their data-v, else by their text.
for (const table of document.querySelectorAll("table.sort")) {
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const header = button.closest("th");
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    if (table.id === "flips") { browser.sort = { key: header.dataset.key, down }; render(); return; }
    const column = header.cellIndex;
    const body = table.tBodies[0];
    const value = (row) => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent.trim(); };
    [...body.rows].sort((a, b) => compare(value(a), value(b), down)).forEach((row) => body.append(row));
  });
}
function compare(a, b, down) {
  const x = Number(a), y = Number(b);
  const order = a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y) ? x - y : String(a).localeCompare(String(b), "en", { numeric: true });
  return down ? -order : order;
}
// Filters: every typed word must be somewhere in the row.
for (const input of document.querySelectorAll("input[data-filter]")) {
  const table = document.getElementById(input.dataset.filter);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
}
// The flips browser: any arm against any other, item by item.
const PAGE = 50;
const data = JSON.parse(document.getElementById("items").textContent);
// Perplexities differ on every document, so they are listed only when asked for.
const mixed = data.tasks.some((task) => task.nll) && data.tasks.some((task) => !task.nll);
const EVERY = mixed ? "all but perplexity" : "all tasks";
const browser = { sort: { key: "doc", down: false }, shown: PAGE, open: null };
const at = (id) => document.getElementById(id);
function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function options(select, names, chosen) {
  for (const name of names) select.append(element("option", name, { value: name }));
  select.value = chosen;
}
const number = (value, digits = 3) => (value === null || value === undefined ? "undefined" : String(Number(value.toFixed(digits))));
function answer(item, arm) {
  const given = item.a[arm];
  if (given.x !== undefined && given.x !== null) return given.x;
  if (given.k !== undefined) return item.c[given.k].trim();
  return given.l ? given.l.map((v) => number(v, 2)).join(", ") : "";
}
function outcome(item, arm, reference) {
  const a = item.a[arm].s, b = item.a[reference].s;
  if (a === null || b === null) return "undefined";
  if (a === b) return "same";
  return (a > b) === data.tasks[item.t].higher ? "won" : "lost";
}
function rows() {
  const arm = at("flip-arm").value, reference = at("flip-reference").value;
  const task = at("flip-task").value, wanted = at("flip-outcome").value;
  const words = at("flip-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const item of data.items) {
    if (task === EVERY ? data.tasks[item.t].nll && mixed : data.tasks[item.t].name !== task) continue;
    const word = outcome(item, arm, reference);
    if (wanted === "won or lost" ? word !== "won" && word !== "lost" : wanted !== "all items" && word !== wanted) continue;
    const row = { item, outcome: word, task: data.tasks[item.t].name, doc: item.d, gold: item.g ?? "", arm: answer(item, arm), reference: answer(item, reference) };
    row.scores = [item.a[arm].s, item.a[reference].s];
    row.difference = row.scores.includes(null) ? -Infinity : row.scores[0] - row.scores[1];
    const text = [row.task, row.doc, row.gold, row.arm, row.reference, item.p].join(" ").toLowerCase();
    if (words.every((w) => text.includes(w))) found.push(row);
  }
  const { key, down } = browser.sort;
  return found.sort((a, b) => compare(a[key], b[key], down) || compare(a.doc, b.doc, false));
}
function render() {
  const body = at("flips").tBodies[0];
  const found = rows();
  body.replaceChildren();
  at("head-arm").textContent = at("flip-arm").value;
  at("head-reference").textContent = at("flip-reference").value;
  for (const row of found.slice(0, browser.shown)) {
    const line = element("tr", null, { class: "flip", tabindex: "0", "aria-expanded": "false" });
    const sign = { won: "\u25B2 won", lost: "\u25BC lost", same: "= same", undefined: "? undefined" }[row.outcome];
    line.append(element("td", sign, { class: "left " + ({ won: "good", lost: "bad" }[row.outcome] ?? "") }));
    line.append(element("td", row.task, { class: "left" }), element("td", row.doc));
    for (const text of [row.gold, row.arm, row.reference]) {
      const cell = element("td", null, { class: "left" });
      cell.append(element("span", text, { class: "clip" }));
      line.append(cell);
    }
    line.append(element("td", row.scores.map((s) => number(s)).join(" / ")));
    const toggle = () => open(line, row);
    line.addEventListener("click", toggle);
    line.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } });
    body.append(line);
  }
  const left = found.length - browser.shown;
  at("flip-more").hidden = left <= 0;
  at("flip-more").textContent = "Show " + Math.min(left, PAGE) + " more of " + left;
  at("flip-count").textContent = found.length + (found.length === 1 ? " item" : " items");
}
function open(line, row) {
  if (line.getAttribute("aria-expanded") === "true") {
    line.setAttribute("aria-expanded", "false");
    line.nextElementSibling.remove();
    return;
  }
  line.setAttribute("aria-expanded", "true");
  const item = row.item, pair = [at("flip-arm").value, at("flip-reference").value];
  const inner = element("div", null, { class: "inner" });
  inner.append(element("b", "Prompt"), element("pre", (item.cut ? "\u2026 (" + item.cut + " characters before)\n" : "") + item.p));
  const table = element("table"), head = element("tr"), names = item.c.length ? ["choice", ...pair] : ["", ...pair];
  names.forEach((name, i) => head.append(element("th", name, { class: i ? "" : "left" })));
  table.append(element("thead"));
  table.tHead.append(head);
  const list = table.createTBody();
  const add = (label, values, gold, left) => {
    const r = element("tr", null, gold ? { class: "gold" } : {});
    r.append(element("td", label, { class: "left" }));
    for (const v of values) r.append(element("td", v, left ? { class: "left" } : {}));
    list.append(r);
  };
  if (item.c.length) {
    item.c.forEach((choice, i) => {
      const cells = pair.map((arm) => number(item.a[arm].l?.[i]) + (item.a[arm].k === i ? " \u25C4" : ""));
      add(choice.trim() + (item.gc === i ? "  (gold)" : ""), cells, item.gc === i, false);
    });
  } else {
    if (item.g !== null && pair.some((arm) => typeof item.a[arm].x === "string")) add("gold", [item.g, item.g], true, true);
    if (pair.some((arm) => typeof item.a[arm].x === "string")) add("answer", pair.map((arm) => item.a[arm].x ?? ""), false, true);
    if (pair.some((arm) => item.a[arm].r)) add("before the filter", pair.map((arm) => item.a[arm].r ?? item.a[arm].x ?? ""), false, true);
    if (pair.some((arm) => item.a[arm].l)) add("log-likelihood, nats", pair.map((arm) => (item.a[arm].l ?? []).map((v) => number(v)).join(", ")), false, false);
  }
  const task = data.tasks[item.t];
  add(task.nll ? "nats per token" : task.metric, pair.map((arm) => number(item.a[arm].s)), false, false);
  inner.append(element("b", item.c.length ? "Log-likelihood of each choice, nats; \u25C4 marks the arm's pick" : "Answers"), table);
  const detail = element("tr", null, { class: "detail" });
  const cell = element("td", null, { colspan: "7" });
  cell.append(inner);
  detail.append(cell);
  line.after(detail);
}
options(at("flip-arm"), data.arms, data.arm);
options(at("flip-reference"), data.arms, data.reference);
options(at("flip-task"), [EVERY, ...data.tasks.map((task) => task.name)], EVERY);
options(at("flip-outcome"), ["won or lost", "won", "lost", "same", "undefined", "all items"], "won or lost");
for (const id of ["flip-arm", "flip-reference", "flip-task", "flip-outcome", "flip-search"]) {
  at(id).addEventListener("input", () => { browser.shown = PAGE; render(); });
}
at("flip-more").addEventListener("click", () => { browser.shown += PAGE; render(); });
render();
window.addEventListener("beforeprint", () => { for (const folded of document.querySelectorAll("details")) folded.open = true; });
