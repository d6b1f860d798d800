"""The dashboard shows what /metrics says: nothing wrong, nothing twice, nothing negative, whatever the server does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route, expect
from prometheus_client.parser import text_string_to_metric_families

from nano_inference.config import ServerConfig
from nano_inference.server.metrics import Metrics, not_loaded
from nano_inference.server.pages import load_page
from tests.server.test_metrics import RECORD, STEP
from tests.server.tiny import Running, running
from tests.web.fake import PATIENCE_S
from tests.web.watch import Watch, axe_violations

START = 1_800_000_000
LOOK = 2
"""Seconds between two looks."""
REFUSED = "Failed to load resource"
"""What the browser itself logs for an answer that is no success, or does not come."""
PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Answer = bytes | int | None
"""The text of /metrics, or another status, or no answer."""


class Board:
    """The page at a clock that stands still between looks, with /metrics as a test wants it."""

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

    def hold(self) -> Board:
        """Wait for the first look, and let time stand still from then on."""
        self.shows("Live")
        self.page.clock.pause_at(START + 100)
        self._was_read()
        self.look()
        return self

    def look(self, answer: Answer = b"", seconds: float = LOOK) -> None:
        """Let the page look once more, so many seconds later."""
        self.answer = answer if answer != b"" else self.answer
        self.page.clock.fast_forward(int(seconds * 1000))
        self._was_read()

    def _was_read(self) -> None:
        now = self.page.evaluate("new Date().toLocaleTimeString('en-GB')")
        expect(self.page.locator("#read-at")).to_have_text(f"Read at {now}.")

    def shows(self, state: str) -> None:
        expect(self.page.locator("#state")).to_have_text(state)

    def tile(self, name: str) -> float | None:
        """The number of a tile, None when it shows none."""
        return number(self.page.locator(f"#tile-{name} data").get_attribute("value"))

    def more(self, name: str) -> str:
        return self.page.locator(f"#tile-{name} .more").inner_text()

    def chart(self, name: str) -> dict[str, float | None]:
        """The values beside the names of a chart's lines."""
        found = {}
        for item in self.page.locator(f"#chart-{name} .legend li").all():
            value = item.locator("data")
            found[item.inner_text().removesuffix(value.inner_text()).strip()] = number(value.get_attribute("value"))
        return found

    def corners(self, name: str, line: int = 0) -> int:
        """Through how many points a line goes."""
        path = self.page.locator(f"#chart-{name} .plot .line-{line}").first.get_attribute("d") or ""
        return path.count("M") + path.count("L")


def number(text: str | None) -> float | None:
    return float(text) if text else None


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory) as one:
        yield one


@pytest.fixture
def metrics() -> Metrics:
    return new_metrics()


def new_metrics() -> Metrics:
    return Metrics(model_name="tiny", num_blocks=2048, block_size=16, cache_config={})


def told(metrics: Metrics, running: int = 0, generated: int = 0, seconds: float = 0.03) -> bytes:
    """The text after one more step."""
    metrics.token_gap(seconds * generated, generated)
    metrics.step(replace(STEP, num_running=running, num_free_blocks=1024))
    return metrics.render()


def values(text: str) -> dict[str, float]:
    """Every sample by name and labels, but for those that all have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found[sample.name + "".join(f"|{key}={labels[key]}" for key in sorted(labels))] = sample.value
    return found


def quantile(before: dict[str, float], after: dict[str, float], name: str, q: float) -> float:
    """As Prometheus' documentation of histogram_quantile has it."""
    start = f"{name}_bucket|le="
    bounds = sorted(float(key.removeprefix(start)) for key in after if key.startswith(start))
    counts = [after[start + text] - before[start + text] for text in (str(b).replace("inf", "+Inf") for b in bounds)]
    rank, lower, below = q * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket holds all")


