"""Pictures in the page, in headless Chromium, on a real server over a tiny model that sees."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from media_models import build_seeing, file_of, picture
from paceline.config import EngineConfig
from paceline.server.loading import load
from server.serving import Served, served

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'paceline[browser]'")
from server.test_page import Page, browser, sync  # noqa: F401  the fixture, too

ONE, TWO = file_of(picture(100, 70)), file_of(picture(60, 90, seed=1))
GIVE = """([data, how]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], `${how}.png`, { type: "image/png" }));
  const [place, event] = how === "pasted"
    ? ["prompt", new ClipboardEvent("paste", { clipboardData: given, bubbles: true })]
    : ["chat", new DragEvent("drop", { dataTransfer: given, bubbles: true, cancelable: true })];
  document.getElementById(place).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seeing")
    build_seeing("e2b", folder)
    config = EngineConfig(target=str(folder), activations="float32", threads=1, max_model_len=1024, cache_memory=2**26,
                          profile_dir="none", drafter="ngram", image_tokens=70)  # fmt: skip
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server


def test_pictures_in_a_conversation(browser: Any, server: Served, tmp_path: Path) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    page = Page(context, server.url)
    tab, path = page.tab, tmp_path / "chosen.png"
    path.write_bytes(TWO)
    tab.fill("#system-text", "", force=True)
    tab.evaluate(GIVE, [base64.b64encode(ONE).decode(), "pasted"])
    sync.expect(tab.locator("#tray img")).to_have_count(1)
    tab.evaluate(GIVE, [base64.b64encode(ONE).decode(), "dropped"])
    sync.expect(tab.locator("#tray img")).to_have_count(2)
    page.see("#tray .shown figcaption", "tokens")
    tab.click("#tray .shown:first-child .remove")
    sync.expect(tab.locator("#tray img")).to_have_count(1)
    assert tab.get_attribute("#tray img", "alt") == "dropped.png"
    tab.set_input_files("#attached", path)
    sync.expect(tab.locator("#tray img")).to_have_count(2)
    tab.evaluate("() => { document.querySelector('[name=max_tokens]').value = 4; }")
    tab.evaluate(
        "() => document.querySelector('[name=max_tokens]').dispatchEvent(new Event('input', { bubbles: true }))"
    )
    page.say("what", 1)
    sync.expect(tab.locator("#tray img")).to_have_count(0)
    sync.expect(tab.locator(".user .said img")).to_have_count(2)
    page.say("and now?", 2)
    assert tab.locator(".answer .error").count() == 0, page.texts(".answer .error")
    tab.reload()
    page.answered(2)
    sync.expect(tab.locator(".user .said img")).to_have_count(2)
    with tab.expect_download() as exported:
        tab.click("#export-json")
    exported.value.save_as(tmp_path / "talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [part["type"] for part in saved["messages"][0]["content"]] == ["image", "image", "text"]
    tab.click("#new")
    tab.set_input_files("#import", tmp_path / "talk.json")
    sync.expect(tab.locator(".user .said img")).to_have_count(2)
    tab.evaluate("() => { const t = new DataTransfer(); t.items.add(new File(['x'], 'a.txt', { type: 'text/plain' }));"
                 " const event = new ClipboardEvent('paste', { clipboardData: t });"
                 " document.getElementById('prompt').dispatchEvent(event); }")  # fmt: skip
    page.see("#notice", "a.txt is neither a picture nor sound")
    assert page.problems == []
    context.close()
