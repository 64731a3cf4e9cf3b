import { $, h, dot, number, parameters, plural, short, stepAddress, visible, corpusAddress } from "../dom.js";
import { address, ask, instead, problem, Problem, request } from "../api.js";
import { origins } from "../origins.js";
import { legend, showIds, spans } from "../spans.js";
import { chart, colour } from "../chart.js";
import { points, spikes } from "../spikes.js";
import { denied, proposed, skipped, successor } from "../successor.js";

const id = parameters.plan_id;
const query = new URLSearchParams(location.search);
const PAGE = 8;
const SKIMMED_STEPS = 32;
const SKIMMED_ROWS = 4;
let step = /^[0-9]+$/.test(parameters.step) ? Number(parameters.step) : parameters.step;  // else the server says what is wrong
let rank = Number(query.get("rank") ?? 0);
let worldSize = Number(query.get("world_size") ?? 1);
let until = query.get("until");
let plan = null;
let spiked = new Set();
const form = $("#go");
$("#plan-link").href = `/page/plans/${id}`;
$("#plan-link").append(h("code", { title: id }, short(id)));

const seen = [];  // the spans of all rows that are shown
const sources = () => Object.keys(plan.sources);
// A plan that balances ranks deals the rows of each step anew.
const ranks = () => (worldSize > 1 ? { world_size: worldSize } : {});
const stageOf = (at) => plan.stages.findLast((each) => each.first_step !== null && each.first_step <= at);

function row(each) {
  const k = sources().indexOf(each.corpus);
  const source = h("a", { class: "source", href: corpusAddress(each.corpus) }, each.corpus);
  source.style.borderColor = colour(k);
  const documents = [...new Set(each.spans.map((span) => span.document).filter((number_) => number_ !== null))];
  const article = h("article", { class: "train-row", id: `row-${each.row}`, tabindex: "0", "aria-label": `Row ${each.row}` },
    h("header", {}, h("strong", {}, `row ${each.row}`), source, h("span", {}, `${each.shard}, from token ${number(each.start)}${each.unused ? `, ${plural(each.unused, "token")} unused` : ""}`),
      h("a", { href: address("/page/lookup", { plan: id, corpus: each.corpus, token: each.start }) }, "other steps"),
      documents.length ? h("button", { type: "button", onclick: () => deny(each.corpus, documents) },
        documents.length === 1 ? "deny this document" : `deny these ${documents.length} documents`) : null),
    origins(each.documents, each.corpus),
    spans(each.spans, each.corpus, true));
  article.style.borderColor = colour(k);
  return article;
}

function place() {
  history.replaceState(null, "", address(stepAddress(id, step), { ...(worldSize > 1 ? { rank, world_size: worldSize } : {}), until }));
}

async function show(first = 0) {
  form.elements.step.value = step;
  form.elements.rank.value = rank;
  form.elements.world_size.value = worldSize;
  $("#step-number").textContent = Number.isInteger(step) ? number(step) : step;
  document.title = `step ${step} - corpus-server`;
  place();
  try {
    plan ??= await ask(`/v1/plans/${id}`);
    const size = stageOf(step)?.global_batch_size ?? (await ask(address(`/v1/plans/${id}/rows`, { step, count: 1 }))).global_batch_size;
    const share = Math.floor(size / worldSize);
    const begin = rank * share + first;
    const count = Math.min(PAGE, share - first);
    const target = address(`/v1/plans/${id}/rows`, { step, first: begin, count, targets: "true", text_ends: $("#borders").checked ? "true" : null, ...ranks() });
    const response = await ask(target);
    if (!first) seen.length = 0;
    seen.push(...response.rows.flatMap((each) => each.spans));
    $("#legend").replaceChildren(...sources().map((name, k) => h("span", {}, dot(colour(k)), name)), ...legend(seen));
    const shown = [...response.problems.map((each) => h("p", { class: "problem" }, each)), ...response.rows.map(row)];
    if (first) $("#rows").append(...shown, request(target));
    else $("#rows").replaceChildren(...shown, request(target));
    $("#more").hidden = first + count >= share;
    $("#more").onclick = () => show(first + count);
    $("#skip").elements.start.value = response.plan_step;
    $("#skip").elements.stop.value = response.plan_step + 1;
    if (!$("#skim").elements.from.value) fillSkim(step, step + 7);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (plan === null) { instead(error, `/v1/plans/${id}`); return; }
    $("#rows").replaceChildren(problem(error));
    $("#more").hidden = true;
  }
}

function go(to) {
  step = Math.max(0, to);
  return show();
}

// -- several steps

function fillSkim(from, to) {
  $("#skim").elements.from.value = from;
  $("#skim").elements.until.value = to;
}

function beginning(each) {
  const text = each.spans.map((span) => (span.is_eot ? " \u27e8end\u27e9 " : span.text === null ? span.tokens.slice(0, 60).join(" ") : visible(span.text))).join("");
  return h("li", {}, dot(colour(sources().indexOf(each.corpus))), h("span", { class: "text" }, text.replace(/\s+/g, " ").trim().slice(0, 220)));
}

