"""`/metrics`: Prometheus' text format with vLLM's series, so that vLLM's Grafana dashboards work unchanged.

Names, labels and bucket bounds are those of vLLM 0.33 (V1 engine). HTTP series have the names and labels of
prometheus-fastapi-instrumentator, which vLLM uses. Series that vLLM does not have start with `nano_inference_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from nano_inference.core.outbox import SampleTimes
from nano_inference.types import EngineRequest, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # content type of `Metrics.render` and `not_loaded`
END_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "client_quota", "draining", "paused", "dead", "other")
"""Why a request was not admitted; the first two are vLLM's labels for a full queue and too many admitted tokens."""
MAX_ROUTES = 40  # routes with series of their own, which bounds the memory; further ones are counted as "other"

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_HTTP_LATENCY = (0.1, 0.5, 1.0)
_UP = "nano_inference_engine_up", "1 while the engine runs, 0 after it has failed or before it is loaded."
_GAUGES = {
    "vllm:num_requests_running": "Samples that are running.",
    "vllm:num_requests_waiting": "Samples that are waiting.",
    "vllm:kv_cache_usage_perc": "Used fraction of the KV cache, 0 to 1.",
    _UP[0]: _UP[1],
    "nano_inference_engine_halted": "1 while the engine is paused, asleep or without weights.",
    "nano_inference_state_snapshots": "Snapshots of recurrent states that prompts can start from.",
    "nano_inference_weight_version": "Version of the weights: 0 as loaded, increased by each update.",
    "nano_inference_clients": "Clients (keys or addresses) with open requests.",
    "nano_inference_largest_client_samples": "Maximum of running and waiting samples of one client.",
    "nano_inference_samples_not_dispatched": "Waiting samples that were not passed to the engine yet.",
}
"""Name -> help; all have the labels `model_name` and `engine`. Prometheus appends `_total` to the names of counters."""
_OF_A_STEP = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", _UP[0])
"""Gauges that are 0 when the engine is down."""
_COUNTERS = {
    "vllm:num_preemptions": "Samples preempted for lack of KV cache blocks.",
    "vllm:prompt_tokens": "Prompt tokens of samples that were computed.",
    "vllm:generation_tokens": "Output tokens, sampled or forced.",
    "vllm:prompt_tokens_cached": "Prompt tokens found in the cache.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the cache.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens that were computed.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "nano_inference_state_hits": "Samples that started from a snapshot of a recurrent state.",
}
_SIZES = None  # buckets up to the size of the KV cache
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float] | None]] = {
    "vllm:request_prompt_tokens": ("Prompt tokens of a sample.", _SIZES),
    "vllm:request_generation_tokens": ("Output tokens of a sample.", _SIZES),
    "vllm:request_max_num_generation_tokens": ("Output tokens of a request's longest sample.", _SIZES),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens of a sample that were not in the cache.", _SIZES),
    "vllm:request_params_max_tokens": ("max_tokens of a sample.", _SIZES),
    "vllm:iteration_tokens_total": (
        "Tokens of one step: prompt tokens computed and output tokens added.",
        _STEP_TOKENS,
    ),
    "vllm:request_params_n": ("n of a request.", (1, 2, 5, 10, 20)),
    "vllm:request_num_preemptions": ("Preemptions of a sample.", (1, 2, 3, 4, 5, 10, 20)),
    "vllm:time_to_first_token_seconds": ("From a sample's arrival to its first token.", _FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("Between two output tokens of a sample.", _TOKEN_GAP),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time between the output tokens of a sample that has two or more.",
        _TOKEN_GAP,
    ),
    "vllm:e2e_request_latency_seconds": ("From a sample's arrival to its end.", _LATENCY),
    "vllm:request_queue_time_seconds": ("From a sample's arrival until it started.", _LATENCY),
    "vllm:request_inference_time_seconds": ("From a sample's start to its end.", _LATENCY),
    "vllm:request_prefill_time_seconds": ("From a sample's start to its first token.", _LATENCY),
    "vllm:request_decode_time_seconds": ("From a sample's first token to its end.", _LATENCY),
}
"""Name -> help and bounds of the buckets."""


