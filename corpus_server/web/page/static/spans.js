// Shows spans of tokens as text: documents alternate in shade, end-of-text tokens are marked, and so is what a loss mask leaves out.

import { h, visible, corpusAddress, rowDocument } from "./dom.js";

// What the marks of a text mean, of those that it has.
export function legend(list) {
  return [
    list.some((span) => span.document !== null) ? h("span", {}, h("span", { class: "document" }, "N"), "a document begins; its shade alternates") : null,
    list.some((span) => span.is_eot) ? h("span", {}, h("span", { class: "eot" }, "\u27e8end of text\u27e9"), " ends a document") : null,
    list.some((span) => span.is_target === false) ? h("span", {}, h("span", { class: "masked" }, "like this"), ": a loss mask leaves these tokens out of the loss") : null,
  ].filter((each) => each !== null);
}

// Ids stand in place of the text, a box for each token.
export const showIds = (isOn) => document.body.classList.toggle("ids", isOn);

const ids = (span) => h("span", { class: "ids", "aria-hidden": "true" }, span.tokens.map((token) => h("span", {}, String(token))));

// isOfRow: documents have the numbers of the files, also where the corpus is a view.
export function spans(list, corpus, isOfRow = false) {
  let shade = 0;
  let last = null;
  return h("div", { class: "text" }, list.map((span, n) => {
    if (n && (span.document !== last || list[n - 1].is_eot)) shade = 1 - shade;
    last = span.document;
    const where = `${span.document === null ? "" : `document ${span.document}, `}tokens ${span.start} to ${span.start + span.tokens.length}`;
    const masked = span.is_target === false ? " masked" : "";
    if (span.is_eot) return h("span", { class: `eot${masked}`, title: where }, `\u27e8${span.text ? visible(span.text) : "end of text"}\u27e9`);
    const text = span.text === null ? span.tokens.join(" ") : visible(span.text);
    const shown = h("span", { class: `span shade${shade}${masked}`, title: masked ? `${where}, left out of the loss` : where }, text);
    if (span.document === null || (n && list[n - 1].document === span.document)) return [shown, ids(span)];
    const link = h("a", { class: "document", href: isOfRow ? rowDocument(corpus, span.document) : `${corpusAddress(corpus)}?document=${span.document}`,
      "aria-label": `Document ${span.document} of ${corpus}` }, `${span.document}`);
    return [link, shown, ids(span)];
  }).flat());
}
