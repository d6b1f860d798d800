"""The page of the API is made from the OpenAPI document, and sends requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from nano_inference.server.config import ServerConfig
from tests.server.tiny import Running, running
from tests.web.watch import Watch, axe_violations

KEY = "a-key-of-some-length"
CHAT = "/v1/chat/completions"


@pytest.fixture
def page(context: BrowserContext, server: Running) -> Iterator[Page]:
    """The page, whose requests go to this server only, and which logs no error."""
    page = context.new_page()
    watch = Watch(page, server.url)
    page.goto(f"{server.url}/docs")
    yield page
    watch.assert_clean()


def route(page: Page, path: str, method: str = "POST") -> Locator:
    exact = page.locator(".path", has_text=path).and_(page.get_by_text(path, exact=True))
    return page.locator(".route").filter(has=exact).filter(has=page.get_by_text(method, exact=True))


def test_every_route_of_the_document_is_shown(page: Page, server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    count = sum(map(len, paths.values()))
    expect(page.locator(".route")).to_have_count(count)
    expect(page.locator("#state")).to_have_text(f"{count} routes")
    assert set(page.locator(".path").all_inner_texts()) == set(paths)
    expect(page.locator(".route").first.locator(".path")).to_have_text(CHAT)


def test_a_route_shows_the_fields_of_its_body_and_of_their_parts(page: Page, server: Running) -> None:
    one = route(page, CHAT)
    one.locator("summary").click()
    body = server.client.get("/openapi.json").json()["components"]["schemas"]["ChatBody"]
    table = one.get_by_role("table", name="Fields of the body")
    assert set(table.locator("td:first-child").all_inner_texts()) == set(body["properties"])
    expect(table.get_by_role("row", name="messages list of Message required")).to_have_count(1)
    expect(table.get_by_role("row", name="temperature number (0 to 2)")).to_have_count(1)
    options = one.get_by_role("table", name="StreamOptions")
    expect(options.get_by_role("row", name="include_usage boolean")).to_have_count(1)


def test_a_request_is_sent_and_its_reply_or_error_shown(page: Page) -> None:
    one = route(page, CHAT)
    one.locator("summary").click()
    one.get_by_role("button", name="Send").click()
    expect(one.get_by_role("status")).to_have_text("Status 200")
    expect(one.get_by_label("Response")).to_contain_text('"object": "chat.completion"')
    one.get_by_label("Body of the request").fill("{oops")
    one.get_by_role("button", name="Send").click()
    expect(one.get_by_role("status")).to_have_text("The body is not JSON")
    get = route(page, "/v1/models", "GET")
    get.locator("summary").click()
    get.get_by_role("button", name="Send").click()
    expect(get.get_by_label("Response")).to_contain_text('"id": "tiny"')


def test_routes_are_shown_while_the_model_is_loaded(context: BrowserContext, server: Running) -> None:
    page = context.new_page()
    loading = {"error": {"message": "loading", "type": "service_unavailable", "param": None, "code": "loading"}}
    page.route("**/v1/models", lambda one: one.fulfill(status=503, json=loading))
    page.goto(f"{server.url}/docs")
    expect(page.locator("#state")).to_contain_text("routes")
    route(page, CHAT).locator("summary").click()
    expect(route(page, CHAT).get_by_label("Body of the request")).to_have_value(re.compile('"messages"'))
    page.unroute("**/v1/models")
    with page.expect_response("**/v1/models"):  # it is asked again until the model is there
        pass
    route(page, "/v1/completions").locator("summary").click()
    expect(route(page, "/v1/completions").get_by_label("Body of the request")).to_have_value(re.compile('"tiny"'))


def test_a_server_with_keys_asks_for_one(context: BrowserContext, tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, api_key=(KEY,))
    with running(tiny_directory, config) as server:
        page = context.new_page()
        page.goto(f"{server.url}/docs")
        expect(page.locator("#state")).to_have_text("The server needs an API key.")
        page.get_by_role("button", name="Enter the key").click()
        page.locator("#key").fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#state")).to_contain_text("routes")


def test_page_is_accessible_in_both_themes_and_fits_a_phone(page: Page) -> None:
    route(page, CHAT).locator("summary").click()
    for _ in range(2):
        assert axe_violations(page) == []
        page.get_by_role("button", name="Theme").click()
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
