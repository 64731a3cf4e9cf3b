import { $, code, h, number, parameters, planLink, plural, stepAddress, table, rowDocument } from "../dom.js";
import { address, ask, fill, problem, Problem, quoted } from "../api.js";
import { chart } from "../chart.js";
import { denied, successor } from "../successor.js";

const route = `/v1/recordings/${encodeURIComponent(parameters.name)}`;
const query = new URLSearchParams(location.search);
const range = $("#range");
const form = $("#documents");
let plan = null;  // the last one, whose earlier steps are those of the plans before it
let chosen = [];

$("#name").textContent = parameters.name;
document.title = `losses of ${parameters.name} - corpus-server`;
for (const name of ["start", "stop"]) range.elements[name].value = query.get(name) ?? "";

const asked = (more) => ({ start: range.elements.start.value, stop: range.elements.stop.value, ...more });
const rowLink = (each) => h("a", { href: `${stepAddress(each.plan, each.step)}?row=${each.row}` }, `step ${number(each.step)}, row ${number(each.row)}`);
const documentLink = (source, document_) => h("a", { class: "document", href: rowDocument(source, document_) }, number(document_));
const rounded = (value) => (value === null ? "\u221e" : Number(value.toPrecision(4)));

function show() {
  history.replaceState(null, "", address(location.pathname, asked()));
  fill($("#losses"), address(`${route}/losses`, asked()), (response) => {
    plan = response.plans.at(-1);
    $("#plans").replaceChildren(response.plans.length > 1 ? "of the plans " : "of the plan ", ...response.plans.flatMap((id, n) => [n ? ", " : "", planLink(id)]));
    form.elements.step.value ||= response.stop;
    const names = Object.keys(response.losses);
    const last = (values) => values.findLast((value) => value !== null) ?? null;
    return [
      chart({ x: response.steps, xLabel: "step", series: names.map((name) => ({ label: name, values: response.losses[name] })), height: 300,
        onClick: (at) => { location.href = stepAddress(plan, at); } }),
      h("p", { class: "quiet" }, `Each point is the mean of ${response.width === 1 ? "a step" : `${number(response.width)} steps`}; ${plural(response.num_rows, "row")}${response.ranks_apart > 1 ? `, those of every ${response.ranks_apart}th rank` : ""}. A click shows what the step saw.`),
      table(["source", "first mean", "last mean", "rows"], names.map((name) => [
        name, response.losses[name].find((value) => value !== null) ?? "", last(response.losses[name]) ?? "", response.rows[name].reduce((sum, each) => sum + each, 0)])),
    ];
  });
  fill($("#spikes"), address(`${route}/spikes`, asked({ count: 20 })), (response) => {
    listed(response.documents);
    if (!response.rows.length) return h("p", {}, "No row stands out.");
    return [
      table(["row", "source", "loss", "usual", "deviations", "documents"], response.rows.map((each) => [
        rowLink(each), each.source, rounded(each.loss), each.usual === null ? "" : rounded(each.usual), rounded(each.score),
        each.documents === null ? "" : h("span", {}, ...each.documents.slice(0, 5).map((its) => documentLink(each.source, its.document)), each.documents.length > 5 ? `and ${each.documents.length - 5} more` : "")])),
      ...Object.entries(response.unresolved).map(([id, why]) => h("p", { class: "problem" }, `Documents of plan ${id.slice(0, 12)} are not known: ${why}`)),
    ];
  });
}

// -- what to do about documents

function listed(documents) {
  chosen = [];
  chose();
  form.hidden = !documents.length;
  $("#chosen").replaceChildren(documents.length ? table(["leave out", "source", "document", "rows", "deviations", "worst row", "look up"], documents.map((each) => [
    h("input", { type: "checkbox", "aria-label": `Document ${each.document} of ${each.source}`, onchange: ({ target }) => {
      chosen = target.checked ? [...chosen, each] : chosen.filter((other) => other !== each);
      chose();
    } }),
    each.source, documentLink(each.source, each.document), each.num_rows, rounded(each.score), rowLink(each),
    h("a", { href: address("/page/lookup", { plan: each.plan, corpus: each.source, document: each.document }) }, "all steps")]))
    : h("p", {}, "None is known: the corpus needs a document index, and the server the plan."));
}

const bySource = () => Map.groupBy(chosen, (each) => each.source);

// A plan leaves documents out from a step on; a view is a corpus without them, for the next run.
function chose() {
  form.querySelector("button").disabled = !chosen.length;
  const lines = [...bySource()].flatMap(([source, its]) => [
    `printf '%s\\n' ${its.map((each) => each.document).join(" ")} > spikes.txt`,
    `corpus-server view create ${quoted(`PATH OF ${source}`)} --without spikes.txt --out ${quoted(`${source}-clean.view`)}`]);
  $("#view-command").replaceChildren(...(lines.length ? [code("A view without them, for another run", lines.join("\n"), true)] : []));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const step = form.elements.step.value;
    const { plan_step: at } = await ask(`/v1/plans/${plan}/usage?step=${step}`);
    let { plan: made } = await ask(`/v1/plans/${plan}`);
    for (const [source, its] of bySource()) made = await denied(made, at, source, its.map((each) => each.document));
    await successor($("#successor"), plan, made, `${chosen.length === 1 ? "One document is" : `${chosen.length} documents are`} left out from step ${number(Number(step))} on.`);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("#successor").replaceChildren(problem(error));
  }
});
range.addEventListener("submit", (event) => { event.preventDefault(); show(); });
show();
