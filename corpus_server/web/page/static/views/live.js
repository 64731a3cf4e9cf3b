import { $, h, bytes, corpusAddress, few, number, planLink, plansAddress, plural, stepAddress, table } from "../dom.js";
import { address, ask, follow, problem, request } from "../api.js";
import { chart } from "../chart.js";

const HOUR = 3600;
let samples = null;

const STEPS = [0.25, 0.5, 1, 2, 5, 10];  // minutes
const ago = (minutes) => (minutes === 0 ? "now" : minutes > -1 ? `${number(-60 * minutes)} s ago` : `${number(-minutes)} min ago`);
const untilNow = (_, least) => [Math.min(least ?? 0, -1), 0];  // one sample, too, is shown at the end of a minute
const lines = (label, more = {}) => chart({ x: [], xLabel: null, xText: ago, xSteps: STEPS, xRange: untilNow, height: 150, series: [{ label, values: [] }], ...more });
const charts = {};

// The charts that a response describes; drawn once, then fed.
function drawn(live) {
  for (const each of live.charts) {
    if (each.title in charts) continue;
    charts[each.title] = lines("", { series: each.lines.map(({ label }) => ({ label, values: [] })), ...(each.in_seconds ? { logY: true } : { fromZero: true }) });
    $("#charts").append(h("section", {}, h("h2", {}, each.title), charts[each.title]));
  }
  return live.charts;
}
$("#request").append(request("/v1/live"), request("/v1/live?follow=true"));

// The first event of a connection has the whole hour, later ones what is new.
function merge(news, isFirst) {
  if (isFirst || samples === null) { samples = news; return; }
  const first = samples.unix_seconds.findIndex((time) => time > (news.unix_seconds.at(-1) ?? 0) - HOUR);
  for (const name of Object.keys(samples)) samples[name] = [...samples[name].slice(Math.max(0, first)), ...news[name]];
}

const milliseconds = (seconds) => (seconds === null ? null : seconds * 1e3);
const known = (value, text) => (value === null || value === undefined ? "-" : text(value));
const amount = (value) => (Number.isInteger(value) ? number(value) : few(value)); // a count, or a rate

function tiles(live) {
  const rate = live.averages;
  const last = Object.fromEntries(Object.entries(samples).map(([name, values]) => [name, values.at(-1)]));
  const refused = samples.refusals.reduce((sum, each) => sum + each, 0);
  const kinds = Object.entries(live.refusals).map(([type, count]) => `${type} ${number(count)}`).join(", ");
  const shown = [
    // Averages of the same half minute as in the table of corpora, so that the figures agree.
    ["tokens per second", few(rate.tokens_per_second ?? 0), `${bytes(rate.sent_bytes_per_second ?? 0)} per second`],
    ["requests per second", few(rate.requests_per_second ?? 0), "batches and indices"],
    ["p50 latency", known(last.p50_seconds, (each) => `${few(each * 1e3)} ms`), `p99 ${known(last.p99_seconds, (each) => `${few(each * 1e3)} ms`)}`],
    ["in flight", known(last.active_requests, number), known(last.bytes_in_flight, bytes)],
    ["refusals in the hour", number(refused), kinds || "none since the start"],
    ["page-cache hits", known(last.cache_hit_share, (each) => `${few(each * 100)} %`), plural(live.num_workers, "worker")],
  ];
  if (live.cache) {
    shown.push(["per second from object stores", bytes(rate.staged_bytes_per_second ?? 0), `${bytes(rate.found_bytes_per_second ?? 0)} found in the cache`],
      ["cache of object stores", bytes(live.cache.num_bytes), `of ${bytes(live.cache.max_bytes)}, ${plural(live.cache.num_extents, "extent")}`]);
  }
  return shown.map(([name, figure, more]) => h("div", { class: "tile" }, h("span", {}, name), h("strong", {}, figure), h("small", {}, more)));
}

function share(rank) {
  const part = (name, value) => {
    const bar = h("span", { class: name });
    bar.style.width = `${value * 100}%`;
    return bar;
  };
  const percent = (value) => `${Math.round(value * 100)}\u00a0%`;
  return h("span", { class: "share" }, h("span", { class: "bar", "aria-hidden": "true" }, part("waiting", rank.waiting_share), part("sending", Math.min(rank.sending_share, 1 - rank.waiting_share))),
    `${percent(rank.waiting_share)}\u00a0waiting, ${percent(rank.sending_share)}\u00a0sending`);
}