def test_its_numbers_are_those_of_the_metrics(context: BrowserContext, server: Running) -> None:
    board = Board(context, server).hold()
    before = values(server.client.get("/metrics").text)
    for size in (40, 40, 90):
        body = {"model": "tiny", "prompt": "a" * size, "max_tokens": 30, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
    after = values(server.client.get("/metrics").text)
    board.look()
    rose = {name: after[name] - before.get(name, 0) for name in after}
    assert rose["vllm:generation_tokens_total"] == 90 and rose["vllm:prompt_tokens_total"] == 170
    assert rose["vllm:prefix_cache_hits_total"] > 0
    assert board.tile("generated") == pytest.approx(90 / LOOK)
    assert board.tile("prompt") == pytest.approx(170 / LOOK)
    hits = rose["vllm:prefix_cache_hits_total"] / rose["vllm:prefix_cache_queries_total"]
    assert board.tile("prefix") == pytest.approx(hits)
    assert board.chart("prompt") == pytest.approx({"all": 85, "from the cache": hits * 85})
    for name, series in {
        "first": "vllm:time_to_first_token_seconds",
        "gap": "vllm:inter_token_latency_seconds",
        "queue": "vllm:request_queue_time_seconds",
    }.items():
        wanted = {part: quantile(before, after, series, q) for part, q in PARTS.items()}
        assert board.chart(name) == pytest.approx(wanted), name
        if name != "queue":
            assert board.tile(name) == pytest.approx(wanted["p50"])
    assert board.tile("running") == after["vllm:num_requests_running"]
    assert board.tile("waiting") == after["vllm:num_requests_waiting"]
    assert board.tile("kv") == pytest.approx(after["vllm:kv_cache_usage_perc"])
    assert board.tile("weights") == 0 and board.more("weights") == "as loaded"
    assert board.tile("preempted") == board.tile("aborted") == board.tile("errors") == 0
    assert board.more("generated") == "90 in 5 min"
    assert board.more("running") == "of at most 256" and board.more("kv") == "of 32,768 tokens"
    facts = board.page.locator("#facts").inner_text().split("\n")
    info = server.client.get("/info").json()
    assert {info["server"], info["architecture"], "35,232", "512 tokens"} <= set(facts)
    board.watch.assert_clean()


def test_counts_of_trouble_and_new_weights_are_shown(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, metrics.render()).hold()
    for reason in ("abort", "abort", "error", "stop", "stop", "stop"):
        metrics.finished(replace(RECORD, finish_reason=reason))
    for reason in ("max_num_queued_reqs", "draining", "other"):
        metrics.rejected(reason)
    metrics.step(replace(STEP, num_preempted=5, num_waiting=7, num_free_blocks=512, weight_version=3))
    board.look(metrics.render())
    assert board.chart("trouble") == {"preempted": 5, "aborted": 2, "failed": 1, "refused": 3}
    assert [board.tile(name) for name in ("preempted", "aborted", "errors")] == [5, 2, 4]
    assert board.more("errors") == "1 failed, 3 refused" and board.more("preempted") == "in 5 min; 5 in all"
    assert board.tile("waiting") == 7 and board.tile("kv") == 0.75
    assert board.tile("weights") == 3
    now = board.page.evaluate("new Date().toLocaleTimeString('en-GB')")
    assert board.more("weights") == f"since {now}"
    board.look()
    assert board.chart("trouble") == {"preempted": 0, "aborted": 0, "failed": 0, "refused": 0}
    assert board.tile("errors") == 4, "the window still holds them"


BY_HAND = (
    # Observations in the buckets up to 0.1, 0.2, 0.4 and beyond, and where the quantiles lie among them.
    ((100, 0, 0, 0), (0.05, 0.095, 0.099)),
    ((50, 40, 10, 0), (0.1, 0.3, 0.38)),
    ((0, 0, 4, 0), (0.3, 0.39, 0.398)),
    ((1, 0, 0, 99), (0.4, 0.4, 0.4)),
    ((0, 0, 0, 0), (None, None, None)),
)


def test_quantiles_of_histograms_made_by_hand(context: BrowserContext, server: Running) -> None:
    def text(counts: tuple[int, ...]) -> bytes:
        name = "vllm:time_to_first_token_seconds_bucket"
        sums = zip(("0.1", "0.2", "0.4", "+Inf"), accumulate(counts), strict=True)
        lines = [f'{name}{{le="{bound}"}} {count}' for bound, count in sums]
        return "\n".join(['vllm:num_requests_running{model_name="m"} 0', *lines, ""]).encode()

    so_far: tuple[int, ...] = (7, 1, 900, 3)
    board = Board(context, server, text(so_far)).hold()
    for counts, wanted in BY_HAND:
        so_far = tuple(old + new for old, new in zip(so_far, counts, strict=True))
        board.look(text(so_far))
        shown = board.chart("first")
        assert shown == pytest.approx(dict(zip(PARTS, wanted, strict=True))), counts
    board.watch.assert_clean()


def test_charts_move_and_tell_what_was_at_a_time(context: BrowserContext, server: Running, metrics: Metrics) -> None:
    board = Board(context, server, told(metrics)).hold()
    page = board.page
    before = page.locator("#chart-requests .plot .line-0").first.get_attribute("d")
    corners = board.corners("requests")
    for count in (1, 3, 9):
        board.look(told(metrics, count, count * 10))
    assert board.corners("requests") == corners + 3
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
    board.look(told(metrics, 4))
    assert board.chart("requests")["running"] == 1, "the chosen time stays while others come"
    page.keyboard.press("Escape")
    assert board.chart("requests")["running"] == 4
    assert "now running 4, waiting 0" in (plot.get_attribute("aria-label") or "")
    page.locator("#chart-requests summary").click()
    expect(page.locator("#chart-requests tbody tr").first).to_be_visible()
    rows = page.locator("#chart-requests tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows[:4]] == ["4", "9", "3", "1"]
    board.watch.assert_clean()


@pytest.mark.parametrize("is_told", [True, False], ids=["its process is another", "its counts are lower"])
def test_a_restart_gives_no_negative_rate(is_told: bool, context: BrowserContext, server: Running) -> None:
    def born(text: bytes, second: int) -> bytes:
        lines = [line for line in text.decode().splitlines() if not line.startswith("process_start_time_seconds ")]
        return "\n".join([*lines, f"process_start_time_seconds {second}", ""]).encode()

    old, new = new_metrics(), new_metrics()
    board = Board(context, server, born(told(old, 1, 50, 0.4), 1)).hold()
    board.look(born(told(old, 1, 10, 0.4), 1))
    assert board.tile("generated") == 5
    # 80 tokens since the restart are more than the 60 before it: only the time of birth tells.
    count = 80 if is_told else 20
    board.look(born(told(new, 1, count, 0.03), 2 if is_told else 1))
    assert board.tile("generated") == count / LOOK
    assert board.chart("gap")["p99"] == pytest.approx(0.05, rel=0.02)
    assert board.more("generated") == f"{10 + count} in 5 min"
    board.look(born(told(new, 1, 4), 2 if is_told else 1))
    assert board.tile("generated") == 2


def test_what_was_counted_while_the_model_was_loaded_again_begins_at_nothing(
    context: BrowserContext, server: Running
) -> None:
    old, new = new_metrics(), new_metrics()
    board = Board(context, server, told(old, 1, 50)).hold()
    board.look(not_loaded())
    board.shows("Loading")
    assert board.tile("running") is None
    board.look(told(new, 1, 30))
    board.shows("Live")
    assert board.tile("generated") == 15


WRONG: dict[str, tuple[Answer, str, str]] = {
    "no answer": (None, "Unreachable", "does not answer"),
    "a proxy without it": (502, "Unreachable", "does not answer"),
    "a proxy that waits": (503, "Loading", "being loaded"),
    "no model yet": (not_loaded(), "Loading", "being loaded"),
    "something else": (418, "Refused", "The server says: not now."),
}


def test_it_says_what_is_wrong_and_goes_on_by_itself(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, WRONG["no answer"][0])
    for count, (answer, state, says) in enumerate(WRONG.values()):
        if count:
            board.answer = answer
            board.page.clock.fast_forward(LOOK * 1000)
        board.shows(state)
        expect(board.page.locator("#state-text")).to_contain_text(says)
        board.answer = told(metrics, count)
        board.page.clock.fast_forward(LOOK * 1000)
        board.shows("Live")
        assert board.tile("running") == count
    board.watch.assert_clean([REFUSED])


def test_a_failed_engine_and_a_stopping_server_are_told(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, told(metrics, 1)).hold()
    board.page.route("**/health", lambda route: route.fulfill(body='{"status": "draining"}'))
    board.look()
    board.shows("Stopping")
    metrics.halted(True)
    board.look(metrics.render())
    board.shows("Stopping")
    metrics.engine_died()
    board.look(metrics.render())
    board.shows("Engine failed")
    assert board.tile("running") == 0
    board.watch.assert_clean()


def test_an_engine_that_a_trainer_holds_is_told(context: BrowserContext, tiny_directory: Path) -> None:
    halted = 'nano_inference_engine_halted{engine="0",model_name="tiny"} '
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, enable_rl=True)) as one:
        board = Board(context, one)
        board.shows("Live")
        assert one.post("/pause", {}).status_code == 200
        assert one.comes_to_show(halted + "1.0")
        board.page.clock.fast_forward(LOOK * 1000)
        board.shows("Held")
        expect(board.page.locator("#state-text")).to_contain_text("requests wait")
        late = Board(context, one)
        late.shows("Held")
        expect(late.page.locator("#facts")).to_contain_text("LlamaForCausalLM")
        late.page.close()
        assert one.post("/resume", {}).status_code == 200
        assert one.comes_to_show(halted + "0.0")
        board.page.clock.fast_forward(LOOK * 1000)
        board.shows("Live")
        board.watch.assert_clean()


