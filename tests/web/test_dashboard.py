"""The dashboard shows the values of /metrics, in all states of the server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Request, Route, expect
from prometheus_client.parser import text_string_to_metric_families

from nano_inference.server.config import ServerConfig
from nano_inference.server.metrics import Metrics, not_loaded
from tests.server.test_metrics import RECORD, STEP, finish
from tests.server.tiny import Running, running
from tests.web.fake import TIMEOUT_S
from tests.web.watch import Watch, axe_violations

START = 1_800_000_000
POLL_S = 2
"""Seconds between two readings of /metrics."""
FAILED = "Failed to load resource"
"""Chromium's console message for a failed request."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Answer = bytes | int | None
"""The text of /metrics, an error status, or None for no answer."""


class Board:
    """The dashboard with a controlled clock and, if `answer` is given, a scripted /metrics."""

    def __init__(
        self, context: BrowserContext, server: Running, answer: Answer = b"", *, path: str = "/dashboard"
    ) -> None:
        self.page = context.new_page()
        self.watch = Watch(self.page, server.url)
        self.answer = answer
        self.asked: list[str] = []
        self.page.on("request", self._on_request)
        if answer != b"":
            self.page.route("**/metrics", self._fulfil)
        self.page.clock.install(time=START)
        self.page.goto(server.url + path)

    def _on_request(self, request: Request) -> None:
        self.asked.append(request.url)

    def _fulfil(self, route: Route) -> None:
        if self.answer is None:
            route.abort("connectionrefused")
        elif isinstance(self.answer, int):
            body = {"error": {"message": "not now", "code": "loading"}}
            route.fulfill(status=self.answer, body=json.dumps(body), content_type="application/json")
        else:
            route.fulfill(body=self.answer, content_type="text/plain")

    def freeze(self) -> Board:
        """Wait for the first reading, stop the clock, and read once more."""
        self.shows("Live")
        self.page.clock.pause_at(START + 100)
        self._wait_until_read()
        self.poll()
        return self

    def poll(self, answer: Answer = b"", seconds: float = POLL_S) -> None:
        """Advance the clock and wait for the next reading."""
        self.answer = answer if answer != b"" else self.answer
        self.page.clock.fast_forward(int(seconds * 1000))
        self._wait_until_read()

    def _wait_until_read(self) -> None:
        now = self.page.evaluate("new Date().toLocaleTimeString('en-GB')")
        expect(self.page.locator("#read-at")).to_have_text(f"Read at {now}.")

    def shows(self, state: str) -> None:
        expect(self.page.locator("#state")).to_have_text(state)

    def tile(self, name: str) -> float | None:
        """Return the number of a tile, None if it shows none."""
        return number(self.page.locator(f"#tile-{name} data").get_attribute("value"))

    def detail(self, name: str) -> str:
        return self.page.locator(f"#tile-{name} .more").inner_text()

    def chart(self, name: str) -> dict[str, float | None]:
        """Return the values in a chart's legend by the names of its lines."""
        found = {}
        for item in self.page.locator(f"#chart-{name} .legend li").all():
            value = item.locator("data")
            found[item.inner_text().removesuffix(value.inner_text()).strip()] = number(value.get_attribute("value"))
        return found

    def num_points(self, name: str, line: int = 0) -> int:
        """Return the number of points of a line."""
        path = self.page.locator(f"#chart-{name} .plot .line-{line}").first.get_attribute("d") or ""
        return path.count("M") + path.count("L")


def number(text: str | None) -> float | None:
    return float(text) if text else None


@pytest.fixture
def metrics() -> Metrics:
    return new_metrics()


def new_metrics() -> Metrics:
    return Metrics(model_name="tiny", num_blocks=2048, block_size=16, cache_config={})


def after_step(metrics: Metrics, running: int = 0, generated: int = 0, seconds: float = 0.03) -> bytes:
    """Record one step and return the text of /metrics."""
    metrics.token_gap(seconds * generated, generated)
    metrics.step(replace(STEP, num_running=running, num_free_blocks=1024))
    return metrics.render()


