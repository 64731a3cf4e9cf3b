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

export function table(head, rows) {
  // A column of numbers stands to the right, its name too.
  const isNumber = head.map((_, column) => rows.some((row) => typeof row[column] === "number"));
  const cells = (tag, row) => row.map((cell, column) => h(tag, { class: isNumber[column] ? "number" : null },
    typeof cell === "number" ? number(cell) : cell));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") },
    h("table", {}, h("thead", {}, h("tr", {}, cells("th", head))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells("td", row))))));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value))));
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const fewDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
export const few = (value) => fewDigits.format(value);
export const number = (value) => (Number.isInteger(value) ? whole : digits).format(value);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${few(value)} ${units[unit]}`;
}

export const short = (id) => id.slice(0, 12);
export const planLink = (id) => h("a", { href: `/page/plans/${id}` }, h("code", { title: id }, short(id)));
export const stepAddress = (plan, step) => `/page/plans/${plan}/steps/${step}`;
export const recordingAddress = (name) => `/page/recordings/${encodeURIComponent(name)}`;
export const corpusAddress = (name) => `/page/corpora/${encodeURIComponent(name)}`;

// Replaces what would be invisible, or would turn the text around: control and bidirectional characters.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const visible = (text) => text.replace(INVISIBLE, (character) => {
  const code = character.codePointAt(0);
  return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
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

export function code(label, text, isOpen = false) {
  return h("details", { class: "code", open: isOpen }, h("summary", {}, label), copyButton(text, "Copy"), h("pre", { tabindex: "0" }, text));
}
