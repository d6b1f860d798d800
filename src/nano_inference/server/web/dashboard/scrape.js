import { histogramOf, parseMetrics, total } from "./prometheus.js";

/** Selects the metrics that this page shows: those of vLLM, of the process, and three of this server. */

const GAUGES = {
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  kv: "vllm:kv_cache_usage_perc",
  up: "nano_inference_engine_up",
  halted: "nano_inference_engine_halted",
  weights: "nano_inference_weight_version",
  started: "process_start_time_seconds",
  memory: "process_resident_memory_bytes",
};
const COUNTERS = {
  prompt: ["vllm:prompt_tokens_total"],
  generated: ["vllm:generation_tokens_total"],
  queries: ["vllm:prefix_cache_queries_total"],
  hits: ["vllm:prefix_cache_hits_total"],
  preempted: ["vllm:num_preemptions_total"],
  aborted: ["vllm:request_success_total", { finished_reason: "abort" }],
  failed: ["vllm:request_success_total", { finished_reason: "error" }],
  refused: ["vllm:admission_rejections_total"],
};
const HISTOGRAMS = {
  first: "vllm:time_to_first_token_seconds",
  gap: "vllm:inter_token_latency_seconds",
  queue: "vllm:request_queue_time_seconds",
};

/**
 * Return the metrics of a text of /metrics, read at a time in seconds: `gauges`, `counters` and `histograms` by the
 * names above, null if missing; the `model`'s name and the KV cache's `capacity` in tokens, null before the model is
 * loaded.
 */
export function readScrape(text, at) {
  const series = parseMetrics(text);
  const each = (names, read) => Object.fromEntries(Object.entries(names).map(([name, where]) => [name, read(where)]));
  const cache = series.get("vllm:cache_config_info")?.[0]?.labels ?? {};
  return {
    at,
    gauges: each(GAUGES, (name) => total(series, name)),
    counters: each(COUNTERS, ([name, labels]) => total(series, name, labels)),
    histograms: each(HISTOGRAMS, (name) => histogramOf(series, name)),
    model: series.get(GAUGES.running)?.[0]?.labels.model_name ?? null,
    capacity: "kv_cache_size_tokens" in cache ? Number(cache.kv_cache_size_tokens) : null,
  };
}