def test_a_server_with_a_key_is_asked_with_it(context: BrowserContext, tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, api_key=("sesame-open",))) as one:
        board = Board(context, one)
        page = board.page
        dialog, note = page.locator("#key-dialog"), page.locator("#key-note")
        board.shows("Key needed")
        expect(note).to_contain_text("wants a key")
        page.clock.fast_forward(60_000)
        assert sum(url.endswith("/metrics") for url in board.asked) == 1, "asking again would be of no use"
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Enter the key").click()
        page.get_by_label("Key", exact=True).fill("wrong-wrong")
        page.keyboard.press("Enter")
        expect(note).to_have_text("The server does not accept this key.")
        page.get_by_label("Key", exact=True).fill("sesame-open")
        page.get_by_role("button", name="Use it").click()
        board.shows("Live")
        expect(dialog).to_be_hidden()
        assert "sesame-open" in page.evaluate("JSON.stringify(sessionStorage)")
        assert "sesame-open" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        board.watch.assert_clean([REFUSED])


def test_it_looks_only_while_somebody_watches(context: BrowserContext, server: Running, metrics: Metrics) -> None:
    board = Board(context, server, told(metrics)).hold()
    page = board.page

    def hide(is_hidden: str) -> None:
        page.evaluate(
            f"""() => {{ Object.defineProperty(document, "hidden", {{ configurable: true, value: {is_hidden} }});
            document.dispatchEvent(new Event("visibilitychange")); }}"""
        )

    def passes(seconds: int) -> int:
        """How many looks are made in some time."""
        num_before = len(board.asked)
        page.clock.fast_forward(seconds * 1000)
        return len(board.asked) - num_before

    page.get_by_role("button", name="Pause").click()
    board.shows("Paused")
    assert passes(60) == 0
    hide("true")
    hide("false")
    assert passes(60) == 0, "a pause outlasts another tab"
    board.answer = told(metrics, 6)
    page.get_by_role("button", name="Go on").click()
    board.shows("Live")
    expect(page.locator("#tile-running data")).to_have_text("6")
    hide("true")
    assert passes(60) == 0
    board.answer = told(metrics, 7)
    hide("false")
    expect(page.locator("#tile-running data")).to_have_text("7")
    board.watch.assert_clean()


