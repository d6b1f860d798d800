"""Formulas in answers: recognition, rendering, and protection from hostile TeX."""

from __future__ import annotations

from playwright.sync_api import BrowserContext, expect
from starlette.responses import Response

from tests.web.chat_driver import ChatDriver, answered, shown_text, started
from tests.web.fake import FakeServer
from tests.web.payloads import PAYLOADS
from tests.web.test_security import ALLOWED, assert_harmless, count_runs

MATHML = {"math", "mrow", "mi", "mn", "mo", "mtext", "msup", "msub", "mfrac", "msqrt", "mspace", "mtable", "mtr", "mtd"}


DELIMITED = (r"\[a^2\]", r"\(a^2\)", "$$a^2$$", "$a^2$", "\\[\na^2\n\\]", "$$\na^2\n$$")
NO_FORMULAS = (
    "It costs $5 and $10.",
    "from $20 (it was $30) to $5-$10",
    "between $5 < x and more than $3, US$5=A$7$",
    "`$a^2$` and `\\(a^2\\)`",
    "```\n$$a^2$$\n\\[a^2\\]\n```",
    "set $HOME/$USER_NAME and $PATH$",
    r"\$a^2\$",
)


def test_latex_is_rendered_with_every_delimiter(chat: ChatDriver, fake: FakeServer) -> None:
    for text in DELIMITED:
        answered(chat, fake, "Hello", f"Before\n\n{text}\n\nAfter")
        formula = chat.last().locator(".body math")
        expect(formula.locator("msup mi")).to_have_text("a")
        expect(formula.locator("msup mn")).to_have_text("2")
        body = shown_text(chat.last().locator(".body"))
        assert "$" not in body and "\\" not in body and "[" not in body, text
        is_display = formula.get_attribute("display") == "block"
        assert is_display == (text[:2] in ("$$", r"\[")), text
    chat.watch.assert_clean()


def test_environment_without_delimiters_is_rendered(chat: ChatDriver, fake: FakeServer) -> None:
    for name in ("align", "align*", "bmatrix"):
        answered(chat, fake, "Hello", f"Before\n\\begin{{{name}}}\na &= b \\\\\n", f"c &= d\n\\end{{{name}}}\n\nAfter")
        expect(chat.last().locator(".body math")).to_have_count(1)
        expect(chat.last().locator(".body")).to_contain_text("After")
    answered(chat, fake, "Hello", "\\begin{equation}\na^2\n\\end{equation}")
    expect(chat.last().locator(".body math msup")).to_have_count(1)
    answered(chat, fake, "Hello", "\\begin{document}\n*a*\n\\end{document}")
    expect(chat.last().locator(".body")).to_have_text("\\begin{document}\n*a*\n\\end{document}")


def test_money_variables_and_code_are_not_formulas(chat: ChatDriver, fake: FakeServer) -> None:
    for text in NO_FORMULAS:
        answered(chat, fake, "Hello", text)
        expect(chat.last().locator(".markdown")).to_be_visible()
        assert chat.last().locator("math, .math").count() == 0, text
        assert fake.late_requests == [], f"the renderer is loaded only for a formula: {text}"


def test_incomplete_formula_is_shown_as_text(chat: ChatDriver, fake: FakeServer) -> None:
    answer = started(chat, fake, "Hello", "So\n\n", "\\[\n\\frac{a_1*b}{2*c}")
    body = chat.last().locator(".body")
    expect(body.locator(".math-open")).to_have_text("\\[\n\\frac{a_1*b}{2*c}")
    answer.say("\n\\]\n\nand \\(x")
    expect(body.locator("mfrac")).to_have_count(1)
    expect(body).to_contain_text("and \\(x")
    answer.say("^2\\) too")
    expect(body.locator("msup")).to_have_count(1)
    answer.end()
    chat.wait_until_idle()
    expect(body.locator("math")).to_have_count(2)
    assert fake.late_requests == ["/formulas.js"], "the renderer is loaded once"
    chat.watch.assert_clean()


