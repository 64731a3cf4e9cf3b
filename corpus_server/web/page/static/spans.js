// Shows spans of tokens as text: documents alternate in shade, end-of-text tokens are marked, and so is what a loss mask leaves out.

import { h, visible, corpusAddress, rowDocument } from "./dom.js";

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
    const shown = h("span", { class: `span shade${shade}${masked}`, title: masked ? `${where}, no targets of training` : where }, text);
    if (span.document === null || (n && list[n - 1].document === span.document)) return shown;
    const link = h("a", { class: "document", href: isOfRow ? rowDocument(corpus, span.document) : `${corpusAddress(corpus)}?document=${span.document}`,
      "aria-label": `Document ${span.document} of ${corpus}` }, `${span.document}`);
    return [link, shown];
  }).flat());
}
