"""The page's own modules, run in Node where there is one. The page as a whole: test_page.py."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from server.pdfs import pdf

PAGE = Path(paceline.__file__).parent / "server" / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")


def node(tmp_path: Path, source: str) -> object:
    shutil.copytree(PAGE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    script = tmp_path / "test.js"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sha256_of_token_ids(tmp_path: Path) -> None:
    rng = random.Random(1)
    lists = [[rng.randrange(2**18) for _ in range(n)] for n in (0, 1, 13, 14, 15, 16, 17, 200)]
    source = f"""import {{ sha256OfIds }} from "./sha256.js";
        console.log(JSON.stringify({json.dumps(lists)}.map((ids) => sha256OfIds(ids))));"""
    expected = [hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest() for ids in lists]
    assert node(tmp_path, source) == expected


def test_events_do_not_depend_on_the_cuts(tmp_path: Path) -> None:
    payloads = [
        json.dumps({"text": text}, ensure_ascii=False) for text in ("a", "é🎉", "x\n\ny", "data: z", "")
    ] + ["[DONE]"]
    rng = random.Random(2)
    cuts = []
    for ending in ("\n", "\r\n"):
        text = "".join(f"data: {payload}{ending}{ending}" for payload in payloads)
        for _ in range(100):
            rest, pieces = text, []
            while rest:
                size = rng.randint(1, 8)
                pieces.append(rest[:size])
                rest = rest[size:]
            cuts.append(pieces)
    source = f"""import {{ EventSplitter }} from "./stream.js";
        console.log(JSON.stringify({json.dumps(cuts)}.map((pieces) => {{
          const splitter = new EventSplitter();
          return pieces.flatMap((piece) => splitter.push(piece));
        }})));"""
    assert node(tmp_path, source) == [payloads] * len(cuts)


def test_one_clock_for_both_lanes_of_a_race(tmp_path: Path) -> None:
    """What is shown at the end is the engine's time, so lanes and verdict cannot disagree."""
    source = """import { Meter } from "./meters.js";
        const made = [0.5, 0.2].map((seconds) => {
          const meter = new Meter();
          const before = meter.speed;
          const step = { tokens: [1, 2], pieces: ["a", "b"], origins: ["draft", "target"], proposed: [1] };
          for (let i = 0; i < 5; i++) meter.add(step);
          meter.report = { seconds };
          return { before, seconds: meter.seconds, speed: meter.speed };
        });
        console.log(JSON.stringify(made));"""
    plain, fast = node(tmp_path, source)  # type: ignore[misc]
    assert plain == {"before": 0, "seconds": 0.5, "speed": 20}
    assert fast["speed"] / plain["speed"] == plain["seconds"] / fast["seconds"]


DOCUMENT = """
class Made {
  constructor(name) { this.name = name; this.attributes = {}; this.children = []; }
  setAttribute(key, value) { this.attributes[key] = value; }
  append(...children) { this.children.push(...children); }
}
globalThis.document = { createElement: (name) => new Made(name) };
"""  # as much of a browser's as the page's markdown needs
HOSTILE = """
<script>alert(1)</script> <img src=x onerror=alert(1)> <svg/onload=alert(1)> <a href="javascript:alert(1)">x</a>

[a](javascript:alert(1)) [b](JaVaScRiPt&colon;alert(1)) [c](data:text/html,<script>alert(1)</script>) [d](vbscript:x)
[e](java\tscript:alert(1)) <javascript:alert(1)> [f](/v1/models) [g](//evil.example) ![h](http://evil.example/p.png) [r]

[r]: javascript:alert(1)

<iframe src="javascript:alert(1)"></iframe>
<style>body{display:none}</style>

| <script>1</script> | [t](javascript:1) |
|---|---|
| `<b>` | <b onclick=alert(1)>x</b> |

```html "><script>alert(1)</script>
<script>alert(2)</script>
```
- <details open ontoggle=alert(1)>
> # <h1 style=x>
[ok](https://example.org/a?b=1&c) <mail@example.org>
"""
SHAPES = {
    "p": {"class"}, "span": {"class"}, "div": {"class"}, "pre": {"tabindex"}, "code": set(), "br": set(),
    "table": set(), "thead": set(), "tbody": set(), "tr": set(), "th": {"class"}, "td": {"class"}, "h3": set(),
    "ul": set(), "ol": {"start"}, "li": {"class"}, "blockquote": set(), "em": set(), "strong": set(), "del": set(),
    "button": {"type", "data-act", "aria-label"}, "input": {"type", "disabled", "checked"}, "hr": set(),
}  # fmt: skip