def test_ten_minutes_are_kept_and_a_window_shows_its_part(
    context: BrowserContext, server: Running, metrics: Metrics
) -> None:
    board = Board(context, server, told(metrics)).hold()
    for _ in range(12):
        board.look(told(metrics, 1, 60), seconds=60)
    for name, length in (("1 min", 1), ("5 min", 5), ("10 min", 10)):
        board.page.get_by_label(name, exact=True).check()
        assert board.corners("requests") == length + 1
        assert board.more("generated") == f"{60 * (length + 1)} in {name}"
    path = board.page.locator("#chart-requests .plot .line-0").first.get_attribute("d") or ""
    assert "L" not in path, "no line is drawn across a time in which nobody looked"
    assert board.tile("generated") == 1


@pytest.fixture
def modules(context: BrowserContext) -> Page:
    """A blank page that can import the page's modules, each as the file that it is."""

    def fulfil(route: Route) -> None:
        path = files("nano_inference") / "web" / route.request.url.removeprefix("http://modules.test/")
        if path.is_file():
            route.fulfill(body=path.read_text(), content_type="text/javascript")
        else:
            route.fulfill(body="<title>blank</title>", content_type="text/html")

    page = context.new_page()
    page.route("http://modules.test/**", fulfil)
    page.goto("http://modules.test/blank")
    return page


