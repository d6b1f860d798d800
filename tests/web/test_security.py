"""Nothing that comes from a model, a server or a file runs on the page (checklist 28; serving.md T32)."""

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
    *(
        "P",
        "BR",
        "STRONG",
        "EM",
        "DEL",
        "CODE",
        "PRE",
        "SPAN",
        "H2",
        "H3",
        "H4",
        "H5",
        "H6",
        "UL",
        "OL",
        "LI",
        "BLOCKQUOTE",
    ),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "HR", "A", "DIV", "BUTTON"),
}


def trap(context: BrowserContext) -> None:
    """Have every page of a context remember what was run."""
    context.add_init_script("window.runs = 0; window.pwned = () => { window.runs += 1; };")


def assert_untouched(page: Page) -> None:
    """Nothing ran, and nothing is there that could: no element but the known, no attribute that is a handler."""
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


def test_28_forty_answers_run_nothing(context: BrowserContext, fake: FakeServer) -> None:
    assert len(PAYLOADS) == 40
    trap(context)
    chat = ChatDriver(context, fake.url)
    chat.page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    for payload in PAYLOADS:
        chat.type(payload)
        answer = fake.answer()
        for at in range(0, len(payload), 9):  # halves of elements are shown, too
            answer.say(payload[at : at + 9])
        answer.end()
        chat.wait_until_idle()
    assert_untouched(chat.page)
    for link in chat.page.locator(".body a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
    for view in chat.page.get_by_role("button", name="Tokens", exact=True).all():
        view.click()
    chat.page.locator(".tokens .token").first.click()
    assert chat.page.evaluate("window.runs") == 0
    chat.page.reload()
    chat.wait_until_ready()
    assert_untouched(chat.page)
    assert chat.page.url == f"{fake.url}/"
    chat.watch.assert_clean()


def test_28_names_errors_tools_and_files_run_nothing(context: BrowserContext, fake: FakeServer, tmp_path: Path) -> None:
    trap(context)
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


# What each does when nothing holds it: it counts, or it asks for something elsewhere.
HOLES = {
    "an inline script": "add('script', {}, 'pwned()')",
    "a script from elsewhere": "add('script', {src: 'data:,pwned()'})",
    "an inline handler": "add('b', {onclick: 'pwned()'}).click()",
    "eval": "window.eval('pwned()')",
    "HTML": "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=pwned()>'); await later()",
    "HTML without a handler": "document.body.innerHTML = '<b>x</b>'; pwned()",
    "another wall's policy": "trustedTypes.createPolicy('other', {}); pwned()",
    "a javascript: address": "add('a', {href: 'javascript:pwned()'}).click(); await later()",
    "a request elsewhere": "await fetch('https://attacker.example/').catch(() => 0)",
    "a picture from elsewhere": "add('img', {src: 'https://attacker.example/x.png'}); await later()",
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


@pytest.mark.parametrize("hole", HOLES)
def test_28_the_policy_holds_when_every_other_wall_has_fallen(
    context: BrowserContext, hole: str, server_url: str
) -> None:
    """As if DOMPurify had let it through: the code is put into the real server's page by the test."""
    trap(context)
    chat = ChatDriver(context, server_url)
    # In a task of its own: what the test's own tool runs directly may evaluate texts.
    tried = f"{HELPERS} try {{ {HOLES[hole]} }} catch {{}} done();"
    chat.page.evaluate(f"() => new Promise((done) => setTimeout(async () => {{ {tried} }}))")
    assert chat.page.evaluate("window.runs") == 0
    assert all("attacker" not in url or "csp" in why for url, why in chat.failed), chat.failed
    assert chat.page.url == f"{server_url}/"


def test_28_the_policy_names_the_file_that_is_loaded_later(server_url: str, context: BrowserContext) -> None:
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


def test_28_headers_of_both_pages(server_url: str, context: BrowserContext) -> None:
    page = context.new_page()
    for path in ("/", "/dashboard"):
        response = page.goto(server_url + path)
        assert response is not None
        policy = response.headers["content-security-policy"]
        parts = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
        assert parts["default-src"] == parts["base-uri"] == parts["form-action"] == parts["frame-ancestors"] == "'none'"
        assert parts["connect-src"] == "'self'" and parts["img-src"] == "data:"
        assert parts["script-src"].startswith("'sha256-") and "unsafe" not in policy
        assert "'self'" not in parts["script-src"], "what else is served here is no script of the page"
        assert parts["style-src"].startswith("'self' 'sha256-")
        assert parts["require-trusted-types-for"] == "'script'" and parts["trusted-types"] == "dompurify"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
