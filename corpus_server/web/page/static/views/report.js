import { $, code, corpusAddress, h, number, parameters, planLink, plural, stepAddress, table, visible } from "../dom.js";
import { address, ask, fill, problem, Problem, quoted } from "../api.js";

const AROUND = 60;  // tokens before and behind a span
const LONGEST = 1000;  // tokens of a span that are shown

const route = `/v1/reports/${encodeURIComponent(parameters.name)}`;
const query = new URLSearchParams(location.search);
let plan = null;
let unit = "token";
let served = new Set();

$("#name").textContent = visible(parameters.name);
document.title = `contamination, ${visible(parameters.name)} - corpus-server`;

const percent = (share) => `${Math.floor(share * 100)} %`;
const textOf = (spans) => spans.map((each) => (each.text === null ? each.tokens.join(" ") : visible(each.text))).join("");

function head({ report }) {
  plan = report.plan ?? null;
  unit = report.by === "text" ? "byte" : "token";
  served = new Set(report.corpora.filter((each) => each.is_served).map((each) => each.corpus));
  $("#about").replaceChildren(`An item is found if ${plural(report.n, unit)} of it ${report.n === 1 ? "stands" : "stand together"} in a corpus. ${plural(report.num_items, "item")} looked for`,
    report.min_share ? `, those covered by less than ${percent(report.min_share)} left out` : "",
    ...(plan ? ["; steps are those before ", number(report.before_step), " of plan ", planLink(plan)] : []), ".");
  const shares = Object.keys(report.corpora[0]?.num_items_by_share ?? {});
  $("#corpora").replaceChildren(table(["corpus", "tokens", "items found", ...shares.map((each) => `${percent(Number(each))} and more`), "places", "documents", ...(plan ? ["items seen", "first step"] : [])],
    report.corpora.map((each) => [
      each.is_served ? h("a", { href: corpusAddress(each.corpus) }, visible(each.corpus)) : visible(each.corpus), each.num_tokens, each.num_items_found,
      ...shares.map((share) => each.num_items_by_share[share] ?? ""), each.num_spans, each.num_documents_found ?? "no index",
      ...(plan ? [each.num_items_seen ?? "", each.first_step ?? "none"] : [])])),
  ...report.corpora.filter((each) => !each.is_served).map((each) => h("p", { class: "warning" }, `The server has no corpus ${visible(each.corpus)} with these tokens: text around a place cannot be shown.`)));
  const folder = quoted(`REPORTS/${parameters.name}`);
  $("#without").replaceChildren(code(plan ? "Go on without these documents" : "Go on without these documents, from step N on",
    `corpus-server plans successor ${plan ?? "PLAN"} ${quoted(location.origin)} --report ${folder}${plan ? "" : " --at-step N"}`));
}

function show(first) {
  history.replaceState(null, "", address(location.pathname, { first: first || "" }));
  fill($("#items"), address(route, { first }), (response) => {
    head(response);
    const turn = (label, to) => h("button", { type: "button", disabled: to === null, onclick: () => show(to) }, label);
    const { items, too_long: tooLong, next_first: next, report } = response;
    return [
      ...items.map(item),
      tooLong.length ? h("p", { class: "warning" }, `${plural(tooLong.length, "item")} with too many places to be shown: number ${tooLong.join(", ")} of the report.`) : "",
      items.length ? "" : h("p", {}, "Nothing was found."),
      h("div", { class: "buttons" }, turn("Before", first > 0 ? Math.max(0, first - 20) : null), turn("After", next),
        h("span", { class: "quiet" }, `${number(first + (items.length || tooLong.length ? 1 : 0))} to ${number(first + items.length + tooLong.length)} of ${number(report.num_items_listed)}`)),
    ];
  });
}

function item(each) {
  const seen = each.first_step === undefined ? "" : each.first_step === null ? ", seen by no step" : `, first seen by step ${number(each.first_step)}`;
  return h("section", { class: "card item" },
    h("h3", {}, `${visible(each.source)}, item ${number(each.number)}`),
    h("p", {}, `${percent(each.share)} of ${plural(each.num_tokens, unit)} in ${visible(each.corpus)}, ${plural(each.num_spans, "place")}${seen}`),
    h("div", { class: "text" }, each.parts.map((part) => h(part.is_found ? "mark" : "span", {}, visible(part.text)))),
    table(["document", "first token", "tokens", ...(plan ? ["steps"] : []), "text"], each.spans.map((span) => row(each, span)), `Places of item ${each.item}`, { stacked: true }),
    each.num_spans > each.spans.length ? h("p", { class: "quiet" }, `In report.json: ${plural(each.num_spans - each.spans.length, "more place")}.`) : "",
    each.is_complete ? "" : h("p", { class: "quiet" }, "Other places are known and not listed."));
}

function row(each, span) {
  const isServed = served.has(each.corpus);
  const text = h("div", {}, isServed ? h("button", { type: "button", class: "link", "aria-label": `Show the text at token ${span.start}`, onclick: () => around(text, each.corpus, span) }, "show") : "");
  return [
    h("span", {}, ...span.documents.map((document_) => (isServed ? h("a", { class: "document", href: `${corpusAddress(each.corpus)}?document=${document_}` }, number(document_)) : `${number(document_)} `))),
    span.start, span.num_tokens, ...(plan ? [steps(span.seen)] : []), text];
}

const steps = (seen) => (!seen ? "" : seen.steps.length
  ? h("span", { class: "steps" }, seen.steps.flatMap((step, n) => [n ? ", " : "", h("a", { href: stepAddress(plan, step) }, number(step))]), seen.is_complete ? "" : " and more")
  : "none");

// The text of the document before, in and behind a span, each decoded by itself.
async function around(element, corpus, { start, stop }) {
  const spans = async (from, to) => (from < to ? textOf((await ask(address(`/v1/corpora/${encodeURIComponent(corpus)}/spans`, { start: from, count: to - from }))).spans) : "");
  try {
    const end = Math.min(stop, start + LONGEST);
    const [before, inside, behind] = await Promise.all([spans(Math.max(0, start - AROUND), start), spans(start, end), spans(stop, stop + AROUND)]);
    element.replaceChildren(h("div", { class: "text", tabindex: "0" }, before, h("mark", {}, inside, end < stop ? " ..." : ""), behind));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    element.replaceChildren(problem(error));
  }
}

show(Number(query.get("first")) || 0);
