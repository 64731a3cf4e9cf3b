// Makes elements. Text always becomes a text node: what a corpus holds is never read as markup.

const parameters = JSON.parse(document.body.dataset.parameters);
export { parameters };

export const $ = (selector) => document.querySelector(selector);

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const FIRST_ROWS = 60;
const chosen = new Map();  // by label: how the reader sorts a table, and whether all its rows are shown

const textOf = (cell) => (cell instanceof Node ? cell.textContent : String(cell ?? ""));
const figure = (cell) => (typeof cell === "number" ? cell : Number(textOf(cell).replace(/[,%\u00a0 ]/g, "") || NaN));

function sorted(rows, { column, isDown } = {}) {
  if (column === undefined) return rows;
  const isFigures = rows.every((row) => !Number.isNaN(figure(row[column])));
  const compare = isFigures ? (a, b) => figure(a) - figure(b) : (a, b) => textOf(a).localeCompare(textOf(b), "en", { numeric: true });
  return rows.toSorted((a, b) => (isDown ? -1 : 1) * compare(a[column], b[column]));
}

// The whole table, or its first rows and a button that says how many there are. A click on a name of a column sorts by it.
// `sortedBy`: makes the name of a column, where the server sorts the list of which these rows are a part.
// `find`: a text that rows must hold. `stacked`: on a phone, which is too narrow for more than four columns, each row
// stands as a list of its cells.
export function table(head, rows, label = head.join(", "), { find = "", stacked = head.length > 4, sortedBy = null } = {}) {
  const state = chosen.get(label) ?? {};
  chosen.set(label, state);
  // A column of numbers stands to the right, its name too.
  const isNumber = head.map((_, column) => rows.some((row) => typeof row[column] === "number"));
  const body = h("tbody");
  const more = h("p", { class: "buttons" });
  const names = head.map((name, column) => h("th", { class: isNumber[column] ? "number" : null },
    sortedBy ? sortedBy(name) : rows.length > 1 ? h("button", { type: "button", class: "sort", title: `Sort by ${name}`, onclick: () => {
      Object.assign(state, { column, isDown: state.column === column && !state.isDown });
      draw();
    } }, name) : name));
  function draw() {
    const found = sorted(rows, state).filter((row) => !find || row.some((cell) => textOf(cell).includes(find)));
    const shown = state.isWhole ? found : found.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map((row) => h("tr", {}, row.map((cell, column) => h("td", { class: isNumber[column] ? "number" : null, "data-head": stacked ? head[column] : null },
      typeof cell === "number" ? number(cell) : cell)))));
    names.forEach((each, column) => {
      if (state.column === column) each.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
      else each.removeAttribute("aria-sort");
    });
    more.replaceChildren(...(shown.length < found.length ? [`${number(shown.length)} of ${number(found.length)}`,
      h("button", { type: "button", onclick: () => { state.isWhole = true; draw(); } }, "Show all")] : []));
    more.hidden = shown.length === found.length;
  }
  draw();
  return h("div", { class: stacked ? "listed stacked" : "listed" }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, names)), body)), more);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value))));
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const fewDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
export const few = (value) => fewDigits.format(Math.abs(value) < 5e-4 ? 0 : value); // averages fade, and never reach 0
export const number = (value) => (Number.isInteger(value) ? whole : digits).format(value);
export const plural = (count, name) => `${number(count)} ${name}${count === 1 ? "" : "s"}`;

const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
export const compact = (value) => brief.format(value);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${few(value)} ${units[unit]}`;
}

// What a search has looked at: where nothing was found, the text may still be in the rest.
export const searched = ({ found, complete, searched: share }) => (
  found.length ? `${plural(found.length, "place")} found in ${share}${complete ? "." : "; there may be others."}`
    : complete ? "Not in the corpus: all its tokens were searched." : `Not in the sample: ${share} were searched. The others may have it.`);

// The name of a corpus's tokenizer, with what tells whether that of another corpus is the same.
export function tokenizer({ tokenizer: name, tokenizer_identity: identity }) {
  if (!identity || identity === name) return name ?? "none";
  return h("span", { title: identity }, `${name ?? "none"} `, h("code", { class: "quiet" }, identity.replace(/^xxh3-128=/, "").slice(0, 8)));
}

export const short = (id) => id.slice(0, 12);
export const planLink = (id) => h("a", { href: `/page/plans/${id}` }, h("code", { title: id }, short(id)));
export const plansAddress = (run) => `/page/plans?run=${encodeURIComponent(run)}`;
export const stepAddress = (plan, step) => `/page/plans/${plan}/steps/${step}`;
export const reportAddress = (name) => `/page/reports/${encodeURIComponent(name)}`;
export const recordingAddress = (name) => `/page/recordings/${encodeURIComponent(name)}`;
export const corpusAddress = (name) => `/page/corpora/${encodeURIComponent(name)}`;
// A document of a row: its number is that of the files, also where the corpus is a view.
export const rowDocument = (name, document_) => `${corpusAddress(name)}?document=${document_}&base=true`;

// Replaces what would be invisible, or would turn the text around: control and bidirectional characters.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const isInvisible = (text) => !text.replace(INVISIBLE, "");
export const visible = (text) => text.replace(INVISIBLE, (character) => {
  const code = character.codePointAt(0);
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
});

export function copyButton(text, label) {
  const button = h("button", { type: "button", class: "copy", onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  } }, label);
  return button;
}

export function dot(fill) {
  const element = h("span", { class: "dot", "aria-hidden": "true" });
  element.style.background = fill;
  return element;
}

const WORDS = new Map([[true, "True"], [false, "False"], [null, "None"]]);
const inOneLine = (value) => {
  if (Array.isArray(value)) return `[${value.map(inOneLine).join(", ")}]`;
  if (typeof value !== "object" || value === null) return WORDS.get(value) ?? (typeof value === "string" ? JSON.stringify(value) : String(value));
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${inOneLine(each)}`).join(", ")}}`;
};

// A value of JSON as Python writes it, over as many lines as it needs.
export function python(value, indent = "") {
  const line = inOneLine(value);
  if (typeof value !== "object" || line.length + indent.length <= 88) return line;
  const more = `${indent}    `;
  const parts = Array.isArray(value) ? value.map((each) => python(each, more))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, more)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${parts.map((each) => `${more}${each},\n`).join("")}${indent}${close}`;
}

export const loaderOf = (plan) => `from corpus_client import CorpusLoader\n\nplan = ${python(plan)}\nloader = CorpusLoader("${location.origin}", plan=plan, run="my-run")`;

export function code(label, text, isOpen = false) {
  return h("details", { class: "code", open: isOpen }, h("summary", {}, label), copyButton(text, "Copy"), h("pre", { tabindex: "0" }, text));
}
