import { $, h, bytes, code, facts, number, parameters, plural, searched, table, tokenizer, visible, corpusAddress } from "../dom.js";
import { address, ask, fill, problem, Problem } from "../api.js";
import { metadata } from "../origins.js";
import { legend, spans } from "../spans.js";
import { chart } from "../chart.js";
import { listDocuments } from "../documents.js";

const name = parameters.name;
const route = `/v1/corpora/${encodeURIComponent(name)}`;
const query = new URLSearchParams(location.search);
const COUNT = 1024;
// A view has a file of its own; the shards are those of its corpus.
const size = (corpus) => bytes(corpus.view ? corpus.view.size_bytes : corpus.shards.reduce((sum, shard) => sum + shard.size_bytes, 0));
let numTokens = 0;
$("#name").textContent = name;
document.title = `${name} - corpus-server`;

function here(changes) {
  history.replaceState(null, "", address(location.pathname, changes));
}

function showTokens(start, above = []) {
  const target = address(`${route}/spans`, { start, count: COUNT, targets: "true" });
  here({ start });
  $("#go").elements.start.value = start;
  $("#go").elements.document.value = "";
  return fill($("#text"), target, (response) => [
    ...above,
    h("p", {}, `tokens ${number(response.start)} to ${number(Math.max(response.start, response.stop - 1))} of ${number(response.num_tokens)}`),
    h("p", { class: "legend" }, legend(response.spans)),
    spans(response.spans, name),
    h("div", { class: "buttons" },
      h("button", { type: "button", disabled: response.start === 0, onclick: () => showTokens(Math.max(0, response.start - COUNT)) }, "Before"),
      h("button", { type: "button", disabled: response.stop >= response.num_tokens, onclick: () => showTokens(response.stop) }, "After"),
      h("a", { class: "button", href: address("/page/lookup", { corpus: name, token: response.base_start }) }, "Which steps see it?")),
  ]);
}

async function showDocument(document_, base) {
  $("#go").elements.document.value = document_;  // also where there is none of that number
  try {
    // The range alone: a document may be longer than a page.
    const response = await ask(address(`${route}/documents/${document_}`, { format: "json", base }));
    await showTokens(response.start, metadata(response));
    here({ document: response.document });
    $("#go").elements.document.value = response.document;
    $("#go").elements.start.value = "";
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("#text").replaceChildren(problem(error));
  }
}

$("#go").addEventListener("submit", (event) => {
  event.preventDefault();
  const form = new FormData(event.target);
  if (form.get("document")) showDocument(form.get("document"));
  else showTokens(form.get("start") || 0);
});
$("#random").addEventListener("click", () => showTokens(Math.floor(Math.random() * Math.max(1, numTokens - COUNT))));

const place = (each) => h("p", { class: "found" },
  h("a", { href: `${corpusAddress(name)}?start=${each.token}` }, `token ${number(each.token)}`),
  each.document === null ? "" : `, document ${number(each.document)}`,
  h("span", { class: "text" }, visible(each.before), h("mark", {}, visible(each.text)), visible(each.after)));

const PLACES = 200;  // of a search of all; one button goes on
let searchNumber = 0;  // of the latest search: an earlier one ends

$("#search").addEventListener("submit", (event) => {
  event.preventDefault();
  searchNumber += 1;
  const text = new FormData(event.target).get("text");
  if (event.submitter?.value === "whole") searchAll(text, 0);
  else fill($("#found"), address(`${route}/search`, { text }), (response) => [h("p", {}, searched(response)), ...response.found.map(place)]);
});

