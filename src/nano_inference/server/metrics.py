"""`/metrics`: Prometheus' text format with vLLM's series, so that vLLM's Grafana dashboards work unchanged.

Names, labels and bucket bounds are those of vLLM 0.33 (V1 engine). HTTP series have the names and labels of
prometheus-fastapi-instrumentator, which vLLM uses. Series that vLLM does not have start with `nano_inference_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from nano_inference.types import StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # content type of `Metrics.render` and `not_loaded`
END_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "client_quota", "draining", "paused", "dead", "other")
"""Why a request was not admitted; the first two are vLLM's labels for a full queue and too many admitted tokens."""
MAX_ROUTES = 40  # routes with series of their own, which bounds the memory; further ones are counted as "other"

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_NO_LABELS: Mapping[str, str] = {}
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
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_SAMPLES = (1, 2, 5, 10, 20)
_HTTP_LATENCY = (0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One ended sample of a request. Times are seconds on the monotonic clock; None if the event did not happen."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose K/V was in the cache at first admission
    output_tokens: int
    params_n: int
    params_max_tokens: int
    finish_reason: str  # one of `END_REASONS`
    num_preemptions: int
    arrived: float
    started: float | None  # when it first left the engine's queue
    first_token: float | None
    ended: float
    ends_request: bool = True
    """True for the last of its request's samples, with which the request's own series are updated."""
    longest_output: int = 0  # maximum output tokens of the request's other samples; used with `ends_request` only

    @property
    def was_computed(self) -> bool:
        """True if the engine computed its prompt; False if it was aborted in the queue."""
        return self.started is not None or self.first_token is not None or self.finish_reason in ("stop", "length")


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
        self._registry = CollectorRegistry()
        self._num_blocks = max(1, num_blocks)
        self._early_tokens = 0
        self._first_tokens = 0
        self._http_children: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._routes: set[str] = set()
        make = _Maker(self._registry, model_name)
        self._make_state(make)
        self._make_tokens(make)
        self._make_requests(make, num_blocks * block_size)
        self._make_times(make)
        self._make_http()
        sizes = {
            "block_size": block_size,
            "num_gpu_blocks": num_blocks,
            "kv_cache_size_tokens": num_blocks * block_size,
        }
        info = {**cache_config, **{name: str(value) for name, value in sizes.items()}}
        make.gauge("vllm:cache_config_info", "The KV cache, in labels.", info).set(1)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def step(self, stats: StepStats) -> None:
        """Record the counts of one engine step, after its deltas."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_capacity.set(stats.num_waiting)
        self._kv_usage.set(max(0.0, 1 - stats.num_free_blocks / self._num_blocks))
        self._weight_version.set(stats.weight_version)
        if stats.num_preempted:
            self._preemptions.inc(stats.num_preempted)
        if stats.num_drafted:
            self._draft_tokens.inc(stats.num_drafted)
            self._accepted_tokens.inc(stats.num_accepted)
        if stats.num_rows:
            # vLLM counts prompt tokens when they are computed and output tokens when they are sampled. To sample its
            # next token, a row computes the token sampled before: the counts differ by the first token of each sample.
            # An accepted draft token is computed and sampled in one step; a rejected one is not counted.
            num_rejected = stats.num_drafted - stats.num_accepted
            self._step_tokens.observe(stats.num_computed - num_rejected + self._first_tokens)
        self._first_tokens = 0

    def halted(self, is_halted: bool) -> None:
        """Record whether the engine is paused, asleep or without weights."""
        self._halted.set(is_halted)

    def first_token(self, seconds: float) -> None:
        """Record the time from a sample's arrival to its first token."""
        self._first_token.observe(max(0.0, seconds))
        self._first_tokens += 1
        self._generated(1)

    def token_gap(self, seconds: float, num_tokens: int = 1) -> None:
        """Record the time between two deltas of a sample, divided among the `num_tokens` of the later one."""
        if num_tokens <= 0:
            return
        share = max(0.0, seconds) / num_tokens
        for _ in range(num_tokens):
            self._token_gap.observe(share)
        self._generated(num_tokens)

    def finished(self, record: SampleRecord) -> None:
        """Record an ended sample. An unknown `finish_reason` counts as "error"."""
        self._success.get(record.finish_reason, self._success["error"]).inc()
        self._count_prompt(record)
        self._count_output(record.output_tokens)
        self._observe_request(record)
        self._observe_phases(record)

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted; a reason not in `REJECTIONS` counts as "other"."""
        self._rejections.get(reason, self._rejections["other"]).inc()

    def clients(self, num_clients: int, largest_part: int, num_waiting: int) -> None:
        """Record how many clients have samples, the largest client's samples, and the samples not dispatched yet.

        No series has a client's name as a label, so that clients cannot increase the number of series.
        """
        self._clients.set(num_clients)
        self._largest_client.set(largest_part)
        self._undispatched.set(num_waiting)

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
            self._http_children[key] = self._http_child(*key)
        requests, duration = self._http_children[key]
        requests.inc()
        duration.observe(max(0.0, seconds))

    def engine_died(self) -> None:
        """Record that the engine is down, with nothing running or waiting."""
        for gauge in (self._running, self._waiting, self._waiting_capacity, self._kv_usage, self._up):
            gauge.set(0)

    def render(self) -> bytes:
        """Return all series as Prometheus text. Takes only the locks of single values."""
        return generate_latest(self._registry)

    # ---- recording --------------------------------------------------------------------------------------------------

    def _generated(self, num_tokens: int) -> None:
        """Count output tokens of running samples."""
        self._early_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)

    def _count_output(self, num_tokens: int) -> None:
        """Count the tokens of an ended sample that were not counted while it ran.

        Those are tokens that a tool forces directly after the first token. Early counts are one sum over all samples;
        when no sample runs, the counter equals the sum of all outputs.
        """
        known = min(self._early_tokens, num_tokens)
        self._early_tokens -= known
        self._generation_tokens.inc(max(0, num_tokens - known))

    def _count_prompt(self, record: SampleRecord) -> None:
        """Count prompt tokens, and those found in the cache."""
        if not record.was_computed:
            return
        cached = min(max(0, record.cached_tokens), record.prompt_tokens)
        for counter in (self._prompt_tokens, self._cache_queries):
            counter.inc(record.prompt_tokens)
        for counter in (self._cache_hits, self._cached_tokens, self._from_cache):
            counter.inc(cached)
        self._from_compute.inc(record.prompt_tokens - cached)
        self._prefill_sizes.observe(record.prompt_tokens - cached)

    def _observe_request(self, record: SampleRecord) -> None:
        """Observe sizes and parameters; those of the request only with its last sample."""
        self._prompt_sizes.observe(record.prompt_tokens)
        self._output_sizes.observe(record.output_tokens)
        self._request_preemptions.observe(record.num_preemptions)
        if record.params_max_tokens > 0:
            self._max_tokens.observe(record.params_max_tokens)
        if record.ends_request:
            self._params_n.observe(record.params_n)
            self._longest_outputs.observe(max(record.output_tokens, record.longest_output))

    def _observe_phases(self, record: SampleRecord) -> None:
        """Observe the duration of each phase that started."""
        started, first, ended = record.started, record.first_token, record.ended
        self._e2e.observe(max(0.0, ended - record.arrived))
        left_queue = next((time for time in (started, first) if time is not None), ended)
        self._queue.observe(max(0.0, left_queue - record.arrived))
        if started is not None:
            self._inference.observe(max(0.0, ended - started))
        if first is None:
            return
        if started is not None:
            self._prefill.observe(max(0.0, first - started))
        self._decode.observe(max(0.0, ended - first))
        if record.output_tokens > 1:
            self._token_time.observe(max(0.0, ended - first) / (record.output_tokens - 1))

    # ---- the series -------------------------------------------------------------------------------------------------

    def _make_state(self, make: _Maker) -> None:
        """Create the series of the engine's current state."""
        self._running = make.gauge("vllm:num_requests_running", "Samples that are running.")
        self._waiting = make.gauge("vllm:num_requests_waiting", "Samples that are waiting.")
        text = "Waiting samples by reason: lack of capacity, or deferred."
        reasons = make.gauges("vllm:num_requests_waiting_by_reason", text, "reason", ("capacity", "deferred"))
        self._waiting_capacity = reasons["capacity"]
        self._kv_usage = make.gauge("vllm:kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1.")
        self._up = make.gauge(
            "nano_inference_engine_up", "1 while the engine runs, 0 after it has failed or before it is loaded."
        )
        self._up.set(1)
        text = "1 while the engine is paused, asleep or without weights."
        self._halted = make.gauge("nano_inference_engine_halted", text)
        text = "Version of the weights: 0 as loaded, increased by each update."
        self._weight_version = make.gauge("nano_inference_weight_version", text)
        self._preemptions = make.counter("vllm:num_preemptions", "Samples preempted for lack of KV cache blocks.")
        text = "Requests refused at admission."
        self._rejections = make.counters("vllm:admission_rejections", text, "reason", REJECTIONS)

        self._clients = make.gauge("nano_inference_clients", "Clients (keys or addresses) with open requests.")
        text = "Maximum of running and waiting samples of one client."
        self._largest_client = make.gauge("nano_inference_largest_client_samples", text)
        text = "Waiting samples that were not passed to the engine yet."
        self._undispatched = make.gauge("nano_inference_samples_not_dispatched", text)

    def _make_tokens(self, make: _Maker) -> None:
        self._prompt_tokens = make.counter("vllm:prompt_tokens", "Prompt tokens of samples that were computed.")
        self._generation_tokens = make.counter("vllm:generation_tokens", "Output tokens, sampled or forced.")
        self._cached_tokens = make.counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.")
        text = "Prompt tokens by the source of their K/V."
        sources = make.counters("vllm:prompt_tokens_by_source", text, "source", ("local_compute", "local_cache_hit"))
        self._from_compute, self._from_cache = sources["local_compute"], sources["local_cache_hit"]
        self._cache_queries = make.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._cache_hits = make.counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self._draft_tokens = make.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were computed.")
        text = "Draft tokens that were accepted."
        self._accepted_tokens = make.counter("vllm:spec_decode_num_accepted_tokens", text)
        text = "Tokens of one step: prompt tokens computed and output tokens added."
        self._step_tokens = make.histogram("vllm:iteration_tokens_total", text, _STEP_TOKENS)

    def _make_requests(self, make: _Maker, capacity: int) -> None:
        """Create the series of ended samples and their sizes, with buckets up to `capacity` tokens."""
        text = "Ended samples by finish reason."
        self._success = make.counters("vllm:request_success", text, "finished_reason", END_REASONS)
        sizes = buckets_1_2_5(capacity)
        self._prompt_sizes = make.histogram("vllm:request_prompt_tokens", "Prompt tokens of a sample.", sizes)
        self._output_sizes = make.histogram("vllm:request_generation_tokens", "Output tokens of a sample.", sizes)
        text = "Output tokens of a request's longest sample."
        self._longest_outputs = make.histogram("vllm:request_max_num_generation_tokens", text, sizes)
        text = "Prompt tokens of a sample that were not in the cache."
        self._prefill_sizes = make.histogram("vllm:request_prefill_kv_computed_tokens", text, sizes)
        self._max_tokens = make.histogram("vllm:request_params_max_tokens", "max_tokens of a sample.", sizes)
        self._params_n = make.histogram("vllm:request_params_n", "n of a request.", _SAMPLES)
        text = "Preemptions of a sample."
        self._request_preemptions = make.histogram("vllm:request_num_preemptions", text, _PREEMPTIONS)

    def _make_times(self, make: _Maker) -> None:
        text = "From a sample's arrival to its first token."
        self._first_token = make.histogram("vllm:time_to_first_token_seconds", text, _FIRST_TOKEN)
        text = "Between two output tokens of a sample."
        self._token_gap = make.histogram("vllm:inter_token_latency_seconds", text, _TOKEN_GAP)
        text = "Mean time between the output tokens of a sample that has two or more."
        self._token_time = make.histogram("vllm:request_time_per_output_token_seconds", text, _TOKEN_GAP)
        text = "From a sample's arrival to its end."
        self._e2e = make.histogram("vllm:e2e_request_latency_seconds", text, _LATENCY)
        text = "From a sample's arrival until it started."
        self._queue = make.histogram("vllm:request_queue_time_seconds", text, _LATENCY)
        text = "From a sample's start to its end."
        self._inference = make.histogram("vllm:request_inference_time_seconds", text, _LATENCY)
        text = "From a sample's start to its first token."
        self._prefill = make.histogram("vllm:request_prefill_time_seconds", text, _LATENCY)
        text = "From a sample's first token to its end."
        self._decode = make.histogram("vllm:request_decode_time_seconds", text, _LATENCY)

    def _make_http(self) -> None:
        labels, where = ("method", "handler"), self._registry
        text = "HTTP responses by method, route and class of status."
        self._http_requests = Counter("http_requests", text, (*labels, "status"), registry=where)
        text = "Time from a request to the end of its response."
        name = "http_request_duration_seconds"
        self._http_duration = Histogram(name, text, labels, registry=where, buckets=_HTTP_LATENCY)

    def _http_child(self, method: str, route: str, status: str) -> tuple[Counter, Histogram]:
        route = printable(route)
        return self._http_requests.labels(method, route, status), self._http_duration.labels(method, route)


class _Maker:
    """Creates series in one registry, with the labels that all of a model's series have."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": printable(model_name), "engine": "0"}

    def gauge(self, name: str, text: str, extra: Mapping[str, str] = _NO_LABELS) -> Gauge:
        """Return a gauge at 0; `extra` are further labels."""
        labels = {**{key: printable(value) for key, value in extra.items()}, **self._labels}
        return Gauge(name, text, tuple(labels), registry=self._registry).labels(*labels.values())

    def gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """Return a gauge for each value of one further label."""
        family = Gauge(name, text, (*self._labels, label), registry=self._registry)
        return {value: family.labels(*self._labels.values(), value) for value in values}

    def counter(self, name: str, text: str) -> Counter:
        """Return a counter at 0; Prometheus appends `_total` to its name."""
        return Counter(name, text, tuple(self._labels), registry=self._registry).labels(*self._labels.values())

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """Return a counter for each value of one further label."""
        family = Counter(name, text, (*self._labels, label), registry=self._registry)
        return {value: family.labels(*self._labels.values(), value) for value in values}

    def histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        """Return an empty histogram with these upper bounds and +Inf."""
        family = Histogram(name, text, tuple(self._labels), registry=self._registry, buckets=bounds)
        return family.labels(*self._labels.values())


def not_loaded() -> bytes:
    """Return the text of `/metrics` while no model is loaded: the engine is down, and the series of the process."""
    registry = CollectorRegistry()
    Gauge(
        "nano_inference_engine_up",
        "1 while the engine runs, 0 after it has failed or before it is loaded.",
        registry=registry,
    ).set(0)
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
