import { $, h, code, loaderOf, number, plural, table } from "../dom.js";
import { ask, curl, parse, problem, Problem, warnings } from "../api.js";

const form = $("#plan");
const text = $("#document");

function fromForm() {
  const weights = [...document.querySelectorAll("#mixture input")].filter((input) => Number(input.value) > 0);
  const shown = Object.fromEntries(weights.map((input) => [input.name, Number(input.value)]));
  const given = form.elements;
  return {
    seq_len: Number(given.seq_len.value), seed: /^[1-9]\d*$/.test(given.seed.value) ? parse(given.seed.value) : Number(given.seed.value), order: given.order.value,
    ...(given.rows.selectedIndex ? { rows: given.rows.value } : {}),
    stages: [{ from_step: 0, global_batch_size: Number(given.global_batch_size.value), [given.amounts.value]: shown }],
  };
}

// Of stages that say epochs or tokens: where the run ends, and what it has used then.
function ends(response) {
  if (!response.planned) return [];
  const used = Object.entries(response.planned).map(([name, its]) => [name, its.rows, its.tokens, its.epochs ?? "no epochs"]);
  return [h("p", {}, `The run ends at step ${number(response.num_steps)}; train it with num_steps=${response.num_steps}.`),
    table(["source", "rows used", "tokens used", "epochs"], used)];
}

let asked = 0;
async function check() {
  const mine = ++asked;
  const verdict = $("#verdict");
  let plan;
  try {
    plan = parse(text.value);
  } catch (error) {
    verdict.replaceChildren(h("p", { class: "problem" }, `no JSON: ${error.message}`));
    return;
  }
  $("#code").replaceChildren(
    code("Python", loaderOf(plan), true),
    code("curl", curl("/v1/plans", plan), true));
  try {
    const response = await ask("/v1/plans?keep=false", { method: "POST", body: text.value });
    if (mine !== asked) return;
    verdict.replaceChildren(table(["source", "rows", "steps per epoch", "share"], Object.entries(response.sources).map(([name, source]) => [
      name, source.num_windows, source.steps_per_epoch ?? "no epochs", `${(response.stages.at(-1).weights_65536[name] / 655.36 || 0).toFixed(2)} %`])),
    ...warnings(response), ...ends(response), h("p", {}, `${plural(response.stages.length, "stage")}, tokens of ${response.dtype}`));
    $("#keep").disabled = false;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (mine !== asked) return;
    verdict.replaceChildren(problem(error));
    $("#keep").disabled = true;
  }
}

let timer = 0;
const later = () => { clearTimeout(timer); timer = setTimeout(check, 300); };
form.addEventListener("input", (event) => {
  if (event.target !== text) text.value = JSON.stringify(fromForm(), null, 2);
  later();
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const response = await ask("/v1/plans", { method: "POST", body: text.value });
    location.href = `/page/plans/${response.id}`;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    $("#verdict").replaceChildren(problem(error));
  }
});

ask("/v1/corpora").then(({ corpora }) => {
  $("#mixture").replaceChildren(...corpora.map((corpus, n) => h("label", {}, `${corpus.name} `,
    h("input", { name: corpus.name, inputmode: "decimal", value: n ? "0" : "1", size: 6 }))));
  text.value = JSON.stringify(fromForm(), null, 2);
  check();
}, (error) => $("#verdict").replaceChildren(problem(error)));