def shown(tmp_path: Path, text: str) -> list[Any]:
    return node(
        tmp_path,
        f"""{DOCUMENT}
        const {{ markdown }} = await import("./markdown.js");
        console.log(JSON.stringify(markdown({json.dumps(text)})));""",
    )  # type: ignore[return-value]


def elements(made: list[Any]) -> Iterator[dict[str, Any]]:
    for one in made:
        if isinstance(one, dict):
            yield one
            yield from elements(one["children"])


def words(made: list[Any]) -> str:
    return "".join(one if isinstance(one, str) else words(one["children"]) for one in made)


def test_html_and_scripts_in_an_answer_are_text(tmp_path: Path) -> None:
    made = shown(tmp_path, HOSTILE)
    links = []
    for one in elements(made):
        if one["name"] == "a":
            links.append(one["attributes"].pop("href"))
            assert one["attributes"] == {"target": "_blank", "rel": "noopener noreferrer nofollow"}
        else:
            assert set(one["attributes"]) <= SHAPES[one["name"]], one
    assert links == ["http://evil.example/p.png", "https://example.org/a?b=1&c", "mailto:mail@example.org"]
    for kept in (
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<iframe src=",
        "<b onclick=alert(1)>",
    ):
        assert kept in words(made)


def test_markdown_is_shown(tmp_path: Path) -> None:
    text = (
        "# T\n\nA *b* **c** `d<e` ~~f~~ &lt;g&gt; &#8364; &bogus;\nline\n\n3. x\n4. y\n\n"
        "- [x] done\n\n```py\n1 < 2\n```\n\n> q\n\n---"
    )
    made = shown(tmp_path, text)
    names = [one["name"] for one in elements(made)]
    for name in (
        "h3",
        "em",
        "strong",
        "del",
        "code",
        "br",
        "ol",
        "li",
        "ul",
        "input",
        "pre",
        "blockquote",
        "hr",
    ):
        assert name in names
    assert "A b c d<e f <g> € &bogus;line" in words(made)
    assert [one["attributes"]["start"] for one in elements(made) if one["name"] == "ol"] == [3]
    deep = shown(tmp_path, "> " * 20000 + "x")
    assert deep[0]["name"] in ("p", "blockquote")


def test_formulas_are_found_and_prices_are_none(tmp_path: Path) -> None:
    text = "It costs $5 and $10, or $1.50$2. $a^2$ \\(b\\) `$c$`\n\n$$\nx\n$$\n\n\\[y\\]\n\nand $$z$$"
    found = [
        one for one in elements(shown(tmp_path, text)) if "formula" in (one["attributes"].get("class") or "")
    ]
    assert [(words([one]), "display" in one["attributes"]["class"]) for one in found] == [
        ("$a^2$", False), ("\\(b\\)", False), ("$$\nx\n$$", True), ("\\[y\\]", True), ("$$z$$", True),
    ]  # fmt: skip


def test_code_keeps_every_letter_in_its_colours(tmp_path: Path) -> None:
    code = 'def f(x: int) -> str:\n    return f"{x} <b>"  # &amp;\n'
    (block,) = [one for one in elements(shown(tmp_path, f"```python\n{code}```")) if one["name"] == "code"]
    assert words([block]) == code.rstrip("\n")
    kinds = {one["attributes"].get("class") for one in elements(block["children"])}
    assert {"hl-keyword", "hl-string", "hl-comment"} <= kinds
    (plain,) = [one for one in elements(shown(tmp_path, f"```nosuch\n{code}```")) if one["name"] == "code"]
    assert plain["children"] == [code.rstrip("\n")]


def test_a_text_file_stands_before_what_is_asked(tmp_path: Path) -> None:
    source = """import * as a from "./attached.js";
        const file = (name, bytes, type = "") => new File([new Uint8Array(bytes)], name, { type });
        const say = (one) => a.textOf(one).then(({ text }) => text, (error) => error.message);
        console.log(JSON.stringify([
          a.withTexts("why?", [{ name: "a.md", text: "x\\n```py\\n```\\n" }]),
          a.withTexts("", [{ name: "b", text: "y" }]),
          await say(file("n.txt", [104, 105])), await say(file("n.txt", [0, 1])), await say(file("n.txt", [255])),
          await say(file("n.txt", new Array(400001).fill(65))),
          [file("x.py", []), file("x", [], "text/plain"), file("x.png", [], "image/png"), file("x.bin", [])]
            .map(a.isText)]));"""
    assert node(tmp_path, source) == [
        "a.md:\n````\nx\n```py\n```\n````\n\nwhy?", "b:\n```\ny\n```", "hi", "n.txt is no text",
        "n.txt is not UTF-8 text: convert it first", "n.txt has more than 400 kB: give a part of it",
        [True, True, False, False],
    ]  # fmt: skip


