import { $, h, bytes, facts, number, tokenizer, corpusAddress } from "../dom.js";
import { fill } from "../api.js";

const size = (corpus) => corpus.shards.reduce((sum, shard) => sum + shard.size_bytes, 0);

fill($("#corpora"), "/v1/corpora", ({ corpora }) => corpora.map((corpus) =>
  h("article", { class: "card" },
    h("h2", {}, h("a", { href: corpusAddress(corpus.name) }, corpus.name)),
    h("p", { class: "figure" }, number(corpus.num_tokens), h("small", {}, " tokens")),
    facts([
      ["documents", corpus.num_documents ?? "no index"],
      ["dtype", corpus.dtype],
      ["size", bytes(size(corpus))],
      ["shards", corpus.shards.length],
      ...(corpus.num_masks ? [["loss masks", corpus.num_masks]] : []),
      ["format", [...new Set(corpus.shards.map((shard) => shard.format))].join(", ")],
      ["tokenizer", tokenizer(corpus)],
      ...(corpus.view ? [["view of", `${number(corpus.view.num_documents)} documents`]] : []),
    ]),
    h("p", { class: "fingerprint" }, h("code", { title: corpus.fingerprint }, corpus.fingerprint)))));