class Metrics:
    """Owns the series of one loaded model and their registry. Called from one thread.

    The reports of a step's deltas (`first_token`, `token_gap`, `finished`) come before its `step`. Negative times count
    as 0.
    """

    def __init__(self, *, model_name: str, num_blocks: int, block_size: int, cache_config: Mapping[str, str]) -> None:
        """Create all series at 0. `cache_config`: further labels of `vllm:cache_config_info`, names to values.

        Raises `ValueError` for an invalid label name.
        """
        for name in cache_config:
            if not (name.isascii() and name.isidentifier()):
                raise ValueError(f"cache_config: {name!r} is not a valid label name")
        registry = self._registry = CollectorRegistry()
        self._num_blocks = max(1, num_blocks)
        self._early_tokens = 0
        self._first_tokens = 0
        self._http_children: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._routes: set[str] = set()
        labels = {"model_name": printable(model_name), "engine": "0"}
        names, own = tuple(labels), tuple(labels.values())
        self._gauge = {name: Gauge(name, text, names, registry=registry).labels(*own) for name, text in _GAUGES.items()}
        self._gauge[_UP[0]].set(1)
        text = "Waiting samples by reason: lack of capacity, or deferred."
        waiting = Gauge("vllm:num_requests_waiting_by_reason", text, (*names, "reason"), registry=registry)
        self._waiting_capacity, _ = (waiting.labels(*own, reason) for reason in ("capacity", "deferred"))
        self._count = {
            name: Counter(name, text, names, registry=registry).labels(*own) for name, text in _COUNTERS.items()
        }

        def by(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(name, text, (*names, label), registry=registry)
            return {value: family.labels(*own, value) for value in values}

        self._rejections = by("vllm:admission_rejections", "Requests refused at admission.", "reason", REJECTIONS)
        self._success = by("vllm:request_success", "Ended samples by finish reason.", "finished_reason", END_REASONS)
        text = "Prompt tokens by the source of their K/V."
        sources = by("vllm:prompt_tokens_by_source", text, "source", ("local_compute", "local_cache_hit"))
        self._from_compute, self._from_cache = sources.values()
        sizes = buckets_1_2_5(num_blocks * block_size)
        self._seen = {
            name: Histogram(name, text, names, registry=registry, buckets=bounds or sizes).labels(*own)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        text = "HTTP responses by method, route and class of status."
        self._http_requests = Counter("http_requests", text, ("method", "handler", "status"), registry=registry)
        name, text = "http_request_duration_seconds", "Time from a request to the end of its response."
        handled = ("method", "handler")
        self._http_duration = Histogram(name, text, handled, registry=registry, buckets=_HTTP_LATENCY)
        facts = {
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "kv_cache_size_tokens": num_blocks * block_size,
        }
        info = {name: printable(str(value)) for name, value in {**cache_config, **facts}.items()} | labels
        cache = Gauge("vllm:cache_config_info", "The KV cache, in labels.", tuple(info), registry=registry)
        cache.labels(*info.values()).set(1)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

    def step(self, stats: StepStats) -> None:
        """Record the counts of one engine step, after its deltas."""
        self._gauge["vllm:num_requests_running"].set(stats.num_running)
        self._gauge["vllm:num_requests_waiting"].set(stats.num_waiting)
        self._waiting_capacity.set(stats.num_waiting)
        self._gauge["vllm:kv_cache_usage_perc"].set(max(0.0, 1 - stats.num_free_blocks / self._num_blocks))
        self._gauge["nano_inference_weight_version"].set(stats.weight_version)
        self._gauge["nano_inference_state_snapshots"].set(stats.num_state_snapshots)
        if stats.num_state_hits:
            self._count["nano_inference_state_hits"].inc(stats.num_state_hits)
        if stats.num_preempted:
            self._count["vllm:num_preemptions"].inc(stats.num_preempted)
        if stats.num_drafted:
            self._count["vllm:spec_decode_num_draft_tokens"].inc(stats.num_drafted)
            self._count["vllm:spec_decode_num_accepted_tokens"].inc(stats.num_accepted)
        if stats.num_rows:
            # vLLM counts prompt tokens when they are computed and output tokens when they are sampled. To sample its
            # next token, a row computes the token sampled before: the counts differ by the first token of each sample.
            # An accepted draft token is computed and sampled in one step; a rejected one is not counted.
            num_rejected = stats.num_drafted - stats.num_accepted
            self._seen["vllm:iteration_tokens_total"].observe(stats.num_computed - num_rejected + self._first_tokens)
        self._first_tokens = 0

    def halted(self, is_halted: bool) -> None:
        self._gauge["nano_inference_engine_halted"].set(is_halted)

    def first_token(self, seconds: float) -> None:
        self._see("vllm:time_to_first_token_seconds", seconds)
        self._first_tokens += 1
        self._generated(1)

    def token_gap(self, seconds: float, num_tokens: int = 1) -> None:
        """Record the time between two deltas of a sample, divided among the `num_tokens` of the later one."""
        for _ in range(num_tokens):
            self._see("vllm:inter_token_latency_seconds", seconds / num_tokens)
        self._generated(max(0, num_tokens))

    def finished(
        self,
        request: EngineRequest,
        row: Sequence[SampleTimes],
        times: SampleTimes,
        reason: str,
        *,
        num_cached: int = 0,
        num_preemptions: int = 0,
    ) -> None:
        """Record an ended sample of a request whose samples have the times `row`.

        `num_cached`: prompt tokens whose K/V was cached when it was first admitted. An unknown reason is "error".
        """
        started, first, ended = times.started, times.first_token, times.ended
        assert ended is not None, "the sample has ended"
        num_prompt, num_output = len(request.prompt), times.num_tokens
        self._success.get(reason, self._success["error"]).inc()
        # The prompt, unless the sample was aborted in the queue.
        if started is not None or first is not None or reason in ("stop", "length"):
            cached = min(max(0, num_cached), num_prompt)
            for name in ("vllm:prompt_tokens", "vllm:prefix_cache_queries"):
                self._count[name].inc(num_prompt)
            for name in ("vllm:prefix_cache_hits", "vllm:prompt_tokens_cached"):
                self._count[name].inc(cached)
            self._from_cache.inc(cached)
            self._from_compute.inc(num_prompt - cached)
            self._see("vllm:request_prefill_kv_computed_tokens", num_prompt - cached)
        # Output tokens that were not counted while the sample ran: those that a tool forces directly after the first
        # token. Early counts are one sum over all samples; when no sample runs, the counter equals their outputs.
        known = min(self._early_tokens, num_output)
        self._early_tokens -= known
        self._count["vllm:generation_tokens"].inc(max(0, num_output - known))
        self._see("vllm:request_prompt_tokens", num_prompt)
        self._see("vllm:request_generation_tokens", num_output)
        self._see("vllm:request_num_preemptions", num_preemptions)
        if request.params.max_tokens:
            self._see("vllm:request_params_max_tokens", request.params.max_tokens)
        if all(
            one.ended is not None for one in row
        ):  # the request's last sample, with which its own series are updated
            self._see("vllm:request_params_n", request.num_samples)
            self._see("vllm:request_max_num_generation_tokens", max(one.num_tokens for one in row))
        # The duration of each phase that started.
        left_queue = next((time for time in (started, first) if time is not None), ended)
        self._see("vllm:e2e_request_latency_seconds", ended - times.arrived)
        self._see("vllm:request_queue_time_seconds", left_queue - times.arrived)
        if started is not None:
            self._see("vllm:request_inference_time_seconds", ended - started)
        if started is not None and first is not None:
            self._see("vllm:request_prefill_time_seconds", first - started)
        if first is not None:
            self._see("vllm:request_decode_time_seconds", ended - first)
        if first is not None and num_output > 1:
            self._see("vllm:request_time_per_output_token_seconds", (ended - first) / (num_output - 1))

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted; a reason not in `REJECTIONS` counts as "other"."""
        self._rejections.get(reason, self._rejections["other"]).inc()

    def clients(self, num_clients: int, largest_part: int, num_waiting: int) -> None:
        """Record how many clients have samples, the largest client's samples, and the samples not dispatched yet.

        No series has a client's name as a label, so that clients cannot increase the number of series.
        """
        self._gauge["nano_inference_clients"].set(num_clients)
        self._gauge["nano_inference_largest_client_samples"].set(largest_part)
        self._gauge["nano_inference_samples_not_dispatched"].set(num_waiting)

    def responded(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an HTTP response. `route` is a template such as `/v1/models/{id}`, never the path a client sent."""
        method = method if method in _METHODS else "other"
        if route not in self._routes:
            if len(self._routes) < MAX_ROUTES:
                self._routes.add(route)
            else:
                route = "other"
        key = (method, route, f"{min(max(status // 100, 1), 5)}xx")
        if key not in self._http_children:
            handler = printable(route)
            self._http_children[key] = (
                self._http_requests.labels(method, handler, key[2]),
                self._http_duration.labels(method, handler),
            )
        requests, duration = self._http_children[key]
        requests.inc()
        duration.observe(max(0.0, seconds))

    def engine_died(self) -> None:
        for gauge in (*map(self._gauge.__getitem__, _OF_A_STEP), self._waiting_capacity):
            gauge.set(0)

    def render(self) -> bytes:
        """Return all series as Prometheus text. Takes only the locks of single values."""
        return generate_latest(self._registry)

    def _see(self, name: str, value: float) -> None:
        self._seen[name].observe(max(0.0, value))

    def _generated(self, num_tokens: int) -> None:
        self._early_tokens += num_tokens
        self._count["vllm:generation_tokens"].inc(num_tokens)


def not_loaded() -> bytes:
    """Return the text of `/metrics` while no model is loaded: the engine is down, and the series of the process."""
    registry = CollectorRegistry()
    Gauge(*_UP, registry=registry).set(0)
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def buckets_1_2_5(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `limit`; at least (1,)."""
    powers = (10**exponent for exponent in range(len(str(max(1, limit)))))
    bounds = tuple(float(step * power) for power in powers for step in (1, 2, 5) if step * power <= limit)
    return bounds or (1.0,)


def printable(text: str) -> str:
    """Return a label value with lone surrogates and carriage returns replaced by "?"."""
    return text.encode("utf-8", "replace").decode().replace("\r", "?")