const opened = new Map();  // what the reader has folded, or unfolded

function folded(name, isOpen, summary, ...children) {
  const element = h("details", { class: "folded", open: opened.get(name) ?? isOpen }, h("summary", { onclick: () => opened.set(name, !element.open) }, summary), ...children);
  return element;
}


function upTo(what, steps) {
  const known = steps.filter((each) => each !== null);
  if (!known.length) return [];
  const [first, last] = [Math.min(...known), Math.max(...known)];
  return [first === last ? `${what} step ${number(last)}` : `${what} steps ${number(first)} to ${number(last)}`];
}

// -- how far a run is, by its plan

const plans = new Map();  // id -> its description, null until it has come

function described(id) {
  if (!plans.has(id)) {
    plans.set(id, null);
    ask(`/v1/plans/${id}`).then((found) => plans.set(id, found), () => {}); // without it the rest is shown
  }
  return plans.get(id);
}

const SILENT_SECONDS = 60;

function stateOf(live, its, plan) {
  const newest = Math.max(...its.map((each) => each.seen_unix_seconds));
  const isDone = plan?.num_steps && its.every((each) => each.trained_step !== null && each.trained_step + 1 >= plan.num_steps);
  if (isDone) return "finished";
  // A loader says when it ends; the plan may have no end, or a later one.
  if (its.every((each) => each.has_ended)) return plan?.num_steps ? "ended before the plan's last step" : "finished";
  if (live.unix_seconds - newest < SILENT_SECONDS) return "running";
  return `silent since ${new Date(newest * 1000).toISOString().slice(11, 16)} UTC`;
}

function duration(seconds) {
  if (seconds < 90) return `${number(Math.round(seconds))} s`;
  if (seconds < 5400) return `${number(Math.round(seconds / 60))} min`;
  return seconds < 172800 ? `${few(seconds / 3600)} h` : `${few(seconds / 86400)} days`;
}

function progress(its, plan) {
  const trained = Math.min(...its.map((each) => each.trained_step ?? -1)) + 1;
  if (trained <= 0 || !plan) return [];
  const stages = plan.stages.filter((each) => each.first_step !== null);
  if (stages.length !== plan.num_stages) return [];  // the first ones are not described
  const last = (n) => Math.min(trained, stages[n + 1]?.first_step ?? Infinity);
  const tokens = stages.reduce((sum, stage, n) => sum + Math.max(0, last(n) - stage.first_step) * stage.global_batch_size * stage.seq_len, 0);
  const now = stages.findLast((each) => each.first_step < trained);
  const shares = Object.entries(plan.sources).filter(([, each]) => each.steps_per_epoch !== null).map(([name, each]) => {
    const rows = (now.positions[name] ?? 0) + (now.weights_65536[name] ?? 0) / 65536 * now.global_batch_size * (trained - now.first_step);
    return `${few(rows / each.num_windows)} of ${name}`;
  });
  const next = stages.find((each) => each.first_step >= trained);
  const rate = Math.min(...its.map((each) => each.trained_steps_per_second ?? 0));
  const until = (step) => `${plural(step - trained, "step")}${rate > 0 ? `, about ${duration((step - trained) / rate)}` : ""}`;
  return [`${few(tokens)} tokens trained`, ...(shares.length ? [`epochs: ${shares.slice(0, 4).join(", ")}${shares.length > 4 ? " ..." : ""}`] : []),
    ...(next ? [`next stage in ${until(next.first_step)}`] : []), ...(plan.num_steps && trained < plan.num_steps ? [`end in ${until(plan.num_steps)}`] : [])];
}

// What of a plan's corpora in object stores is here.
function staged(staging) {
  if (!staging) return [];
  const left = Object.entries(staging.unread_seconds).map(([corpus, seconds]) => `${corpus} read once in ${seconds === null ? "unknown time" : `about ${duration(seconds)}`}`);
  return [`staged ${plural(staging.staged_steps, "step")} ahead of the slowest rank`, ...left.slice(0, 4), ...(left.length > 4 ? ["..."] : [])];
}