// Each response searches some million tokens, so that the page shows how far the search has come.
async function searchAll(text, from) {
  const own = searchNumber, places = h("div"), said = h("p", { role: "status" });
  const bar = h("progress", { max: numTokens, value: from, "aria-label": "Searched" });
  const stop = h("button", { type: "button", onclick: () => { searchNumber += 1; told("Stopped: ", start); } }, "Stop");
  let start = from, count = 0, isComplete = true;
  const told = (state, until) => {
    bar.value = until;
    said.textContent = `${state}${plural(count, "place")} in ${number(until - from)} of ${plural(numTokens, "token")} (${Math.floor((100 * (until - from)) / Math.max(1, numTokens))} %)`;
  };
  const goOn = () => h("button", { type: "button", onclick: () => { searchNumber += 1; searchAll(text, start); } }, "Go on");
  $("#found").replaceChildren(bar, said, h("p", { class: "buttons" }, stop), places);
  told("Searching: ", start);
  try {
    while (own === searchNumber) {
      const response = await ask(address(`${route}/search`, { text, whole: "true", start, limit: 100 }));
      if (own !== searchNumber) return;
      places.append(...response.found.map(place));
      count += response.found.length;
      isComplete &&= response.num_searched_tokens >= (response.next_start ?? numTokens) - start;
      start = response.next_start ?? numTokens;
      told("Searching: ", start);
      if (response.next_start === null) break;
      if (count >= PLACES) { stop.replaceWith(goOn()); return told("Paused: ", start); }
    }
    stop.remove();
    told(isComplete ? "All searched: " : "Some blocks could not be read as text: ", start);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    stop.replaceWith(goOn());
    places.append(problem(error));
  }
}

listDocuments(name, route, (number_) => { showDocument(number_); $("#go").scrollIntoView(); });
fill($("#facts"), route, (corpus) => {
  numTokens = corpus.num_tokens;
  $("#shards").replaceChildren(table(["shard", "format", "tokens", "dtype", "size"],
    corpus.shards.slice(0, 1000).map((shard) => [shard.name, shard.format, shard.num_tokens, shard.dtype, bytes(shard.size_bytes)])));
  if (query.has("document")) showDocument(query.get("document"), query.get("base"));
  else showTokens(query.get("start") ?? 0);
  return [facts([
    ["tokens", corpus.num_tokens], ["documents", corpus.num_documents ?? "no index"], ["dtype", corpus.dtype],
    ["size", size(corpus)],
    ["end of text", corpus.eot], ["tokenizer", tokenizer(corpus)],
    // Of a view: what chose its documents. The shards are those of its corpus.
    ...Object.entries(corpus.view?.made ?? {}).map(([option, value]) => [`view ${option}`, h("code", {}, String(value))]),
    ...(corpus.view ? [["documents of its corpus", corpus.view.num_documents]] : []),
    ["fingerprint", h("code", {}, corpus.fingerprint)],
  ]), code("Python", `from corpus_client import CorpusLoader\n\nloader = CorpusLoader("${location.origin}", corpus=${JSON.stringify(name)}, seq_len=1024, global_batch_size=512, seed=1337, run="my-run")`)];
}, true);

fill($("#statistics"), `${route}/statistics`, (response) => {
  const lengths = response.document_lengths;
  const shown = [h("p", {}, `Of ${number(response.num_sampled_tokens)} sampled tokens, ${number(response.num_distinct_tokens)} are distinct.`)];
  if (lengths && lengths.num_sampled) {
    shown.push(h("h3", {}, "Lengths of documents"),
      h("p", {}, `${plural(lengths.num_sampled, "document")} sampled: median ${number(lengths.quantiles["0.5"])}, mean ${number(lengths.mean)}, longest ${plural(lengths.quantiles["1.0"], "token")}`),
      chart({ x: lengths.histogram.map((_, n) => n), bars: true, xLabel: "tokens, at least",
        xText: (n) => (Number.isInteger(n) && n >= 0 && n < lengths.histogram.length ? number(lengths.histogram[n][0]) : ""), series: [{ label: "documents", values: lengths.histogram.map(([, count]) => count) }] }));
  }
  if (response.counts_by_rank.length > 1) {
    shown.push(h("h3", {}, "Frequencies of tokens"),
      chart({ x: response.counts_by_rank.map(([rank]) => rank), logX: true, logY: true, xLabel: "rank",
        series: [{ label: "occurrences", values: response.counts_by_rank.map(([, count]) => count) }] }));
  }
  shown.push(h("details", {}, h("summary", {}, "Most frequent tokens"), table(["token", "text", "occurrences"],
    response.top_tokens.map((each) => [String(each.token), h("code", { class: "token" }, each.text === null ? "" : JSON.stringify(visible(each.text))), each.count]))));
  return shown;
});
