// Shows spans of tokens as text: documents alternate in shade, end-of-text tokens are marked, and so is what a loss mask leaves out.

import { h, isInvisible, visible, corpusAddress, rowDocument } from "./dom.js";

// What the marks of a text mean, of those that it has.
export function legend(list) {
  return [
    list.some((span) => span.document !== null) ? h("span", {}, h("span", { class: "document" }, "N"), "document N begins here, or goes on from before; neighbours differ in shade") : null,
    list.some((span) => span.is_eot) ? h("span", {}, h("span", { class: "eot" }, "\u27e8end of text\u27e9"), list.some(beginsDocument) ? " begins a document" : " ends a document") : null,
    list.some((span) => span.text_ends) ? h("span", {}, h("span", { class: "token" }, "box"), "a token; the pointer over it shows its id") : null,
    list.some((span) => span.loss_mask === 0) ? h("span", {}, h("span", { class: "masked" }, "like this"), ": a loss mask leaves these tokens out of the loss") : null,
    list.some(isWeighted) ? h("span", {}, h("span", { class: "weighted" }, "like this"), ": these tokens have a weight in the loss; the pointer over them shows it") : null,
  ].filter((each) => each !== null);
}

// End of text belongs to the document that it ends, or, as llm.c writes it, to the one that it begins.
const beginsDocument = (span, n, list) => span.is_eot && span.document !== null && list[n + 1]?.document === span.document && list[n + 1].start === span.start + 1;

const isWeighted = (span) => span.loss_mask !== null && span.loss_mask !== 0 && span.loss_mask !== 1;

// What a loss mask says of a span: its class, and words behind where it lies.
const marked = (span) => span.loss_mask === 0 ? [" masked", ", left out of the loss"] : isWeighted(span) ? [" weighted", `, weight ${span.loss_mask} in the loss`] : ["", ""];

// Ids stand in place of the text, a box for each token.
export const showIds = (isOn) => document.body.classList.toggle("ids", isOn);

const ids = (span) => h("span", { class: "ids", "aria-hidden": "true" }, span.tokens.map((token) => h("span", {}, String(token))));

// The text of a span; a box for each token, if the response says where their texts end. The pointer over a box shows the id.
function textOf(span) {
  if (span.is_eot) return `\u27e8${span.text && !isInvisible(span.text) ? visible(span.text) : "end of text"}\u27e9`;
  if (span.text === null) return span.tokens.join(" ");
  if (!span.text_ends) return visible(span.text);
  const characters = Array.from(span.text);
  return span.tokens.map((token, n) => {
    const text = characters.slice(n ? span.text_ends[n - 1] : 0, span.text_ends[n]).join("");
    return h("span", { class: "token", title: `token ${span.start + n}: ${token}` }, visible(text));
  });
}

// isOfRow: documents have the numbers of the files, also where the corpus is a view.
export function spans(list, corpus, isOfRow = false) {
  let shade = 0;
  return h("div", { class: "text" }, list.flatMap((span, n) => {
    const isFirst = n === 0 || list[n - 1].document !== span.document;
    if (n && (span.document === null ? list[n - 1].is_eot : isFirst)) shade = 1 - shade;
    const [kind, said] = marked(span);
    const where = `${span.document === null ? "" : `document ${span.document}, `}tokens ${span.start} to ${span.start + span.tokens.length - 1}${said}`;
    const shown = h("span", { class: span.is_eot ? `span eot${kind}` : `span shade${shade}${kind}`, title: where }, textOf(span));
    const link = span.document === null || !isFirst ? null : h("a", { class: "document", href: isOfRow ? rowDocument(corpus, span.document) : `${corpusAddress(corpus)}?document=${span.document}`,
      "aria-label": `Document ${span.document} of ${corpus}` }, `${span.document}`);
    return [link, shown, ids(span)].filter((each) => each !== null);
  }));
}