def test_modified_renderer_is_not_run(context: BrowserContext, fake: FakeServer) -> None:
    count_runs(context)
    fake.late_response = Response("pwned()", media_type="text/javascript")
    chat = ChatDriver(context, fake.url)
    with chat.page.expect_response("**/formulas.js"):
        answered(chat, fake, "Hello", r"\[a^2\]")
    expect(chat.last().locator(".body")).to_have_text(r"\[a^2\]")
    chat.until("document.querySelectorAll('head script[integrity]').length === 1")
    chat.page.wait_for_timeout(200)
    assert fake.late_requests == ["/formulas.js"]
    assert chat.page.evaluate("window.runs") == 0
    expect(chat.last().locator(".body")).to_have_text(r"\[a^2\]")


HOSTILE = [
    r"\href{javascript:pwned()}{x}",
    r"\url{javascript:pwned()}",
    r"\includegraphics{https://attacker.example/x.png}",
    r"\style{background: url(https://attacker.example/x)}{x}",
    r"\class{toast}{x} \id{draft}{x} \data{x=1}{x}",
    r"\def\a{\a\a}\a",
    r"\def\a{" + "x" * 1500 + "}" + r"\a" * 200,
    r"\let\a=\b \newcommand{\c}{\c}\c",
    "{" * 900 + "}" * 900,
    r"\sqrt{" * 300 + "}" * 300,
    r"\left(" * 300,
    "x" * 100_000,
    r"\text{<img src=x onerror=pwned()>}",
    r'\text{" style="background:url(https://attacker.example/x)" x="}',
    r"\begin{matrix}" * 100,
]


def test_hostile_formulas_are_harmless_and_bounded(context: BrowserContext, fake: FakeServer) -> None:
    count_runs(context)
    chat = ChatDriver(context, fake.url)
    answered(chat, fake, "Hello", r"\(x\)")
    expect(chat.last().locator("math")).to_have_count(1)
    for tex in [*HOSTILE, *PAYLOADS]:
        chat.type("More")
        fake.answer().complete(f"\\[{tex}\\]")
        chat.wait_until_idle()
    assert chat.page.evaluate("window.runs") == 0
    found = chat.page.evaluate("[...document.querySelectorAll('.body *')].map((one) => one.tagName)")
    allowed = ALLOWED | MATHML | {name.lower() for name in ALLOWED}
    assert {name for name in found if name not in allowed} == set()
    for one in chat.page.locator(".body [href]").all():
        assert (one.get_attribute("href") or "").startswith(("https://", "http://", "mailto:"))
    assert chat.page.locator(".body [style*=url]").count() == 0
    chat.page.evaluate("document.querySelectorAll('.body [style]').forEach((one) => one.removeAttribute('style'))")
    assert_harmless_without_formulas(chat)
    chat.watch.assert_clean()


def assert_harmless_without_formulas(chat: ChatDriver) -> None:
    chat.page.evaluate("document.querySelectorAll('.body math').forEach((one) => one.remove())")
    assert_harmless(chat.page)


def test_macro_bomb_is_not_expanded(chat: ChatDriver, fake: FakeServer) -> None:
    """With macro definitions and without limits this formula has half a million elements."""
    answered(chat, fake, "Hello", r"\(x\)")
    expect(chat.last().locator("math")).to_have_count(1)
    chat.type("More")
    fake.answer().complete(
        "\\[\\def\\a{" + "x" * 950 + "}" + "\\a" * 495 + "\\]\n\n",
        *(["\\[" + "\\overline{" * 180 + "}" * 180 + "\\]\n\n"] * 5),
    )
    chat.wait_until_idle()
    expect(chat.last().locator(".body")).to_contain_text("\\def")
    assert chat.page.evaluate("document.querySelectorAll('.body *').length") < 5000
