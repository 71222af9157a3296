"""The page in headless Chromium, on a real server over the fake engine, whose answers the tests choose.

Skipped where the extra `browser` or a Chromium is missing; tests/server/test_page_modules.py needs neither.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.text.formats.probe import PLAIN
from server.fake_engine import MAX_LEN, FakeEngine, make_tokenizer
from server.pdfs import pdf
from server.serving import Served, served

sync = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'paceline[browser]'")
NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
LONG = "# Title\n\nSome `code` here.\n\n```py\nprint(1)\n```\n\n" + "word " * 30


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except sync.Error as error:
            pytest.skip(f"no Chromium: install one, or run `playwright install chromium` ({str(error)[:80]})")
        yield made
        made.close()


@pytest.fixture
def s() -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer(), script="Hello **there**.")) as server:
        yield server


class Page:
    """A tab, with what it complained of and what it asked for."""

    def __init__(self, context: Any, url: str) -> None:
        self.tab, self.url = context.new_page(), url
        self.problems: list[str] = []
        self.tab.set_default_timeout(15000)
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", self._console)
        self.tab.on("request", self._request)
        self.tab.on("dialog", lambda dialog: (self.problems.append("a dialog opened"), dialog.dismiss()))
        self.open()

    def _console(self, message: Any) -> None:
        lost = "Failed to load resource" in message.text or "ERR_" in message.text
        if message.type == "error" and not lost:
            self.problems.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:")):
            self.problems.append(f"asked for {request.url}")

    def open(self, path: str = "") -> None:
        self.tab.goto(self.url + path)
        self.tab.wait_for_selector('#state[data-state="ready"]')
        self.tab.wait_for_selector("body[data-started]")

    def answered(self, count: int) -> None:
        """Wait until there are so many answers and none is being written."""
        sync.expect(self.tab.locator('.answer[aria-busy="false"]')).to_have_count(count)
        sync.expect(self.tab.locator('.answer[aria-busy="true"]')).to_have_count(0)

    def say(self, text: str, count: int) -> None:
        self.tab.fill("#prompt", text)
        self.tab.press("#prompt", "Enter")
        self.answered(count)

    def texts(self, kind: str) -> list[str]:
        return [text.strip() for text in self.tab.locator(kind).all_inner_texts()]

    def see(self, selector: str, text: str) -> None:
        sync.expect(self.tab.locator(selector).last).to_contain_text(text)


@pytest.fixture
def page(browser: Any, s: Served) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    made = Page(context, s.url)
    yield made
    assert made.problems == []
    context.close()


def test_three_turns_and_a_reload(page: Page, s: Served) -> None:
    page.tab.click("#system summary")
    page.tab.fill("#system-text", "Be brief.")
    for count, text in enumerate(("one", "two", "three"), 1):
        page.say(text, count)
    prompt = s.engine.tokenizer.decode(s.engine.last_prompt)
    assert prompt == (
        "system: Be brief.\nuser: one\nassistant: Hello **there**.\nuser: two\nassistant: Hello **there**.\n"
        "user: three\nassistant: "
    )
    page.tab.fill("#prompt", "not sent yet")
    page.tab.reload()
    page.answered(3)
    assert page.texts(".said") == ["one", "two", "three"]
    assert page.texts(".prose") == ["Hello there."] * 3
    assert page.tab.locator(".prose strong").count() == 3
    assert page.tab.input_value("#prompt") == "not sent yet"
    assert page.tab.input_value("#system-text") == "Be brief."
    assert page.texts("#list .open") == ["one"]
    page.see(".turn .facts", "a second")


def test_stop_continue_and_regenerate(page: Page, s: Served) -> None:
    s.engine.script, s.engine.delay = "first\n\n" + "a" * 400, 0.02
    page.tab.fill("#prompt", "go")
    page.tab.press("#prompt", "Enter")
    page.see(".answer .prose p", "aaa")
    page.tab.locator(".prose p").first.evaluate("(one) => { one.mark = true; }")
    page.see(".answer .prose p", "a" * 40)
    assert page.tab.locator(".prose p").first.evaluate("(one) => one.mark")  # a selection would live on
    assert page.tab.is_hidden("#send")
    page.tab.press("#prompt", "Escape")
    page.answered(1)
    page.see(".turn .why", "stopped")
    assert s.settled(lambda: not s.engine.has_work)
    begun = page.texts(".prose p")[-1]
    s.engine.script, s.engine.delay = "b" * 9, 0.0
    page.tab.click('[data-act="continue"]')
    page.answered(1)
    page.see(".answer .prose", begun + "b" * 9)
    assert s.engine.tokenizer.decode(s.engine.last_prompt).startswith(
        f"user: go\nassistant: first\n\n{begun}"
    )
    page.tab.click('[data-act="again"]')
    page.see(".answer .prose", "b" * 9)
    page.answered(1)
    assert page.texts(".prose") == ["b" * 9]
    page.tab.click("#notice .link")  # undo
    page.see(".answer .prose", begun + "b" * 9)


def test_an_answer_goes_on_after_a_reload(page: Page, s: Served) -> None:
    script = "Some *words*.\n\n" + "abcde " * 60
    s.engine.script, s.engine.delay = script, 0.02
    page.tab.check("#as-tokens")
    page.tab.fill("#prompt", "go")
    page.tab.press("#prompt", "Enter")
    page.see(".answer .tokens", "abcde")
    page.tab.reload()
    page.see(".answer .tokens", "abcde")
    assert page.tab.is_visible("#stop")
    page.answered(1)
    assert len(s.engine.salts) == 1  # it was asked once
    assert page.tab.locator(".turn .why").all_inner_texts() == []
    page.tab.uncheck("#as-tokens")
    assert page.texts(".prose") == ["Some words.\n\n" + ("abcde " * 60).strip()]
    page.tab.reload()  # nothing is left to go on with
    page.answered(1)
    assert page.texts(".prose") == ["Some words.\n\n" + ("abcde " * 60).strip()]


def test_an_answer_is_stopped_after_a_reload(page: Page, s: Served) -> None:
    s.engine.script, s.engine.delay = "a" * 400, 0.05
    page.tab.fill("#prompt", "go")
    page.tab.press("#prompt", "Enter")
    page.see(".answer .prose", "aaa")
    page.tab.click("#new")  # its answer goes on, and is looked at again later
    page.tab.reload()
    sync.expect(page.tab.locator("#list .writes")).to_have_count(1)
    page.tab.click("#list .open")
    page.see(".answer .prose", "aaa")
    page.tab.click("#stop")
    page.answered(1)
    page.see(".turn .why", "stopped")
    assert s.settled(lambda: not s.engine.has_work)
    assert page.tab.locator('[data-act="continue"]').count() == 1


def test_what_the_server_has_no_more_is_interrupted(
    page: Page, s: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    s.engine.script, s.engine.delay = "a" * 400, 0.05
    page.tab.fill("#prompt", "go")
    page.tab.press("#prompt", "Enter")
    page.see(".answer .prose", "aaa")
    page.tab.context.route(
        "**/stream",
        lambda route: route.continue_(headers={**route.request.headers, "x-paceline-stream": "0" * 32}),
    )
    page.tab.reload()
    page.answered(1)
    page.see(".turn .why", "interrupted")
    assert page.texts(".prose")[0].startswith("aaa")
    page.tab.context.unroute("**/stream")
    s.engine.script, s.engine.delay = "b" * 9, 0.0
    page.tab.click('[data-act="continue"]')
    page.see(".answer .prose", "a" + "b" * 9)


def test_an_edited_message_is_asked_again(page: Page, s: Served) -> None:
    page.say("one", 1)
    page.say("two", 2)
    s.engine.script = "other"
    page.tab.press("#prompt", "ArrowUp")
    page.tab.locator(".editing textarea").fill("three")
    page.tab.locator(".editing textarea").press("Enter")
    page.see(".answer .prose", "other")
    page.answered(2)
    assert page.texts(".said") == ["one", "three"]
    page.tab.locator('.answer [data-act="edit"]').first.click()
    page.tab.locator(".editing textarea").fill("my *own* words")
    page.tab.locator(".editing textarea").press("Control+Enter")
    assert page.texts(".prose") == ["my own words", "other"]
    page.tab.locator('.answer [data-act="edit"]').first.click()
    page.tab.locator(".editing textarea").press("Escape")
    assert page.texts(".prose") == ["my own words", "other"]
    page.say("four", 3)
    assert "assistant: my *own* words\n" in s.engine.tokenizer.decode(s.engine.last_prompt)


def test_an_answer_is_never_run(page: Page, s: Served) -> None:
    s.engine.script = (
        "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\n\n"
        "[a](javascript:document.title='run') ![p](http://127.0.0.1:9/x.png) [b](https://example.org)\n\n"
        "<iframe src=javascript:alert(1)></iframe>\n\n```js\n<script>alert(1)</script>\n```"
    )
    page.say("<b onclick=alert(1)>x</b>", 1)
    assert page.tab.title() != "run"
    assert page.tab.locator(".turn").locator("script, img, iframe, [onerror], [onclick]").count() == 0
    links = page.tab.locator(".turn a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert links == ["http://127.0.0.1:9/x.png", "https://example.org/"]
    assert "<script>document.title" in page.texts(".prose")[0]
    page.tab.check("#as-tokens")
    assert "<script>document.title" in page.texts(".turn .tokens")[0]
    assert page.tab.locator(".turn").locator("script, img, iframe").count() == 0


def test_code_is_copied_and_conversations_are_exported(browser: Any, s: Served, tmp_path: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = Page(context, s.url)
    s.engine.script = LONG
    page.say("code, please", 1)
    page.tab.click('[data-act="copy-code"]')
    sync.expect(page.tab.locator('[data-act="copy-code"]')).to_have_text("Copied")
    assert page.tab.evaluate("() => navigator.clipboard.readText()") == "print(1)"
    for button, ending in (("#export-json", "json"), ("#export-markdown", "md")):
        with page.tab.expect_download() as found:
            page.tab.click(button)
        assert found.value.suggested_filename == f"code-please.{ending}"
        found.value.save_as(tmp_path / f"talk.{ending}")
    assert (
        (tmp_path / "talk.md")
        .read_text()
        .startswith("# code, please\n\n## User\n\ncode, please\n\n## fake\n\n# Title")
    )
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [one["role"] for one in saved["messages"]] == ["user", "assistant"]
    page.tab.click("#new")
    assert page.tab.locator(".turn").count() == 0
    page.tab.set_input_files("#import", tmp_path / "talk.json")
    page.answered(1)
    assert page.texts("#list .open") == ["code, please"] * 2
    page.tab.set_input_files("#import", tmp_path / "talk.md")
    page.see("#notice", "no saved conversation")
    page.tab.locator("#list .remove").first.click()
    sync.expect(page.tab.locator("#list .open")).to_have_count(1)
    page.tab.click("#notice .link")
    sync.expect(page.tab.locator("#list .open")).to_have_count(2)
    assert page.problems == []
    context.close()


def test_a_server_that_goes_and_comes_back(browser: Any) -> None:
    engine = FakeEngine(make_tokenizer(), script="a" * 400, delay=0.02)
    context = browser.new_context()
    with served(engine, drain_timeout=0.1) as s:
        page = Page(context, s.url)
        page.tab.fill("#prompt", "go")
        page.tab.press("#prompt", "Enter")
        page.see(".answer .prose", "aaa")
        port = s.port
    page.answered(1)
    begun = page.texts(".prose")[0]
    assert begun.startswith("aaa")
    assert page.tab.locator(".turn .error").count() == 1
    page.tab.wait_for_selector('#state[data-state="failed"]')
    page.tab.fill("#prompt", "what now")
    page.tab.press("#prompt", "Enter")
    page.see("#notice", "cannot be reached")
    assert page.tab.input_value("#prompt") == "what now"
    with served(FakeEngine(make_tokenizer(), script="back"), port=port):
        page.tab.wait_for_selector('#state[data-state="ready"]')
        page.tab.press("#prompt", "Enter")
        page.answered(2)
        page.see(".answer .prose", "back")
        assert page.tab.locator(".turn .error").count() == 1
        assert page.texts(".said") == ["go", "what now"]
        page.tab.locator('[data-act="again"]').first.click()
        page.answered(1)
        page.see(".answer .prose", "back")
        assert page.tab.locator(".turn .error").count() == 0
    assert page.problems == []
    context.close()


def test_what_the_server_refuses_is_said_and_can_be_tried_again(page: Page, s: Served) -> None:
    page.say("please explode", 1)
    page.see(".turn .error", "the chat template failed: explode.")
    page.tab.locator('.user [data-act="edit"]').click()
    page.tab.locator(".editing textarea").fill("better")
    page.tab.locator(".editing textarea").press("Enter")
    page.see(".answer .prose", "Hello there.")
    s.engine.fail = [RuntimeError("broken"), RuntimeError("broken")]
    page.say("again", 2)
    page.tab.locator('.error [data-act="again"]').click()
    sync.expect(page.tab.locator(".turn .error")).to_have_count(0)
    page.see(".answer .prose", "Hello there.")


def test_a_conversation_longer_than_the_context(page: Page, s: Served) -> None:
    s.engine.script = "z" * 60
    for count in range(1, 8):
        page.say(f"question {count} " + "q" * 40, count)
    prompt = s.engine.tokenizer.decode(s.engine.last_prompt)
    assert len(s.engine.last_prompt) < MAX_LEN * 3 // 4
    assert "question 1 " not in prompt
    assert "question 7 " in prompt
    page.see(".cut", f"The context of {MAX_LEN} tokens is full")
    assert len(page.texts(".said")) == 7
    page.tab.reload()
    page.answered(7)
    assert page.tab.locator(".cut").count() == 1
    page.say("x" * 2 * MAX_LEN, 8)
    page.see(".turn .error", "shorten the prompt")


def test_the_settings_are_the_models_until_they_are_set(page: Page, s: Served) -> None:
    assert s.service.loaded is not None
    switches = replace(PLAIN, switches=True)
    room = s.service.loaded
    chats = replace(room.chats, format=switches)
    s.service.loaded = replace(room, sampling={"temperature": 0.6, "top_k": 64}, chats=chats)
    page.open()
    page.say("one", 1)
    assert (s.engine.last_params.temperature, s.engine.last_params.top_k) == (0.6, 64)
    page.tab.click("#open-settings")
    asked = "(all) => all.map((one) => one.placeholder)"
    assert page.tab.locator("[name=temperature], [name=top_p], [name=top_k]").evaluate_all(asked) == [
        "0.6",
        "1",
        "64",
    ]
    for name, value in (
        ("temperature", "0.25"),
        ("top_p", "0.5"),
        ("max_tokens", "3"),
        ("seed", "7"),
        ("stop", "x\\ny"),
    ):
        page.tab.fill(f"[name={name}]", value)
    page.tab.select_option("[name=drafter]", "ngram")
    page.tab.select_option("[name=draft_tokens]", "2")
    page.tab.keyboard.press("Escape")
    page.open()
    page.say("two", 2)
    p = s.engine.last_params
    assert (p.temperature, p.top_p, p.top_k, p.max_tokens, p.seed) == (0.25, 0.5, 64, 3, 7)
    assert (p.stop, p.drafter, p.draft_tokens) == (("x\ny",), "ngram", 2)
    page.see(".turn .why", "length limit reached")
    page.tab.click("#open-settings")
    page.tab.click("#settings [type=reset]")
    page.tab.keyboard.press("Escape")
    page.say("three", 3)
    assert (s.engine.last_params.temperature, s.engine.last_params.drafter) == (0.6, None)


def test_tokens_in_colour_and_what_was_proposed(page: Page, s: Served) -> None:
    s.engine.script = LONG
    page.say("colours", 1)
    page.tab.check("#as-tokens")
    assert page.tab.locator(".turn .t").count() == len(s.engine.tokenizer.encode(LONG, add_bos=False)) + 1
    for kind in ("kept", "own", "overruled"):
        assert page.tab.locator(f".turn .t.{kind}").count() > 0
    page.tab.locator(".turn .t.overruled").first.hover()
    page.see("#tip", "The target overruled the draft")
    page.tab.mouse.move(2, 2)
    page.tab.focus(".turn .tokens")
    page.tab.keyboard.press("ArrowRight")
    page.see("#tip", "Step 1 wrote")
    page.tab.reload()
    page.answered(1)
    assert page.tab.locator(".turn .t.kept").count() > 0
    page.tab.uncheck("#as-tokens")
    page.see(".prose h3", "Title")
    page.tab.click(".turn .facts summary")
    page.see(".turn .charts", "Acceptance by position")
    page.see(".turn .charts", "Drafted by ngram")


def test_a_race_from_a_conversation(page: Page, s: Served) -> None:
    s.engine.script = LONG
    page.say("first", 1)
    page.say("run", 2)
    page.tab.locator('[data-act="race"]').last.click()
    page.see("#proof", "Equal, token by token")
    assert page.tab.get_attribute("#proof", "data-equal") == "true"
    page.see("#proof", "by the engine's clock")
    assert "user: first\nassistant: # Title" in s.engine.tokenizer.decode(s.engine.last_prompt)
    assert page.texts("#plain-tokens") == page.texts("#fast-tokens")
    page.tab.fill("#lab-prompt", "something else")
    page.tab.press("#lab-prompt", "Control+Enter")
    page.tab.wait_for_selector("body:not([data-running])")
    page.see("#proof", "Equal, token by token")
    assert s.engine.tokenizer.decode(s.engine.last_prompt) == "user: something else\nassistant: "


def test_a_base_model_goes_on_with_a_text(page: Page, s: Served) -> None:
    assert s.service.loaded is not None
    s.service.loaded = replace(s.service.loaded, chat=False)
    page.open("/?")
    sync.expect(page.tab.locator("#write")).to_be_visible()
    assert page.tab.is_hidden("#tab-chat")
    assert page.tab.input_value("#lab-prompt") == ""
    page.tab.fill("#lab-prompt", "def f")
    page.tab.press("#lab-prompt", "Control+Enter")
    page.see("#tokens", "def fHello **there**.")
    sync.expect(page.tab.locator("#after")).to_be_visible()
    assert s.engine.tokenizer.decode(s.engine.last_prompt) == "def f"
    assert s.engine.last_params.max_tokens == 256
    page.tab.reload()
    page.see("#tokens", "def fHello **there**.")
    page.tab.click("#go-on")
    page.see("#tokens", "def fHello **there**.Hello **there**.<eos>")
    assert s.engine.tokenizer.decode(s.engine.last_prompt) == "def fHello **there**."


def test_two_tabs_lose_nothing(browser: Any, s: Served) -> None:
    context = browser.new_context()
    one, two = Page(context, s.url), Page(context, s.url)
    one.say("shared", 1)
    two.tab.locator("#list .open").first.click()
    two.answered(1)
    one.say("seen by both", 2)
    two.answered(2)  # told by the other tab
    s.engine.script, s.engine.delay = "c" * 60, 0.02
    for tab, text in ((one, "of one"), (two, "of two")):
        tab.tab.fill("#prompt", text)
        tab.tab.press("#prompt", "Enter")
    for tab in (one, two):
        tab.answered(3)
    sync.expect(one.tab.locator("#list .open")).to_have_count(2)
    last = set()
    for at in range(2):
        entry = one.tab.locator("#list .open").nth(at)
        entry.click()
        sync.expect(entry).to_have_attribute("aria-current", "true")  # it is drawn by then
        one.answered(3)
        last.add(one.texts(".said")[-1])
    assert last == {"of one", "of two"}
    assert one.problems == two.problems == []
    context.close()


BROKEN: dict[str, Callable[[Page], None]] = {
    "refused": lambda p: p.tab.add_init_script(
        "Object.defineProperty(window, 'indexedDB', { get() { throw new Error('no store'); } });"
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no storage'); } });"
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new Error('no storage'); } });"
    ),
    "rubbish": lambda p: p.tab.evaluate("""() => new Promise((done) => {
        localStorage.setItem("paceline settings", "{");
        localStorage.setItem("paceline text", '{"steps":[1]}');
        const asked = indexedDB.open("paceline", 1);
        asked.onsuccess = () => {
          const change = asked.result.transaction(["heads", "conversations"], "readwrite");
          change.objectStore("heads").put({ id: "bad", title: "Broken", updated: "x" });
          change.objectStore("heads").put({ id: "worse", title: 5 });
          change.objectStore("conversations").put({ id: "bad", turns: 7 });
          change.oncomplete = () => { asked.result.close(); done(); };
        };
    })"""),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_store_is_survived(page: Page, kind: str) -> None:
    BROKEN[kind](page)
    page.tab.reload()
    page.tab.wait_for_selector("body[data-started]")
    if kind == "refused":
        page.see("#unkept", "not kept here after this page is closed: no store")
    else:
        page.tab.get_by_role("button", name="Broken", exact=True).click()
        page.see("#notice", "cannot be read any more")
        sync.expect(page.tab.locator("#list .open")).to_have_count(0)
    page.say("still here", 1)
    assert page.texts(".prose") == ["Hello there."]
    assert page.texts("#list .open") == ["still here"]


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_narrow_pages_do_not_scroll_sideways(page: Page, s: Served, width: int) -> None:
    s.engine.script = (
        "x" * 90
        + "\n\n```\n"
        + "y" * 90
        + "\n```\n\n|a|b|c|\n|-|-|-|\n|"
        + "|".join(["long words"] * 3)
        + "|\n\n```python\n"
        + "z = 1 + " * 40
        + "\n```\n\n$$"
        + "a + b + " * 40
        + "c$$"
    )
    page.tab.set_viewport_size({"width": width, "height": 700})
    page.open()

    def fits() -> None:
        wide = "() => [document.documentElement, document.getElementById('lab'), document.getElementById('thread')]"
        assert page.tab.evaluate(f"({wide})().every((one) => one.scrollWidth <= innerWidth)")

    fits()
    page.say("z" * 90, 1)
    fits()
    page.tab.check("#as-tokens")
    fits()
    if width < 860:  # it lies over the talk there
        page.tab.click("#open-side")
        fits()
        page.tab.keyboard.press("Escape")
    page.tab.click("#open-settings")
    fits()
    page.tab.keyboard.press("Escape")
    page.tab.click('[data-act="race"]')
    page.see("#proof", "Equal, token by token")
    fits()
    page.tab.click("#tab-write")
    fits()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_by_keyboard_alone_in_both_themes(browser: Any, s: Served, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = Page(context, s.url)
    keys = page.tab.keyboard
    keys.type("hello")
    keys.press("Enter")  # the message has the focus from the beginning
    page.answered(1)

    def focused() -> dict[str, str]:
        return page.tab.evaluate(
            "() => ({ id: document.activeElement.id, act: document.activeElement.dataset.act ?? '',"
            " outline: getComputedStyle(document.activeElement).outlineStyle })"
        )

    seen = []
    for _ in range(40):
        keys.press("Shift+Tab")
        here = focused()
        assert here["outline"] != "none", here
        seen.append(here["id"] or here["act"])
        if here["id"] == "open-side":
            break
    for stop in ("copy", "again", "edit", "race", "export-json", "new", "theme", "open-settings", "tab-chat"):
        assert stop in seen, seen
    ground = page.tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.tab.focus("#theme")
    keys.press("Enter")
    other = page.tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (ground, other) in {
        ("rgb(246, 245, 241)", "rgb(20, 23, 26)"),
        ("rgb(20, 23, 26)", "rgb(246, 245, 241)"),
    }
    page.tab.focus("#tab-chat")
    keys.press("ArrowRight")
    assert focused()["id"] == "tab-write"
    sync.expect(page.tab.locator("#write")).to_be_visible()
    keys.press("ArrowLeft")
    page.tab.focus("#open-settings")
    keys.press("Enter")
    assert page.tab.locator("#settings").evaluate("(one) => one.open")
    keys.press("Escape")
    assert focused()["id"] == "open-settings"
    assert page.problems == []
    context.close()


def test_every_control_has_a_name(page: Page) -> None:
    page.say("names", 1)
    nameless = page.tab.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea, a")]
      .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim()
        || one.closest("label")?.textContent.trim() || document.querySelector(`label[for="${one.id}"]`)))
      .map((one) => one.outerHTML)""")
    assert nameless == []