def test_what_is_older_than_ten_minutes_is_forgotten(modules: Page) -> None:
    kept = modules.evaluate(
        """async () => {
          const { History } = await import("/dashboard/window.js");
          const history = new History(600);
          for (let at = 0; at <= 3600; at += 2) history.add({ at, gauges: {}, counters: {}, histograms: {} });
          return history.points.map((point) => point.at);
        }"""
    )
    assert kept == list(range(3000, 3601, 2))


def test_the_marks_of_an_axis_are_few_and_hold_everything(modules: Page) -> None:
    highest = [0, 1e-9, 0.0031, 0.05, 0.3, 0.999, 1, 3, 7, 9.99, 10, 10.01, 64, 1000, 123456, 9.9e9]
    axes = modules.evaluate(
        """async (all) => {
          const { marksTo } = await import("/dashboard/scale.js");
          return all.map((highest) => [marksTo(highest), marksTo(highest, 1)]);
        }""",
        highest,
    )
    for most, (marks, whole) in zip(highest, axes, strict=True):
        for axis in (marks, whole):
            assert axis[0] == 0 and 2 <= len(axis) <= 6, most
            assert axis[-1] >= most * (1 - 1e-8), most
            assert axis[-1] <= max(1.7 * most, axis[1]), "most of the chart would be empty"
            assert axis == [pytest.approx(i * axis[1]) for i in range(len(axis))], most
        assert all(mark == int(mark) for mark in whole), most


def test_a_models_name_is_a_text(context: BrowserContext, server: Running) -> None:
    name = 'a "quoted" \\ one, {x="y"} <b>bold</b>'
    metrics = Metrics(model_name=name, num_blocks=8, block_size=16, cache_config={})
    board = Board(context, server, told(metrics, 3)).hold()
    assert board.page.locator("#model").inner_text() == name
    assert board.tile("running") == 3
    board.watch.assert_clean()


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_nothing_jumps(
    width: int, scheme: str, browser: Browser, server: Running, metrics: Metrics
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(1000 * PATIENCE_S)
    board = Board(context, server, told(metrics)).hold()
    places = """() => [...document.querySelectorAll(".tile, figure, #pause, #windows")].map((node) => {
        const { x, y, width, height } = node.getBoundingClientRect(); return [node.id, x, y, width, height]; })"""
    before = board.page.evaluate(places)
    for count in (3, 800):
        metrics.first_token(count / 300)
        metrics.finished(replace(RECORD, finish_reason="abort", prompt_tokens=4000 * count, cached_tokens=999))
        board.look(told(metrics, count, count * 20, 1.7))
    assert board.page.evaluate(places) == before
    assert board.page.evaluate("document.documentElement.dataset.theme") == scheme
    assert board.page.evaluate("document.documentElement.scrollWidth") == width
    board.page.locator("#chart-gap summary").click()
    board.page.clock.resume()  # axe-core waits by the clock
    assert axe_violations(board.page) == []
    board.answer = 401
    board.page.clock.fast_forward(LOOK * 1000)
    expect(board.page.locator("#key-dialog")).to_be_visible()
    assert axe_violations(board.page) == []
    board.watch.assert_clean([REFUSED])
    context.close()


def test_it_works_below_a_path(context: BrowserContext, tiny_directory: Path) -> None:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, root_path="/some/where")) as one:
        board = Board(context, one, path="/some/where/dashboard")
        board.shows("Live")
        assert {url.removeprefix(one.url) for url in board.asked} == {
            f"/some/where/{name}" for name in ("dashboard", "metrics", "load", "health", "info")
        }
        assert board.page.get_by_role("link", name="Chat").get_attribute("href") == "/some/where/"
        board.watch.assert_clean()


def test_the_theme_can_be_changed(context: BrowserContext, server: Running) -> None:
    board = Board(context, server)
    theme: Callable[[Page], str] = lambda page: page.evaluate("document.documentElement.dataset.theme")  # noqa: E731
    assert theme(board.page) == "light"
    board.page.get_by_role("button", name="Theme").click()
    assert theme(board.page) == "dark"
    board.page.reload()
    assert theme(board.page) == "dark"


def test_the_page_is_small() -> None:
    assert len(load_page("dashboard").packed) <= 20_000