async function skim(from, to) {
  const last = Math.min(to, from + SKIMMED_STEPS - 1);
  until = to;
  fillSkim(from, to);
  place();
  const holder = $("#skimmed");
  holder.replaceChildren();
  try {
    plan ??= await ask(`/v1/plans/${id}`);
    for (let at = from; at <= last; at += 1) {
      const share = Math.floor(stageOf(at).global_batch_size / worldSize);
      const target = address(`/v1/plans/${id}/rows`, { step: at, first: rank * share, count: Math.min(SKIMMED_ROWS, share), ...ranks() });
      const response = await ask(target);
      holder.append(h("article", { class: spiked.has(at) ? "card spike" : "card", "aria-current": at === step ? "step" : null },
        h("h2", {}, h("a", { href: stepAddress(id, at), onclick: (event) => { event.preventDefault(); go(at); $("#legend").scrollIntoView(); } }, `Step ${number(at)}`),
          spiked.has(at) ? h("span", { class: "badge" }, "spike") : null),
        h("ol", {}, response.rows.map(beginning)),
        share > SKIMMED_ROWS ? h("p", { class: "quiet" }, `and ${number(share - SKIMMED_ROWS)} more rows`) : null));
      if (at === last) holder.append(request(target));
    }
    if (last < to) holder.append(h("button", { type: "button", onclick: () => skim(last + 1, to) }, `Steps from ${number(last + 1)}`));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    holder.append(problem(error));
  }
}
$("#skim").addEventListener("submit", (event) => {
  event.preventDefault();
  const [from, to] = ["from", "until"].map((name) => Number(event.target.elements[name].value));
  step = from;
  show();
  skim(from, Math.max(from, to));
});

// -- successors

// Of a plan that continues others only what comes after its last stage can change.
function continued() {
  if (plan.root) $("#successor").replaceChildren(h("p", {}, "This plan continues another one: take documents out with ", h("code", {}, "loader.extend(exclude=...)"), "."));
  return Boolean(plan.root);
}

function deny(corpus, documents) {
  if (continued()) return;
  const at = Number($("#skip").elements.start.value);
  const what = `${documents.length === 1 ? "Document" : "Documents"} ${documents.join(", ")} of ${corpus} ${documents.length === 1 ? "is" : "are"} left out from plan step ${number(at)} on.`;
  proposed($("#successor"), what, async () => {
    try {
      await successor($("#successor"), id, await denied(plan.plan, at, corpus, documents), what);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      $("#successor").replaceChildren(problem(error));
    }
  });
}
$("#skip").addEventListener("submit", (event) => {
  event.preventDefault();
  const [start, stop] = ["start", "stop"].map((name) => Number(event.target.elements[name].value));
  if (!continued()) successor($("#successor"), id, skipped(plan.plan, start, stop), `Plan steps ${number(start)} to ${number(stop - 1)} are skipped.`);
});

// -- going from step to step

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const given = new FormData(form);
  rank = Number(given.get("rank") || 0);
  worldSize = Math.max(1, Number(given.get("world_size") || 1));
  go(Number(given.get("step")));
});
$("#previous").addEventListener("click", () => go(step - 1));
$("#next").addEventListener("click", () => go(step + 1));
addEventListener("keydown", (event) => {
  if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "ArrowLeft") go(step - 1);
  if (event.key === "ArrowRight") go(step + 1);
});

$("#borders").addEventListener("change", () => show());
$("#ids").addEventListener("change", (event) => showIds(event.target.checked));

// -- a loss curve

function drawLoss(text) {
  const curve = points(text);
  if (curve.length < 2) return;
  const marks = spikes(curve.map(([, loss]) => loss));
  spiked = new Set(marks.map((n) => curve[n][0]));
  const open = (at) => { go(at); skim(Math.max(0, at - 2), at + 2); };
  $("#curve").replaceChildren(
    chart({ x: curve.map(([at]) => at), xLabel: "step", height: 170, series: [{ label: "loss", values: curve.map(([, loss]) => loss) }], marks, onClick: open }),
    h("p", { class: "buttons" }, marks.length ? "Spikes at steps" : "No spikes.", marks.slice(0, 50).map((n) =>
      h("button", { type: "button", onclick: () => open(curve[n][0]) }, number(curve[n][0])))));
}
$("#loss").addEventListener("input", (event) => drawLoss(event.target.value));
// Anywhere on the page: a browser that gets a file on another place would leave it and show the file.
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", async (event) => {
  const [file] = event.dataTransfer.files;
  if (!file) return;
  event.preventDefault();
  $("#loss-panel").open = true;
  $("#loss").value = (await file.text()).slice(0, 5_000_000);
  drawLoss($("#loss").value);
});

// -- at the beginning: a row that a look-up has found, or a range of steps

const wanted = Number(query.get("row") ?? 0);
await show(wanted - (wanted % PAGE));
if (query.has("row")) $(`#row-${wanted}`)?.focus();
if (until !== null && plan) skim(step, Math.max(step, Number(until)));
