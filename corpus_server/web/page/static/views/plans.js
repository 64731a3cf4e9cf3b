import { $, h, number, planLink, short, table } from "../dom.js";
import { fill } from "../api.js";

const order = (value) => (typeof value === "string" ? value : "bounded shuffle");

const newPlan = () => h("a", { class: "button primary", href: "/page/plans/new" }, "New plan");

// Two plans are compared: a third choice takes the place of the older one.
function compare() {
  let chosen = [];
  const button = h("button", { type: "button", disabled: true, onclick: () => { location.href = `/page/plans/${chosen[0].value}/diff/${chosen[1].value}`; } }, "Compare two plans");
  const choice = (id) => h("input", { type: "checkbox", value: id, "aria-label": `Compare plan ${short(id)}`, onchange: ({ target }) => {
    chosen = target.checked ? [...chosen, target] : chosen.filter((each) => each !== target);
    if (chosen.length > 2) chosen.shift().checked = false;
    button.disabled = chosen.length < 2;
  } });
  return { button, choice };
}

fill($("#plans"), "/v1/plans", ({ num_plans, plans }) => {
  if (!plans.length) return [newPlan(), h("p", { class: "lead" }, "No plan was posted yet. A training run posts its own when it starts.")];
  const { button, choice } = compare();
  return [
    h("div", { class: "buttons" }, newPlan(), button),
    h("p", { class: "lead" }, `${number(num_plans)} plan${num_plans === 1 ? "" : "s"}, the one seen last first${plans.length < num_plans ? `; ${number(plans.length)} are shown` : ""}.`),
    table(["compare", "plan", "seen", "sources", "seq_len", "batch", "order", "seed", "stages"], plans.map(({ id, plan, seen_unix_seconds, head, num_stages }) => [
      choice(head ?? id),
      planLink(head ?? id),
      new Date(seen_unix_seconds * 1000).toISOString().slice(0, 16).replace("T", " "),
      [...new Set(plan.stages.flatMap((stage) => Object.keys(stage.mixture)))].join(", "),
      plan.seq_len,
      [...new Set(plan.stages.map((stage) => stage.global_batch_size))].join(", "),
      order(plan.order),
      String(plan.seed),
      num_stages ?? plan.stages.length,
    ])),
  ];
});