TURNS = """import * as t from "./turns.js";
const talk = (...contents) => ({ ...t.newConversation(), turns: contents.map((content, i) =>
  i % 2 ? { ...t.newAnswer("m"), content, finish: "stop" } : { role: "user", content }) });
"""


def test_a_broken_store_gives_whole_conversations_or_none(tmp_path: Path) -> None:
    good = {"id": "a", "turns": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    bad_steps = [
        {"tokens": [1], "pieces": ["a", "b"], "origins": ["draft"], "proposed": [], "proposed_pieces": []}
    ]
    records: list[Any] = [
        None, 5, "x", [], {}, {"id": 1, "turns": []}, {"id": "a", "turns": {}}, good,
        {"id": "b", "revision": -1, "first": 99, "system": 4, "updated": "x", "turns": [
            None, {"role": "tool", "content": "x"}, {"role": "user"}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": "z", "steps": bad_steps, "report": [], "seconds": "9", "finish": 3}]},
    ]  # fmt: skip
    out: Any = node(tmp_path, f"{TURNS} console.log(JSON.stringify({json.dumps(records)}.map(t.checked)));")
    assert out[:7] == [None] * 7
    assert [turn["content"] for turn in out[7]["turns"]] == ["x", "y"]
    mended = out[8]
    assert (mended["revision"], mended["first"], mended["system"], mended["updated"]) == (0, 2, "", 0)
    assert [turn["content"] for turn in mended["turns"]] == ["q", "z"]
    answer = mended["turns"][1]
    assert (answer["steps"], answer["report"], answer["seconds"], answer["finish"]) == (
        [],
        None,
        0,
        "interrupted",
    )


def test_what_the_model_is_sent(tmp_path: Path) -> None:
    """Turns that say nothing are left out, and neighbours of one role joined: templates want them to alternate."""
    source = f"""{TURNS}
        const c = {{ ...talk("a", "", "b", "c"), system: " be brief " }};
        console.log(JSON.stringify([t.messages(c), t.messages(c, 2), t.title(talk("\\n  " + "é".repeat(99)))]));"""
    whole, later, title = node(tmp_path, source)  # type: ignore[misc]
    system = {"role": "system", "content": "be brief"}
    assert whole == [
        system,
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c"},
    ]
    assert later == [system, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert title == "é" * 59 + "…"


def test_the_oldest_turns_make_room(tmp_path: Path) -> None:
    """Each turn is 100 tokens; where room is short, so many are left out that half of the context is free."""
    source = f"""{TURNS}
        const out = [];
        for (const [turns, context, wanted, first] of [[3, 1000, null, 0], [7, 1000, null, 0], [9, 1000, null, 0],
             [9, 1000, 50, 0], [21, 1000, null, 12], [1, 100, null, 0], [3, 100, null, 0]]) {{
          let asked = 0;
          const c = {{ ...talk(...Array(turns).fill("x")), first }};
          const found = await t.firstThatFits(c, context, wanted, (from) => {{ asked++; return 100 * (turns - from); }});
          out.push([found, asked]);
        }}
        console.log(JSON.stringify([out, t.surelyFits([{{ role: "user", content: "é".repeat(100) }}], 4096),
          t.surelyFits([{{ role: "user", content: "x".repeat(3000) }}], 4096)]));"""
    out, short, long = node(tmp_path, source)  # type: ignore[misc]
    assert [first for first, _ in out] == [0, 0, 4, 0, 16, 0, 2]
    assert max(asked for _, asked in out) <= 4
    assert short
    assert not long


def test_exported_conversations_come_back_and_paceline_run_reads_them(tmp_path: Path) -> None:
    from paceline.cli.conversation import _KIND
    from paceline.cli.turns import checked

    source = f"""{TURNS}
        const c = {{ ...talk("a", "b\\n```", "c"), system: "s" }};
        const json = t.asJson(c, {{ temperature: 0.5 }});
        const refused = ["", "[]", "{{}}", '{{"kind":"paceline conversation","messages":[]}}', "null"].map((text) => {{
          try {{ t.fromJson(text); return ""; }} catch (error) {{ return error.message; }}
        }});
        console.log(JSON.stringify([JSON.parse(json), t.fromJson(json), t.asMarkdown(c), refused]));"""
    saved, back, text, refused = node(tmp_path, source)  # type: ignore[misc]
    assert saved["kind"] == _KIND
    assert (saved["system"], saved["settings"]) == ("s", {"temperature": 0.5})
    assert checked(saved["messages"]) == saved["messages"]
    assert [turn["content"] for turn in back["turns"]] == ["a", "b\n```", "c"]
    assert text == "# a\n\n## System\n\ns\n\n## User\n\na\n\n## m\n\nb\n```\n\n## User\n\nc\n"
    assert all("choose one that was exported" in message for message in refused)


def test_pictures_go_to_the_server_and_come_back_from_files(tmp_path: Path) -> None:
    from paceline.cli.turns import checked

    url, sound = "data:image/png;base64,iVBORw==", "data:audio/wav;base64,UklGRg=="
    source = f"""{TURNS}
        const c = talk("what", "a cat", "and", "b");
        c.turns[0].media = [{{ url: "{url}", name: "cat.png" }}, {{ url: "{sound}", name: "" }}];
        c.turns[2] = {{ role: "user", content: "", media: [{{ url: "{url}", name: "" }}] }};
        const bad = ["javascript:alert(1)", "https://x.org/a.png", "data:text/html;base64,AA==", 5, null];
        const media = bad.map((url) => ({{ url }}));
        const broken = t.checked({{ id: "a", turns: [{{ role: "user", content: "", media }}] }});
        const json = t.asJson(c, {{}});
        const run = JSON.stringify({{ kind: "paceline conversation", messages: [{{ role: "user", content: [
          {{ type: "image", image: "data:application/octet-stream;base64,iVBORw==" }},
          {{ type: "text", text: "x" }}] }}] }});
        console.log(JSON.stringify([t.messages(c), JSON.parse(json), t.fromJson(json), t.checked(c), broken.turns[0],
          t.fromJson(run).turns[0], t.asMarkdown(c), t.title(talk("")), t.surelyFits(t.messages(c), 1e9)]));"""
    sent, saved, back, kept, broken, run, text, empty, fits = node(tmp_path, source)  # type: ignore[misc]
    picture = {"type": "image_url", "image_url": {"url": url}}
    assert sent[0]["content"][0] == picture
    assert sent[0]["content"][1] == {
        "type": "input_audio",
        "input_audio": {"data": "UklGRg==", "format": "wav"},
    }
    assert sent[0]["content"][2] == {"type": "text", "text": "what"}
    assert sent[2]["content"] == [picture]
    assert checked(saved["messages"]) == saved["messages"]  # `paceline run` reads it
    assert [one["url"] for one in back["turns"][0]["media"]] == [url, sound]
    assert kept["turns"][0]["media"][0] == {"url": url, "name": "cat.png"}
    assert broken == {"role": "user", "content": ""}
    assert run == {"role": "user", "content": "x", "media": [{"url": url, "name": ""}]}
    assert "*cat.png*" in text
    assert url not in text
    assert empty == "New chat"
    assert not fits


def test_without_a_store_conversations_last_as_long_as_the_page(tmp_path: Path) -> None:
    source = f"""{TURNS}
        import {{ Store }} from "./store.js";
        const out = [];
        for (const broken of [undefined, {{ open() {{ throw new Error("refused"); }} }}]) {{
          globalThis.indexedDB = broken;
          const store = new Store(), c = talk("a", "b");
          await store.open();
          await store.put(c);
          await store.put(c);
          const found = [(await store.heads()).map((h) => h.title), (await store.get(c.id)) === c, await store.get("x")];
          await store.remove(c.id);
          out.push([...found, (await store.heads()).length, store.trouble]);
        }}
        console.log(JSON.stringify(out));"""
    for titles, same, missing, left, trouble in node(tmp_path, source):  # type: ignore[attr-defined]
        assert (titles, same, missing, left) == (["a"], True, None, 0)
        assert trouble


def test_a_conversation_that_is_deleted_while_it_is_written_stays_deleted(tmp_path: Path) -> None:
    source = """const nothing = (target = () => nothing()) => new Proxy(target, {
          get: (own, key) => (key === Symbol.toPrimitive ? () => 0 : own[key] ?? nothing()),
          apply: () => nothing(), set: Reflect.set });
        Object.assign(globalThis, { document: nothing(), innerHeight: 0 });
        let asked = 0;
        globalThis.fetch = async (url, { signal }) => ({ ok: true, body: new ReadableStream({ start(stream) {
          asked += 1;
          signal.addEventListener("abort", () => stream.error(signal.reason));
        } }) });
        const { Chat } = await import("./chat.js"), { Store } = await import("./store.js");
        const { newConversation } = await import("./turns.js");
        const out = [];
        for (const looksAway of [false, true]) {
          const store = new Store();
          const on = nothing({ server: async () => "ready", asTokens: () => false });
          const chat = new Chat(nothing({ prompt: nothing({ value: "hi" }) }), on, store, { request: () => ({}) });
          chat.model = { id: "m", max_model_len: 1e6 };
          const { id } = chat.conversation, before = asked, sent = chat.send();
          while (asked === before) await new Promise((resolve) => setTimeout(resolve, 1));
          const kept = (await store.heads()).length;
          if (looksAway) chat.open(newConversation());
          const gone = await chat.remove(id);
          await sent;
          out.push([kept, gone.turns.map((turn) => turn.content), gone.turns[1].finish, (await store.heads()).length]);
        }
        console.log(JSON.stringify(out));"""
    assert node(tmp_path, source) == [[1, ["hi", ""], "stopped", 0]] * 2


def test_figures_and_ends_are_said(tmp_path: Path) -> None:
    source = f"""{TURNS}
        const step = {{ tokens: [1, 2], origins: ["draft", "target"], proposed: [1, 5] }};
        const answer = {{ ...t.newAnswer("m"), steps: [step, step], seconds: 9 }};
        console.log(JSON.stringify([t.figures({{ ...answer, report: {{ seconds: 0.1, lossy: true }} }}),
          t.figures(answer),
          t.ending({{ finish: "length", used: 10 }}, 10), t.ending({{ finish: "length", used: 9 }}, 10),
          t.ending({{ finish: "stopped" }}, 10), t.ending({{ finish: "stop" }}, 10)]));"""
    assert node(tmp_path, source) == [
        "4 tokens, 40 a second, 2 of them drafted ahead, 2 drafts thrown away, by a lossy rule",
        "4 tokens, 0.4 a second, 2 of them drafted ahead, 2 drafts thrown away",
        "the context of 10 tokens is full", "length limit reached", "stopped", "",
    ]  # fmt: skip


def test_a_pdf_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    files = {
        "two.pdf": pdf("ducks swim", "geese fly"),
        "some.pdf": pdf("", "ducks swim"),
        "empty.pdf": pdf("", ""),
        "locked.pdf": pdf("secret", locked=True),
        "cut.pdf": pdf("ducks")[:50],
        "other.pdf": b"this is no PDF",
        "nothing.pdf": b"",
        "large.pdf": pdf("ducks") + bytes(20 * 2**20),
        "long.pdf": pdf(*["duck " * 60000] * 3),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    source = f"""import {{ readFileSync }} from "node:fs";
        import {{ textOf }} from "./attached.js";
        globalThis.DOMMatrix = class {{}}; // Node has none, every browser has; pdf.js only draws by it
        const out = {{}};
        for (const name of {json.dumps([*files])}) {{
          const file = new File([readFileSync(new URL(name, import.meta.url))], name);
          const read = textOf(file).then(({{ name, text, size }}) => [name, text.slice(0, 40), size]);
          out[name] = await read.catch((error) => error.message);
        }}
        console.log(JSON.stringify(out));"""
    no_pdf = "cannot be read as a PDF: it is damaged, or is something else"
    out: Any = node(tmp_path, source)
    assert out.pop("long.pdf")[0] == "long.pdf (pages 1 to 2 of 3)"
    assert out == {
        "two.pdf": ["two.pdf (2 pages)", "ducks swim\n\ngeese fly", "21 letters"],
        "some.pdf": ["some.pdf (2 pages)", "ducks swim", "10 letters"],
        "empty.pdf": "empty.pdf has no text: its pages are pictures",
        "locked.pdf": "locked.pdf is locked by a password: save it without one",
        "cut.pdf": f"cut.pdf {no_pdf}",
        "other.pdf": f"other.pdf {no_pdf}",
        "nothing.pdf": f"nothing.pdf {no_pdf}",
        "large.pdf": "large.pdf has more than 20 MiB: give a part of it",
    }
