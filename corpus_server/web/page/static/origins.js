// Shows where documents came from: values of their metadata, always as text.

import { h, facts, visible, rowDocument } from "./dom.js";

const LONGEST = 160;

function text(value) {
  if (value === null) return null;
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}

const beginning = (shown) => (shown.length > LONGEST ? `${shown.slice(0, LONGEST)}\u2026` : shown);

// The documents of a row by id and source; null if none has a name.
export function origins(documents, corpus) {
  const named = (documents ?? []).filter((each) => each.id !== null || each.source !== null);
  if (!named.length) return null;
  return h("ul", { class: "origins", "aria-label": "Documents of the row" }, named.map((each) => h("li", {},
    h("a", { href: rowDocument(corpus, each.document) }, `document ${each.document}`),
    [each.id, each.source].map(text).filter((shown) => shown !== null)
      .map((shown) => h("span", {}, beginning(shown))))));
}

function whole(value) {
  const shown = text(value);
  if (shown === null || shown.length <= LONGEST) return shown;
  return h("details", {}, h("summary", {}, beginning(shown)), shown);
}

// All that is known of one document.
export function metadata(response) {
  if (response.metadata_problem) return [h("p", { class: "problem" }, response.metadata_problem)];
  if (!response.metadata) return [];
  return [h("h3", {}, `Document ${response.document}`), facts(Object.entries(response.metadata).map(([name, value]) => [visible(name), whole(value)]))];
}