CODE = '```python\ndef f(x):\n    return "a", 12  # why\n\nclass A: pass\n```'
CONTRAST = """() => {
  const parsed = (colour) => { // red, green, blue, alpha from 0 to 1
    const [r, g, b, alpha = 1] = colour.match(/[\\d.]+(?:e-?\\d+)?/g).map(Number);
    return colour.startsWith("color(") ? [r, g, b, alpha] : [r / 255, g / 255, b / 255, alpha];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const own = (one) => parsed(getComputedStyle(one).backgroundColor);
  const ground = (one) => (one ? over(own(one), ground(one.parentElement)) : [1, 1, 1]);
  const light = (rgb) => rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const texts = (one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll("button, a, p, li, span, summary, label, kbd, h2, code")]
    .filter((one) => one.checkVisibility({ opacityProperty: true }) && texts(one))
    .map((one) => {
      const below = ground(one), ink = light(over(parsed(getComputedStyle(one).color), below)), paper = light(below);
      return [(Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05), one.outerHTML.slice(0, 90)];
    })
    .filter(([contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_has_colours_that_can_be_read(browser: Any, s: Served, scheme: str) -> None:
    s.engine.script = CODE
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    page = Page(context, s.url)
    page.say("code", 1)
    kinds = ("keyword", "string", "number", "comment", "title")
    colours = {
        page.tab.locator(f".hl-{kind}").first.evaluate("(one) => getComputedStyle(one).color")
        for kind in kinds
    }
    assert len(colours) == len(kinds)
    assert page.texts(".prose pre code") == [CODE.removeprefix("```python\n").removesuffix("\n```")]
    assert page.tab.evaluate(CONTRAST) == []
    assert page.problems == []
    context.close()


def test_formulas_are_drawn_by_the_browser(page: Page, s: Served) -> None:
    s.engine.script = "A circle has $\\pi r^2$.\n\n$$\\frac{a}{b}$$\n\nIt costs $5 and $6. $\\broken{$"
    page.say("formulas", 1)
    sync.expect(page.tab.locator("math")).to_have_count(2)
    sync.expect(page.tab.locator("mfrac")).to_be_visible()
    page.see(".prose", "It costs $5 and $6. $\\broken{$")
    assert page.problems == []


def test_conversations_are_searched(page: Page) -> None:
    page.say("about Ducks", 1)
    page.tab.click("#new")
    page.say("about geese", 1)
    sync.expect(page.tab.locator("#list .open")).to_have_count(2)
    page.tab.fill("#search", "ducks THERE")  # words of both sides, in any order and case
    sync.expect(page.tab.locator("#list .open")).to_have_text(["about Ducks"])
    page.tab.click("#list .open")
    page.see(".said", "about Ducks")
    page.tab.fill("#search", "swans")
    sync.expect(page.tab.locator("#list .open")).to_have_count(0)
    sync.expect(page.tab.locator("#none-found")).to_be_visible()
    page.tab.fill("#search", "")
    sync.expect(page.tab.locator("#list .open")).to_have_count(2)
    sync.expect(page.tab.locator("#none-found")).to_be_hidden()


def test_a_text_file_goes_with_the_message(page: Page, s: Served) -> None:
    notes = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"ducks swim"}
    page.tab.set_input_files("#attached", [notes, {**notes, "name": "more.md"}])
    page.see("#tray .chip", "more.md, 10 letters")
    page.tab.click('#tray [aria-label="Take back more.md"]')
    sync.expect(page.tab.locator("#tray .chip")).to_have_count(1)
    page.tab.set_input_files("#attached", {**notes, "name": "x.txt", "buffer": b"\0"})
    page.see("#notice", "x.txt is no text.")
    page.say("what do they do?", 1)
    asked = s.engine.tokenizer.decode(s.engine.last_prompt)
    assert "notes.txt:\n```\nducks swim\n```\n\nwhat do they do?" in asked
    sync.expect(page.tab.locator("#tray")).to_be_hidden()


def test_a_pdf_goes_with_the_message(page: Page, s: Served) -> None:
    file = {"name": "pond.pdf", "mimeType": "application/pdf", "buffer": pdf("ducks swim", "geese fly")}
    page.tab.set_input_files("#attached", file)
    page.see("#tray .chip", "pond.pdf (2 pages), 21 letters")
    page.tab.set_input_files("#attached", {**file, "name": "x.pdf", "buffer": file["buffer"][:60]})
    page.see("#notice", "x.pdf cannot be read as a PDF: it is damaged, or is something else.")
    page.say("what do they do?", 1)
    asked = s.engine.tokenizer.decode(s.engine.last_prompt)
    assert "pond.pdf (2 pages):\n```\nducks swim\n\ngeese fly\n```\n\nwhat do they do?" in asked


def test_an_example_asks_at_once(page: Page) -> None:
    text = page.texts("#starters .starter")[0]
    page.tab.locator("#starters .starter").first.click()
    page.answered(1)
    assert page.texts(".said") == [text]


def test_a_talk_of_two_hundred_turns(page: Page, tmp_path: Path) -> None:
    pair = [{"role": "user", "content": "code"}, {"role": "assistant", "content": CODE}]
    turns = pair * 100
    file = tmp_path / "talk.json"
    file.write_text(
        json.dumps({"kind": "paceline conversation", "system": None, "settings": {}, "messages": turns})
    )
    page.tab.set_input_files("#import", str(file))
    page.answered(100)
    assert page.tab.locator(".hl-keyword").count() >= 100
    thread = page.tab.locator("#thread")
    assert thread.evaluate("(one) => one.scrollHeight - one.scrollTop - one.clientHeight < 60")  # at its end
    page.tab.reload()
    page.answered(100)
    assert page.problems == []


def test_what_could_have_stood_in_the_place_of_a_token(page: Page) -> None:
    page.tab.check("#as-tokens")
    page.say("alternatives", 1)
    page.tab.locator(".turn .t").nth(2).hover()
    page.see("#tip", "What could have stood here")
    sync.expect(page.tab.locator("#tip .others tr")).to_have_count(5)
    sync.expect(page.tab.locator("#tip .others .written")).to_have_count(1)
    page.tab.reload()
    page.answered(1)
    page.tab.locator(".turn .t").nth(2).hover()
    sync.expect(page.tab.locator("#tip .others tr")).to_have_count(5)
    assert page.problems == []


def test_the_actions_of_an_answer_stand_in_one_row(page: Page, s: Served) -> None:
    s.engine.script = "word " * 200
    page.tab.set_viewport_size({"width": 1280, "height": 800})
    page.say("many", 1)
    tops = page.tab.locator(".answer .act").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect().top)"
    )
    assert len(tops) >= 4
    assert max(tops) - min(tops) < 2


def test_a_browser_without_modules_is_told(browser: Any, s: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(s.url)
    sync.expect(tab.locator(".old")).to_be_visible(timeout=15000)
    context.close()


SHOWN = (
    "Here it is:\n\n```python\ndef mean(values: list[float]) -> float:\n    # of any numbers\n"
    "    return sum(values) / len(values)\n\nprint(mean([1, 2.5]))\n```\n\nIt computes "
    "$\\bar x = \\frac{1}{n}\\sum_i x_i$:\n\n$$\\bar x = \\frac{x_1 + \\dots + x_n}{n}$$\n"
)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (768, "light"), (390, "dark")])
def test_pictures_of_the_page_as_the_docs_show_it(
    browser: Any, s: Served, width: int, scheme: str, tmp_path: Path
) -> None:
    """`PACELINE_PICTURES=docs/images` writes those of the manual."""
    s.engine.script = SHOWN
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = Page(context, s.url)
    page.say("The mean of a list, please", 1)
    sync.expect(page.tab.locator("math")).to_have_count(2)
    path = Path(os.environ.get("PACELINE_PICTURES", tmp_path)) / f"page-{width}-{scheme}.png"
    page.tab.screenshot(path=str(path))
    assert page.tab.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert path.stat().st_size > 10000
    assert page.tab.evaluate(CONTRAST) == []
    assert page.problems == []
    context.close()


def test_one_of_several_models_is_chosen_and_stays(browser: Any, s: Served) -> None:
    context = browser.new_context()
    card = s.client.get("/v1/models/fake").json()
    cards = [
        card,
        {key: card[key] for key in ("id", "object", "created", "owned_by")} | {"id": "not-loaded-yet"},
    ]
    context.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
    asked: list[Any] = []
    context.on("request", lambda one: asked.append(one.post_data_json) if "completions" in one.url else None)
    page = Page(context, s.url)
    page.say("one", 1)
    page.tab.select_option("#model", "not-loaded-yet")
    sync.expect(page.tab.locator("#prompt")).to_have_attribute("placeholder", "Message not-loaded-yet")
    page.say("two", 2)
    page.tab.reload()
    sync.expect(page.tab.locator("#prompt")).to_have_attribute("placeholder", "Message not-loaded-yet")
    assert [one["model"] for one in asked] == ["fake", "not-loaded-yet"]
    assert [turn["content"] for turn in asked[1]["messages"]] == ["one", "Hello **there**.", "two"]
    context.close()


def test_one_model_is_no_choice(page: Page) -> None:
    sync.expect(page.tab.locator("#model")).to_be_hidden()
    page.see("#state-text", "fake")
