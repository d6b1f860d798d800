"""/metrics: all series of vLLM's dashboards exist from the start, and all counts are exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nano_inference.core.outbox import SampleTimes
from nano_inference.engine import InferenceEngine
from nano_inference.server.metrics import END_REASONS, MAX_ROUTES, REJECTIONS, Metrics
from nano_inference.types import EngineRequest, SamplingParams, StepStats, TrainingSample
from tests.sim.fakes import Calculator, fake_config, fake_parts, parrot

ENGINE = {"model_name": "m", "engine": "0"}
QUANTILES = ("bucket", "sum", "count")
HISTOGRAMS = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("time_to_first_token_seconds", "request_decode_time_seconds", "request_prefill_time_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_generation_tokens"),
    *("request_prompt_tokens", "request_params_n", "request_params_max_tokens", "request_num_preemptions"),
    *("request_max_num_generation_tokens", "iteration_tokens_total"),
)
"""In the Grafana and Perses dashboards of vLLM 0.33 (examples/observability) or in its test of /metrics."""
SERIES = (
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in QUANTILES),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_requests_waiting_by_reason", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:num_preemptions_total", "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_cached_total"),
    "vllm:admission_rejections_total",
)

STEP = StepStats(
    num_rows=1, num_computed=1, num_sampled=1, num_preempted=0, num_running=1, num_waiting=0, num_free_blocks=8,
    weight_version=0
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One ended sample of a request."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    params_n: int
    params_max_tokens: int
    finish_reason: str
    num_preemptions: int
    arrived: float
    started: float | None
    first_token: float | None
    ended: float
    ends_request: bool = True
    longest_output: int = 0  # of the request's other samples


RECORD = Ended(
    prompt_tokens=7, cached_tokens=0, output_tokens=10, params_n=1, params_max_tokens=10, finish_reason="length",
    num_preemptions=0, arrived=100.0, started=101.0, first_token=103.0, ended=112.0
)  # fmt: skip


def finish(metrics: Metrics, one: Ended) -> None:
    """Report an ended sample as `EngineLink` does."""
    params = SamplingParams(max_tokens=one.params_max_tokens or None)
    request = EngineRequest(prompt=[0] * one.prompt_tokens, params=params, num_samples=one.params_n)
    times = SampleTimes(one.arrived, one.started, one.first_token, None, one.ended, one.output_tokens)
    other = SampleTimes(one.arrived, ended=one.ended if one.ends_request else None, num_tokens=one.longest_output)
    counts = {"num_cached": one.cached_tokens, "num_preemptions": one.num_preemptions}
    metrics.finished(request, [times, other], times, one.finish_reason, **counts)


def new(model_name: str = "m", **cache_config: str) -> Metrics:
    return Metrics(model_name=model_name, num_blocks=8, block_size=16, cache_config=cache_config)


def samples(text: bytes) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text.decode()):
        yield from family.samples


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the value of the one sample with this name and these labels."""
    found = [s.value for s in samples(metrics.render()) if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def run(metrics: Metrics, prompt_tokens: int, output_tokens: int) -> None:
    """Record one sample that runs alone."""
    for position in range(output_tokens):
        if position:
            metrics.token_gap(1.0)
        else:
            metrics.first_token(3.0)
        if position == output_tokens - 1:
            finish(metrics, replace(RECORD, prompt_tokens=prompt_tokens, output_tokens=output_tokens))
        metrics.step(replace(STEP, num_computed=1 if position else prompt_tokens))


def test_every_dashboard_series_exists_before_first_request() -> None:
    found = {s.name: s for s in samples(new().render()) if ENGINE.items() <= s.labels.items() and s.value == 0}
    assert not set(SERIES) - set(found)


def test_ten_requests_of_ten_tokens_count_exactly() -> None:
    metrics = new()
    for _ in range(10):
        run(metrics, prompt_tokens=7, output_tokens=10)
    expected = {
        "vllm:time_to_first_token_seconds": (10, 30.0),
        "vllm:inter_token_latency_seconds": (90, 90.0),
        "vllm:request_time_per_output_token_seconds": (10, 10.0),
        "vllm:e2e_request_latency_seconds": (10, 120.0),
        "vllm:request_queue_time_seconds": (10, 10.0),
        "vllm:request_inference_time_seconds": (10, 110.0),
        "vllm:request_prefill_time_seconds": (10, 20.0),
        "vllm:request_decode_time_seconds": (10, 90.0),
        "vllm:request_num_preemptions": (10, 0),
        "vllm:request_prompt_tokens": (10, 70),
        "vllm:request_generation_tokens": (10, 100),
        "vllm:request_max_num_generation_tokens": (10, 100),
        "vllm:request_prefill_kv_computed_tokens": (10, 70),
        "vllm:request_params_n": (10, 10),
        "vllm:request_params_max_tokens": (10, 100),
        "vllm:iteration_tokens_total": (100, 170),
    }
    for name, (count, total) in expected.items():
        assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (count, total), name
    assert value(metrics, "vllm:prompt_tokens_total") == 70
    assert value(metrics, "vllm:generation_tokens_total") == 100
    assert value(metrics, "vllm:prefix_cache_queries_total") == 70
    for reason in END_REASONS:
        expected_count = 10 if reason == "length" else 0
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == expected_count


def serve(engine: InferenceEngine, metrics: Metrics, num_samples: int) -> list[TrainingSample]:
    """Step until all samples ended, reporting to the metrics as a server does; return them."""
    seen: set[tuple[int, int]] = set()
    ended: list[TrainingSample] = []
    for _ in range(5000):
        if len(ended) == num_samples:
            return ended
        result = engine.tick()
        for delta in result.deltas:
            key = (delta.request_id, delta.sample_index)
            if delta.token_ids and key in seen:
                metrics.token_gap(0.5, len(delta.token_ids))
            elif delta.token_ids:
                seen.add(key)
                metrics.first_token(1.0)
            if delta.sample:
                ended.append(delta.sample)
                finish(metrics, record_of(delta.sample))
        metrics.step(result.stats)
    pytest.fail("the engine did not end")


def record_of(sample: TrainingSample) -> Ended:
    return replace(
        RECORD,
        prompt_tokens=len(sample.prompt_tokens),
        cached_tokens=sample.num_cached_tokens,
        output_tokens=len(sample.completion_tokens),
        finish_reason=sample.finish_reason,
        num_preemptions=sample.num_preemptions,
    )


def test_draft_tokens_are_counted_and_rejected_ones_are_not_output() -> None:
    parts = fake_parts("paged", 60, 4, drawing=parrot)
    engine, metrics = InferenceEngine(fake_config(speculation="ngram"), parts=parts), new()
    for i in range(20):
        engine.add_request([40 + i % 7] * 7, SamplingParams(max_tokens=30, ignore_eos=True, seed=i))
        engine.flush_cache()
        serve(engine, metrics, 1)
    right, wrong = parts.runner.num_right, parts.runner.num_wrong
    assert min(right, wrong) > 20
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == right + wrong
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == right
    assert value(metrics, "vllm:generation_tokens_total") == 20 * 30
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 20 * (7 + 30)
    assert value(metrics, "vllm:iteration_tokens_total_count") == 20 * 30 - right


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_counts_of_busy_engine_equal_sums_over_samples(cache_type: str) -> None:
    engine = InferenceEngine(fake_config(), parts=fake_parts(cache_type, 20, 4))
    metrics = Metrics(model_name="m", num_blocks=20, block_size=4, cache_config={})
    for i in range(30):
        prompt, params = [5] * (i % 9) + [i], SamplingParams(max_tokens=i % 20, seed=i, ignore_eos=i % 3 > 0)
        engine.add_request(prompt, params, 1 + i % 3, program=Calculator() if i % 2 else None)
    done = serve(engine, metrics, 60)
    assert len(done) == 60 and any(0 in sample.mask for sample in done)
    outputs, prompts = [len(s.completion_tokens) for s in done], [len(s.prompt_tokens) for s in done]
    hits, preemptions = sum(s.num_cached_tokens for s in done), sum(s.num_preemptions for s in done)
    assert hits and preemptions
    assert value(metrics, "vllm:generation_tokens_total") == sum(outputs)
    assert value(metrics, "vllm:request_generation_tokens_sum") == sum(outputs)
    assert (
        value(metrics, "vllm:prompt_tokens_total") == value(metrics, "vllm:request_prompt_tokens_sum") == sum(prompts)
    )
    assert value(metrics, "vllm:prefix_cache_hits_total") == hits
    assert value(metrics, "vllm:num_preemptions_total") == preemptions
    assert value(metrics, "vllm:request_num_preemptions_sum") == preemptions
    assert sum(s.value for s in samples(metrics.render()) if s.name == "vllm:request_success_total") == 60


def test_bucket_bounds_equal_vllm() -> None:
    bounds: dict[str, list[str]] = {}
    for sample in samples(new().render()):
        if sample.name.endswith("_bucket"):
            bounds.setdefault(sample.name.removesuffix("_bucket"), []).append(sample.labels["le"])
    tokens = ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    assert bounds["vllm:request_prompt_tokens"] == bounds["vllm:request_generation_tokens"] == tokens
    assert bounds["vllm:request_params_n"] == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    assert bounds["vllm:request_num_preemptions"] == ["1.0", "2.0", "3.0", "4.0", "5.0", "10.0", "20.0", "+Inf"]
    ends = {name: (found[0], found[-2], len(found)) for name, found in bounds.items()}
    assert ends["vllm:time_to_first_token_seconds"] == ("0.001", "2560.0", 23)
    assert ends["vllm:inter_token_latency_seconds"] == ("0.01", "80.0", 20)
    assert ends["vllm:request_time_per_output_token_seconds"] == ("0.01", "80.0", 20)
    assert ends["vllm:e2e_request_latency_seconds"] == ("0.3", "7680.0", 22)
    assert ends["vllm:iteration_tokens_total"] == ("1.0", "16384.0", 14)


def test_cached_prompt_tokens_are_hits_and_the_rest_is_computed() -> None:
    metrics = new()
    finish(metrics, replace(RECORD, prompt_tokens=100, cached_tokens=64))
    finish(metrics, replace(RECORD, prompt_tokens=30, cached_tokens=0))
    assert value(metrics, "vllm:prompt_tokens_total") == value(metrics, "vllm:prefix_cache_queries_total") == 130
    assert value(metrics, "vllm:prefix_cache_hits_total") == value(metrics, "vllm:prompt_tokens_cached_total") == 64
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 64
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 66
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum") == 66


def test_a_sample_aborted_in_the_queue_computed_nothing() -> None:
    metrics = new()
    finish(metrics, replace(RECORD, output_tokens=0, finish_reason="abort", started=None, first_token=None))
    assert value(metrics, "vllm:prompt_tokens_total") == value(metrics, "vllm:prefix_cache_queries_total") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 12.0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    for phase in ("inference", "prefill", "decode"):
        assert value(metrics, f"vllm:request_{phase}_time_seconds_count") == 0


def test_request_parameters_are_recorded_once() -> None:
    metrics = new()
    finish(metrics, replace(RECORD, params_n=3, output_tokens=9, ends_request=False))
    finish(metrics, replace(RECORD, params_n=3, output_tokens=2, ends_request=False))
    finish(metrics, replace(RECORD, params_n=3, output_tokens=4, longest_output=9))
    assert value(metrics, "vllm:request_params_n_count") == 1
    assert value(metrics, "vllm:request_params_n_sum") == 3
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 9
    assert value(metrics, "vllm:request_generation_tokens_count") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 15


def test_token_gap_is_divided_among_tokens() -> None:
    metrics = new()
    metrics.token_gap(0.5, 4)
    metrics.token_gap(7.0, 0)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 0.5


def test_negative_durations_count_as_zero() -> None:
    metrics = new()
    metrics.first_token(-1.0)
    metrics.token_gap(-1.0, 2)
    metrics.responded("GET", "/v1/models", 200, -1.0)
    finish(metrics, replace(RECORD, arrived=50.0, started=40.0, first_token=30.0, ended=20.0))
    finish(metrics, replace(RECORD, arrived=50.0, started=None, first_token=None, ended=20.0))
    metrics.step(replace(STEP, num_free_blocks=9))
    found = [s for s in samples(metrics.render()) if s.name.startswith(("vllm:", "http_"))]
    assert all(s.value >= 0 for s in found)
    assert all(s.value == 0 for s in found if s.name.endswith("seconds_sum"))
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0
    assert value(metrics, "vllm:request_decode_time_seconds_count") == 1


def test_a_rejection_has_one_of_the_known_reasons() -> None:
    metrics = new()
    for reason in (*REJECTIONS, "something else"):
        metrics.rejected(reason)
    found = {
        s.labels["reason"]: s.value for s in samples(metrics.render()) if s.name == "vllm:admission_rejections_total"
    }
    assert found == dict.fromkeys(REJECTIONS, 1) | {"other": 2}


def test_responses_count_by_method_route_and_class_of_status() -> None:
    metrics = new()
    metrics.responded("POST", "/v1/completions", 200, 0.25)
    metrics.responded("POST", "/v1/completions", 204, 0.5)
    metrics.responded("POST", "/v1/completions", 503, 2.0)
    metrics.responded("BREW\n", "/v1/completions", 999, 2.0)
    route = {"handler": "/v1/completions"}
    assert value(metrics, "http_requests_total", method="POST", status="2xx", **route) == 2
    assert value(metrics, "http_requests_total", method="POST", status="5xx", **route) == 1
    assert value(metrics, "http_requests_total", method="other", status="5xx", **route) == 1
    assert value(metrics, "http_request_duration_seconds_sum", method="POST", **route) == 2.75
    assert value(metrics, "http_request_duration_seconds_bucket", method="POST", le="0.5", **route) == 2


def test_number_of_routes_is_bounded() -> None:
    metrics = new()
    for i in range(MAX_ROUTES + 100):
        metrics.responded("GET", f"/{i}", 200, 0.1)
    metrics.responded("GET", "/0", 200, 0.1)
    found = [s for s in samples(metrics.render()) if s.name == "http_requests_total"]
    assert len(found) == MAX_ROUTES + 1
    assert value(metrics, "http_requests_total", handler="other") == 100
    assert value(metrics, "http_requests_total", handler="/0") == 2


HOSTILE = 'a"} 1\nvllm:num_requests_running{model_name="\\b\\n'


@pytest.mark.parametrize("name", [HOSTILE, "", "模型/😀", "a\\", "{}", 'x"', "\x00\x85\u2028"])
def test_model_name_is_escaped(name: str) -> None:
    metrics = new(name, cache_dtype=name)
    assert value(metrics, "vllm:num_requests_running", model_name=name) == 0
    assert value(metrics, "vllm:cache_config_info", model_name=name, cache_dtype=name) == 1
    plain = [line.split("{")[0].split(" ")[0] for line in new(cache_dtype="x").render().decode().split("\n")]
    assert [line.split("{")[0].split(" ")[0] for line in metrics.render().decode().split("\n")] == plain


def test_snapshots_of_states_and_samples_that_start_from_them_are_counted() -> None:
    engine, metrics = InferenceEngine(fake_config(), parts=fake_parts("radix", 60, 4, num_states=8)), new()
    for _ in range(2):
        engine.add_request(list(range(12)), SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
        serve(engine, metrics, 1)
    assert value(metrics, "nano_inference_state_snapshots") == engine.parts.kv.states.num_snapshots == 2
    assert value(metrics, "nano_inference_state_hits_total") == 1
