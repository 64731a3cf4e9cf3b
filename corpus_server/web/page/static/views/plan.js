import { $, h, code, dot, facts, loaderOf, number, parameters, planLink, short, stepAddress, table, corpusAddress } from "../dom.js";
import { curl, fill, warnings } from "../api.js";
import { chart, colour } from "../chart.js";

const id = parameters.plan_id;
$("#id").textContent = short(id);
$("#id").title = id;
document.title = `plan ${short(id)} - corpus-server`;

$("#go").addEventListener("submit", (event) => {
  event.preventDefault();
  location.href = stepAddress(id, new FormData(event.target).get("step"));
});
$("#compare").addEventListener("submit", (event) => {
  event.preventDefault();
  location.href = `/page/plans/${id}/diff/${new FormData(event.target).get("other")}`;
});

// A stage has no end in the plan: the last one is drawn until each of its sources has had one more epoch.
function lastStep(response) {
  const last = response.stages.at(-1);
  const begin = last.first_step ?? last.from_step;
  const more = Object.keys(last.weights_65536).map((name) => response.sources[name].steps_per_epoch ?? 1000);
  return Math.ceil(begin + Math.max(1, ...more, begin / 10));
}

const share = (stage, name) => `${((stage.weights_65536[name] ?? 0) / 655.36).toFixed(2)} %`;

function bands(response, names, stop) {
  const stages = response.stages.filter((stage) => stage.first_step !== null);
  return h("div", { class: "bands", role: "group", "aria-label": "Shares of the sources over the stages" },
    stages.map((stage, n) => {
      const end = stages[n + 1]?.first_step ?? stop;
      const band = h("a", { class: "band", href: stepAddress(id, stage.first_step),
        "aria-label": `Stage from step ${number(stage.first_step)}: ${names.filter((name) => stage.weights_65536[name]).map((name) => `${name} ${share(stage, name)}`).join(", ")}` });
      band.style.flexGrow = String(Math.max(end - stage.first_step, stop / 50));
      names.forEach((name, k) => {
        if (!stage.weights_65536[name]) return;
        const part = h("span", { title: `${name}: ${share(stage, name)}` });
        part.style.flexGrow = String(stage.weights_65536[name]);
        part.style.background = colour(k);
        band.append(part);
      });
      return band;
    }));
}

function epochs(response, names, stop) {
  const stages = response.stages.filter((stage) => stage.first_step !== null);
  const x = [...new Set([...stages.map((stage) => stage.first_step), stop])];
  const series = names.filter((name) => response.sources[name].steps_per_epoch !== null).map((name) => {
    const windows = response.sources[name].num_windows;
    let rows = 0;
    const values = x.map((step) => {
      const n = stages.findLastIndex((stage) => stage.first_step <= step);
      const stage = stages[n];
      rows = (stage.positions[name] ?? rows) + (stage.weights_65536[name] ?? 0) / 65536 * stage.global_batch_size * (step - stage.first_step);
      return rows / windows;
    });
    return { label: name, values };
  });
  return series.length ? chart({ x, series, xLabel: "step" }) : h("p", {}, "Order random has no epochs.");
}

function familyText(family, sources) {
  const kept = Object.entries(sources).map(([name, its]) => `${name} ${(100 * its.kept).toFixed(1)} %`).join(", ");
  return `member ${family.member} of family ${family.seed} leaves out ${+(100 * family.leave_out).toPrecision(6)} % of the ${family.by === undefined ? "documents" : `values of ${family.by}`}; kept rows: ${kept}`;
}

fill($("#facts"), `/v1/plans/${id}`, (response) => {
  const names = Object.keys(response.sources);
  const stop = lastStep(response);
  const legend = h("p", { class: "legend" }, names.map((name, k) => h("span", {}, dot(colour(k)), h("a", { href: corpusAddress(name) }, name))));
  // Of one source every band would be one colour.
  $("#stages").replaceChildren(...(names.length > 1 ? [legend, bands(response, names, stop)] : []), table(
    ["from step", "batch", ...names, "excluded windows"],
    response.stages.map((stage) => [
      stage.first_step === null ? "skipped" : number(stage.first_step), stage.global_batch_size,
      ...names.map((name) => share(stage, name)),
      Object.values(stage.excluded_windows).reduce((sum, each) => sum + each, 0)])));
  $("#sources").replaceChildren(table(["source", "rows", "fill", "steps per epoch"], names.map((name) => [h("a", { href: corpusAddress(name) }, name),
    response.sources[name].num_windows, response.sources[name].fill === undefined ? "whole" : `${(100 * response.sources[name].fill).toFixed(2)} %`, response.sources[name].steps_per_epoch ?? "no epochs"])));
  $("#epochs").replaceChildren(epochs(response, names, stop));
  // A plan that continues others says only its last stage; all else stands in the first one.
  const plan = response.root?.plan ?? response.plan;
  const text = JSON.stringify(response.plan, null, 2);
  $("#document").replaceChildren(code("JSON", text),
    code("curl", curl("/v1/plans", response.plan)),
    response.root ? "" : code("Python", loaderOf(response.plan)));
  return [...warnings(response), facts([
    ...(response.root ? [["continues", planLink(response.root.id)], ["stages", response.num_stages === response.stages.length ? response.num_stages : `${number(response.num_stages)}, of which the last ${number(response.stages.length)} are shown`]] : []),
    ["seq_len", plan.seq_len], ["stride", plan.stride], ["seed", String(plan.seed)],
    ["order", typeof plan.order === "string" ? plan.order : JSON.stringify(plan.order)],
    ["rows", plan.rows === undefined ? "windows" : Object.keys(plan.rows)[0]],
    ...(plan.family === undefined ? [] : [["family", familyText(plan.family, response.sources)]]),
    ["dtype", response.dtype], ["shards", response.shards.length],
    ["skipped steps", plan.skip_steps.reduce((sum, [start, end]) => sum + end - start, 0)],
  ])];
}, true);