def values(text: str) -> dict[str, float]:
    """Return all samples by name and labels, without the labels that all samples have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found[sample.name + "".join(f"|{key}={labels[key]}" for key in sorted(labels))] = sample.value
    return found


def quantile(before: dict[str, float], after: dict[str, float], name: str, q: float) -> float:
    """Return a quantile as defined in Prometheus' documentation of histogram_quantile."""
    start = f"{name}_bucket|le="
    bounds = sorted(float(key.removeprefix(start)) for key in after if key.startswith(start))
    counts = [after[start + text] - before[start + text] for text in (str(b).replace("inf", "+Inf") for b in bounds)]
    rank, lower, below = q * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket contains all observations")


def test_numbers_equal_the_metrics(context: BrowserContext, server: Running) -> None:
    board = Board(context, server).freeze()
    before = values(server.client.get("/metrics").text)
    for size in (40, 40, 90):
        body = {"model": "tiny", "prompt": "a" * size, "max_tokens": 30, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
    after = values(server.client.get("/metrics").text)
    board.poll()
    rose = {name: after[name] - before.get(name, 0) for name in after}
    assert rose["vllm:generation_tokens_total"] == 90 and rose["vllm:prompt_tokens_total"] == 170
    assert rose["vllm:prefix_cache_hits_total"] > 0
    assert board.tile("generated") == pytest.approx(90 / POLL_S)
    assert board.tile("prompt") == pytest.approx(170 / POLL_S)
    hits = rose["vllm:prefix_cache_hits_total"] / rose["vllm:prefix_cache_queries_total"]
    assert board.tile("prefix") == pytest.approx(hits)
    assert board.chart("prompt") == pytest.approx({"all": 85, "from the cache": hits * 85})
    for name, series in {
        "first": "vllm:time_to_first_token_seconds",
        "gap": "vllm:inter_token_latency_seconds",
        "queue": "vllm:request_queue_time_seconds",
    }.items():
        wanted = {part: quantile(before, after, series, q) for part, q in QUANTILES.items()}
        assert board.chart(name) == pytest.approx(wanted), name
        if name != "queue":
            assert board.tile(name) == pytest.approx(wanted["p50"])
    assert board.tile("running") == after["vllm:num_requests_running"]
    assert board.tile("waiting") == after["vllm:num_requests_waiting"]
    assert board.tile("kv") == pytest.approx(after["vllm:kv_cache_usage_perc"])
    assert board.tile("weights") == 0 and board.detail("weights") == "as loaded"
    assert board.tile("preempted") == board.tile("aborted") == board.tile("errors") == 0
    assert board.detail("generated").startswith("90 since this page was opened; ")
    assert board.detail("running") == "of at most 256" and board.detail("kv") == "of 32,768 tokens"
    facts = board.page.locator("#facts").inner_text().split("\n")
    info = server.client.get("/info").json()
    assert {info["server"], info["architecture"], "35,232", "512 tokens"} <= set(facts)
    board.watch.assert_clean()


def test_charts_move_and_show_the_values_at_a_time(context: BrowserContext, server: Running, metrics: Metrics) -> None:
    board = Board(context, server, after_step(metrics)).freeze()
    page = board.page
    before = page.locator("#chart-requests .plot .line-0").first.get_attribute("d")
    num_points = board.num_points("requests")
    for count in (1, 3, 9):
        board.poll(after_step(metrics, count, count * 10))
    assert board.num_points("requests") == num_points + 3
    assert page.locator("#chart-requests .plot .line-0").first.get_attribute("d") != before
    assert board.chart("generated") == {"generated": pytest.approx(45)}
    plot = page.locator("#chart-requests .plot")
    box = plot.bounding_box()
    assert box is not None
    inside = box["width"] - 52 - 14
    plot.hover(position={"x": 52 + inside * (1 - 2 / 300), "y": 60})
    assert board.chart("requests")["running"] == 3
    assert plot.locator("circle").count() == 2
    page.mouse.move(2, 2)
    assert board.chart("requests")["running"] == 9 and plot.locator("circle").count() == 0
    page.keyboard.press("Tab")
    plot.focus()
    for key in ("ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert board.chart("requests")["running"] == 1
    assert "running 1" in page.locator("#chart-requests [aria-live]").inner_text()
    board.poll(after_step(metrics, 4))
    assert board.chart("requests")["running"] == 1, "the chosen time stays selected"
    page.keyboard.press("Escape")
    assert board.chart("requests")["running"] == 4
    assert "now running 4, waiting 0" in (plot.get_attribute("aria-label") or "")
    page.locator("#chart-requests summary").click()
    expect(page.locator("#chart-requests tbody tr").first).to_be_visible()
    rows = page.locator("#chart-requests tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows[:4]] == ["4", "9", "3", "1"]
    board.watch.assert_clean()


@pytest.mark.parametrize("has_new_start", [True, False], ids=["new start time", "lower counts"])
def test_restart_gives_no_negative_rate(has_new_start: bool, context: BrowserContext, server: Running) -> None:
    def started_at(text: bytes, second: int) -> bytes:
        lines = [line for line in text.decode().splitlines() if not line.startswith("process_start_time_seconds ")]
        return "\n".join([*lines, f"process_start_time_seconds {second}", ""]).encode()

    old, new = new_metrics(), new_metrics()
    board = Board(context, server, started_at(after_step(old, 1, 50, 0.4), 1)).freeze()
    board.poll(started_at(after_step(old, 1, 10, 0.4), 1))
    assert board.tile("generated") == 5
    # 80 tokens after the restart are more than the 60 before it, so only the start time shows the restart.
    count = 80 if has_new_start else 20
    board.poll(started_at(after_step(new, 1, count, 0.03), 2 if has_new_start else 1))
    assert board.tile("generated") == count / POLL_S
    assert board.chart("gap")["p99"] == pytest.approx(0.05, rel=0.02)
    assert board.detail("generated").startswith(f"{10 + count} since this page was opened; ")
    board.poll(started_at(after_step(new, 1, 4), 2 if has_new_start else 1))
    assert board.tile("generated") == 2


PROBLEMS: dict[str, tuple[Answer, str, str]] = {
    "no answer": (None, "Unreachable", "does not answer"),
    "a proxy without a server": (502, "Unreachable", "does not answer"),
    "a proxy that waits": (503, "Loading", "being loaded"),
    "no model yet": (not_loaded(), "Loading", "being loaded"),
    "something else": (418, "Refused", "The server returned: not now."),
}


def test_connection_problems_are_shown_and_polling_continues(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, PROBLEMS["no answer"][0])
    for count, (answer, state, text) in enumerate(PROBLEMS.values()):
        if count:
            board.answer = answer
            board.page.clock.fast_forward(POLL_S * 1000)
        board.shows(state)
        expect(board.page.locator("#state-text")).to_contain_text(text)
        board.answer = after_step(metrics, count)
        board.page.clock.fast_forward(POLL_S * 1000)
        board.shows("Live")
        assert board.tile("running") == count
    board.watch.assert_clean([FAILED])


def test_failed_engine_and_draining_server_are_shown(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, after_step(metrics, 1)).freeze()
    board.page.route("**/health", lambda route: route.fulfill(body='{"status": "draining"}'))
    board.poll()
    board.shows("Draining")
    metrics.halted(True)
    board.poll(metrics.render())
    board.shows("Draining")
    metrics.engine_died()
    board.poll(metrics.render())
    board.shows("Engine failed")
    assert board.tile("running") == 0
    board.watch.assert_clean()


def test_key_is_requested_and_sent(context: BrowserContext, tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, api_key=("sesame-open",))) as one:
        board = Board(context, one)
        page = board.page
        dialog, note = page.locator("#key-dialog"), page.locator("#key-note")
        board.shows("Key needed")
        expect(note).to_contain_text("needs a key")
        page.clock.fast_forward(60_000)
        assert sum(url.endswith("/metrics") for url in board.asked) == 1, "no polling without a key"
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Enter the key").click()
        page.get_by_label("Key", exact=True).fill("wrong-wrong")
        page.keyboard.press("Enter")
        expect(note).to_have_text("The server does not accept this key.")
        page.get_by_label("Key", exact=True).fill("sesame-open")
        page.get_by_role("button", name="Use this key").click()
        board.shows("Live")
        expect(dialog).to_be_hidden()
        assert "sesame-open" in page.evaluate("JSON.stringify(sessionStorage)")
        assert "sesame-open" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        board.watch.assert_clean([FAILED])


def test_polls_only_while_visible_and_not_paused(context: BrowserContext, server: Running, metrics: Metrics) -> None:
    board = Board(context, server, after_step(metrics)).freeze()
    page = board.page

    def hide(is_hidden: str) -> None:
        page.evaluate(
            f"""() => {{ Object.defineProperty(document, "hidden", {{ configurable: true, value: {is_hidden} }});
            document.dispatchEvent(new Event("visibilitychange")); }}"""
        )

    def num_requests(seconds: int) -> int:
        """Advance the clock and return the number of requests in that time."""
        num_before = len(board.asked)
        page.clock.fast_forward(seconds * 1000)
        return len(board.asked) - num_before

    page.get_by_role("button", name="Pause").click()
    board.shows("Paused")
    assert num_requests(60) == 0
    hide("true")
    hide("false")
    assert num_requests(60) == 0, "still paused after the tab was hidden"
    board.answer = after_step(metrics, 6)
    page.get_by_role("button", name="Resume").click()
    board.shows("Live")
    expect(page.locator("#tile-running data")).to_have_text("6")
    hide("true")
    assert num_requests(60) == 0
    board.answer = after_step(metrics, 7)
    hide("false")
    expect(page.locator("#tile-running data")).to_have_text("7")
    board.watch.assert_clean()


def test_model_name_is_shown_as_text(context: BrowserContext, server: Running) -> None:
    name = 'a "quoted" \\ one, {x="y"} <b>bold</b>'
    metrics = Metrics(model_name=name, num_blocks=8, block_size=16, cache_config={})
    board = Board(context, server, after_step(metrics, 3)).freeze()
    assert board.page.locator("#model").inner_text() == name
    assert board.tile("running") == 3
    board.watch.assert_clean()


LOOKS = [(1280, "light"), (360, "dark")]
"""Width and theme; each of them once, because neither changes what the other does."""


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_page_is_accessible_and_has_no_layout_shift(
    width: int, scheme: str, browser: Browser, server: Running, metrics: Metrics
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(1000 * TIMEOUT_S)
    board = Board(context, server, after_step(metrics)).freeze()
    places = """() => [...document.querySelectorAll(".tile, figure, #pause, #windows")].map((node) => {
        const { x, y, width, height } = node.getBoundingClientRect(); return [node.id, x, y, width, height]; })"""
    before = board.page.evaluate(places)
    for count in (3, 800):
        metrics.first_token(count / 300)
        finish(metrics, replace(RECORD, finish_reason="abort", prompt_tokens=4000 * count, cached_tokens=999))
        board.poll(after_step(metrics, count, count * 20, 1.7))
    assert board.page.evaluate(places) == before
    assert board.page.evaluate("document.documentElement.dataset.theme") == scheme
    assert board.page.evaluate("document.documentElement.scrollWidth") == width
    board.page.locator("#chart-gap summary").click()
    board.page.clock.resume()  # axe-core needs a running clock
    assert axe_violations(board.page) == []
    board.answer = 401
    board.page.clock.fast_forward(POLL_S * 1000)
    expect(board.page.locator("#key-dialog")).to_be_visible()
    assert axe_violations(board.page) == []
    board.watch.assert_clean([FAILED])
    context.close()
