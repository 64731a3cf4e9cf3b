import { $, h, number, planLink, plansAddress, plural, short, table } from "../dom.js";
import { address, fill } from "../api.js";

const run = new URLSearchParams(location.search).get("run");
const TOOLS = new Set($("#plans").dataset.tools.split(" "));
const order = (value) => (typeof value === "string" ? value : "bounded shuffle");

const newPlan = () => h("a", { class: "button primary", href: "/page/plans/new" }, "New plan");

// Two plans are compared: a third choice takes the place of the older one.
function compare() {
  let chosen = [];
  const hint = h("span", { class: "quiet" }, "Tick two plans in the list.");
  const button = h("button", { type: "button", disabled: true, onclick: () => { location.href = `/page/plans/${chosen[0].value}/diff/${chosen[1].value}`; } }, "Compare two plans");
  const choice = (id) => h("input", { type: "checkbox", value: id, "aria-label": `Compare plan ${short(id)}`, onchange: ({ target }) => {
    chosen = target.checked ? [...chosen, target] : chosen.filter((each) => each !== target);
    if (chosen.length > 2) chosen.shift().checked = false;
    button.disabled = chosen.length < 2;
    hint.textContent = ["Tick two plans in the list.", "Tick one more.", ""][chosen.length];
  } });
  return { button, choice, hint };
}

const names = (runs) => h("span", {}, runs.flatMap((name, n) => [n ? ", " : "", h("a", { href: plansAddress(name) }, name)]));
const isOfTools = ({ runs }) => runs.length > 0 && runs.every((name) => TOOLS.has(name));

fill($("#plans"), address("/v1/plans", { run }), ({ num_plans, plans }) => {
  const lead = run === null
    ? `${plural(num_plans, "plan")}, the one seen last first${plans.length < num_plans ? `; ${number(plans.length)} are shown` : ""}.`
    : h("span", {}, `${plural(plans.length, "plan")} of the run `, h("strong", {}, run), ", the one seen last first. ", h("a", { href: "/page/plans" }, "All plans"));
  if (!plans.length && run === null) return [newPlan(), h("p", { class: "lead" }, "No plan was posted yet. A training run posts its own when it starts.")];
  const { button, choice, hint } = compare();
  const holders = [];
  const find = h("input", { type: "search", size: 24, oninput: () => holders.forEach((each) => each()) });
  const listed = (some, label) => {
    const rows = rowsOf(some);
    const holder = h("div");
    const draw = () => holder.replaceChildren(table(HEAD, rows, label, { find: find.value.trim() }));
    holders.push(draw);
    draw();
    return holder;
  };
  const HEAD = ["compare", "plan", "run", "seen", "sources", "seq_len", "batch", "order", "seed", "stages"];
  const rowsOf = (some) => some.map(({ id, plan, seen_unix_seconds, runs, head, num_stages }) => [
    choice(head ?? id),
    planLink(head ?? id),
    names(runs),
    new Date(seen_unix_seconds * 1000).toISOString().slice(0, 16).replace("T", " "),
    [...new Set(plan.stages.flatMap((stage) => Object.keys(stage.mixture)))].join(", "),
    plan.seq_len,
    [...new Set(plan.stages.map((stage) => stage.global_batch_size))].join(", "),
    order(plan.order),
    String(plan.seed),
    num_stages ?? plan.stages.length,
  ]);
  const ofTools = run === null ? plans.filter(isOfTools) : [];
  const others = plans.filter((each) => !ofTools.includes(each));
  return [
    h("div", { class: "buttons" }, newPlan(), button, hint, h("label", { class: "inline" }, "Find ", find)),
    h("p", { class: "lead" }, lead),
    ...(others.length ? [listed(others, "Plans")] : []),
    ...(ofTools.length ? [h("details", {}, h("summary", {}, `${plural(ofTools.length, "plan")} that only tools posted`), listed(ofTools, "Plans of tools"))] : []),
  ];
});