function planOf(live, { run, plan, ranks: its, staging }) {
  const known = described(plan);
  const newest = Math.max(...its.map((each) => each.seen_unix_seconds));
  const step = (each, at) => (at === null ? "-" : h("a", { href: address(stepAddress(plan, at), each.world_size > 1 ? { rank: each.rank, world_size: each.world_size } : {}) }, number(at)));
  return [
    h("p", {}, "Plan ", planLink(plan), ": ", h("strong", {}, stateOf(live, its, known)), `, ${[plural(its.length, "rank"), ...upTo("trained up to", its.map((each) => each.trained_step)),
      ...upTo("asked for up to", its.map((each) => each.step)), `last request ${silence(live.unix_seconds - newest)}`].join(", ")}`),
    h("p", { class: "quiet" }, [...progress(its, known), ...staged(staging)].join("; ")),
    table(["rank", "trained", "asked for up to", "steps/s trained", "last request", "share of its time"], its.map((each) => [
      `${each.rank} of ${number(each.world_size)}`, step(each, each.trained_step), step(each, each.step),
      each.trained_steps_per_second === null ? "-" : few(each.trained_steps_per_second), silence(live.unix_seconds - each.seen_unix_seconds), share(each)]),
    `Ranks of ${run ? `run ${run}` : "no named run"}, plan ${plan}`, { stacked: false }),
  ];
}

function ranks(live) {
  if (!live.plans.length) return [h("p", {}, "Nobody has asked for batches or indices in the last hour.")];
  const runs = Map.groupBy(live.plans, ({ run }) => run);
  const named = [...runs].filter(([run, plans]) => run && !plans[0].is_tool);
  const tools = live.plans.filter((each) => each.is_tool);
  const count = (plans) => `${plural(plans.length, "plan")}, ${plural(plans.reduce((sum, { ranks: its }) => sum + its.length, 0), "rank")}`;
  return [
    ...named.flatMap(([run, plans]) => [h("h3", {}, "Run ", h("a", { href: plansAddress(run) }, run)), ...plans.flatMap((each) => planOf(live, each))]),
    ...(runs.has("") ? [folded("unnamed", !named.length, `Without a name: ${count(runs.get(""))}`, ...runs.get("").flatMap((each) => planOf(live, each)))] : []),
    ...(tools.length ? [folded("tools", false, `Tools: ${count(tools)}`, ...tools.flatMap((each) => [h("h3", {}, each.run), ...planOf(live, each)]))] : []),
  ];
}

function corpora(live) {
  if (!live.corpora.length) return [h("p", {}, "No corpus was read since the server started.")];
  const cells = ({ corpus, values }) => live.corpus_columns.map(({ column }) => known(values[column], amount));
  return [table(["corpus", ...live.corpus_columns.map(({ title }) => title)], live.corpora.map((each) => [
    h("a", { href: corpusAddress(each.corpus) }, each.corpus), ...cells(each)]))];
}

function silence(seconds) {
  if (seconds < 10) return "just now";
  return seconds < 120 ? `${number(Math.round(seconds))} s ago` : `${number(Math.round(seconds / 60))} min ago`;
}

// Who reads a table by keyboard, or has scrolled it, stays where they are.
function replace(holder, shown) {
  const regions = () => [...holder.querySelectorAll(".scroll")];
  const places = regions().map((each) => [each.scrollTop, each.scrollLeft]);
  const focusable = () => [...holder.querySelectorAll("a, summary, button, .scroll")];
  const focus = focusable().indexOf(document.activeElement);
  holder.replaceChildren(...shown);
  regions().forEach((each, n) => { [each.scrollTop, each.scrollLeft] = places[n] ?? [0, 0]; });
  if (focus >= 0) focusable()[focus]?.focus({ preventScroll: true });
}

function show(live, isFirst) {
  merge(live.samples, isFirst);
  const x = samples.unix_seconds.map((time) => (time - live.unix_seconds) / 60);
  $("#tiles").replaceChildren(...tiles(live));
  for (const { title, lines: its, in_seconds: inSeconds } of drawn(live)) {
    charts[title].update(x, its.map(({ column }) => (inSeconds ? samples[column].map(milliseconds) : samples[column])));
  }
  replace($("#corpora"), corpora(live));
  replace($("#ranks"), ranks(live));
}

function state(text, isLive) {
  $("#state").textContent = text;
  $("#state").classList.toggle("on", isLive);
}

follow("/v1/live?follow=true", {
  onEvent: (live, isFirst) => { show(live, isFirst); state("live", true); },
  onEnd: () => state("connecting again ...", false),
  onProblem: (error) => { state("", false); $("#tiles").replaceChildren(problem(error)); },
});
