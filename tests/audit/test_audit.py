"""`paceline audit` against servers whose faults are known: each verdict as it should be."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline.audit.audit import EXIT, PROMPTS, Audit, Plan, Report, judge, to_text
from paceline.audit.client import Endpoint, tokens_of
from paceline.check.chi2 import compare_samples
from paceline.cli.audit import command
from paceline.errors import UsageError

PLAN = Plan(prompts=6, tokens=8, samples=120)
WORDS = ("a", "b", "c", "d")


class FakeServer:
    """Answers by a fixed distribution over four words. `flip(prompt, position)` puts the second choice first."""

    def __init__(
        self,
        gap: float = 2.0,
        flip: Callable[[str, int], bool] = lambda prompt, at: False,
        distribution: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1),
        refuses: str | None = None,
        certain: bool = False,
        logprobs: bool = True,
        noisy: bool = False,
        blind: bool = False,
    ) -> None:
        self.gap, self.flip, self.distribution, self.refuses = gap, flip, distribution, refuses
        self.certain, self.logprobs, self.noisy, self.count = certain, logprobs, noisy, 0
        self.blind = blind  # to pictures: they are dropped in silence

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "fake"}]})
        body = json.loads(request.content)
        self.count += 1
        chat = request.url.path.endswith("/chat/completions")
        if chat:
            parts = body["messages"][0]["content"]
            looks = [part for part in parts if part["type"] == "text" or not self.blind]
            body |= {"prompt": json.dumps(looks), "logprobs": body["top_logprobs"]}
            if self.refuses == "image_url" and len(parts) > 1:
                return httpx2.Response(400, json={"error": "reads text only"})
        if self.refuses in body:
            return httpx2.Response(400, json={"error": f"{self.refuses} is not supported with speculation"})
        if body["temperature"] == 1.0:
            rng = random.Random(body["seed"])
            word = rng.choices(WORDS, self.distribution)[0]
            nats = -0.5 * self.gap * rng.random()
            return self._reply([word], [{word: 0.0 if self.certain else nats}], body)
        words, tops = [], []
        for at in range(body["max_tokens"]):
            choice = random.Random(f"{body['prompt']}{at}").choice(WORDS)
            other = WORDS[(WORDS.index(choice) + 1) % 4]
            swap = self.flip(body["prompt"], at) or (self.noisy and self.count % 2 == 0 and at == 3)
            words.append(other if swap else choice)
            tops.append({choice: -0.1, other: -0.1 - self.gap})
        return self._reply(words, tops, body, chat)

    def _reply(
        self, words: list[str], tops: list[dict[str, float]], body: dict[str, Any], chat: bool = False
    ) -> httpx2.Response:
        logprobs = None
        if tops and self.logprobs and "logprobs" in body:
            values = [0.0 if self.certain else top[word] for word, top in zip(words, tops, strict=True)]
            logprobs = {"tokens": words, "token_logprobs": values, "top_logprobs": tops}
        text = "".join(words)
        said = {"message": {"content": text}} if chat else {"text": text}
        return httpx2.Response(200, json={"choices": [{**said, "logprobs": logprobs}]})


def audited(one: FakeServer, other: FakeServer, plan: Plan = PLAN) -> Report:
    sides = [
        Endpoint(f"http://{name}", transport=httpx2.MockTransport(server))
        for name, server in (("one", one), ("other", other))
    ]
    return Audit(*sides, plan).run()


def third(prompt: str, at: int) -> bool:
    return prompt == PROMPTS[2] and at == 4


@pytest.mark.parametrize(
    ("server", "verdict"),
    [
        (FakeServer(), "lossless"),
        (FakeServer(gap=0.01, flip=third), "lossless up to near-ties"),
        (FakeServer(flip=third), "not lossless"),
        (FakeServer(distribution=(0.1, 0.2, 0.3, 0.4)), "not lossless"),
        (FakeServer(gap=1.0), "not lossless"),  # of sampled tokens: twice as likely
        (FakeServer(refuses="min_p"), "features differ"),
        (FakeServer(certain=True), "features differ"),
        (FakeServer(noisy=True), "cannot tell"),
        (FakeServer(logprobs=False, flip=third), "features differ"),  # one side gives no logprobs
    ],
    ids=[
        "same",
        "near-tie",
        "clear fault",
        "other distribution",
        "likelier tokens",
        "refuses min_p",
        "logprobs 0",
        "noisy",
        "no logprobs",
    ],
)
def test_verdicts(server: FakeServer, verdict: str) -> None:
    report = audited(server, FakeServer(gap=2.0 if server.gap == 1.0 else server.gap))
    assert report.verdict == verdict, report.reason
    assert report.verdict.upper() in to_text(report)


SEEING = Plan(prompts=1, tokens=8, samples=0, images=("data:image/png;base64,AAAA",))


@pytest.mark.parametrize(
    ("server", "verdict", "why"),
    [
        (FakeServer(), "lossless", "all 3 greedy texts"),
        (FakeServer(flip=lambda prompt, at: "image_url" in prompt and at == 2), "not lossless", "2 of 3"),
        (FakeServer(blind=True), "not lossless", "2 of 3"),
        (FakeServer(refuses="image_url"), "features differ", "a picture: refused with 400"),
    ],
    ids=["same", "a fault", "blind", "refused"],
)
def test_pictures(server: FakeServer, verdict: str, why: str) -> None:
    report = audited(server, other := FakeServer(), SEEING)
    assert report.verdict == verdict
    assert why in report.reason
    assert (report.features.get("pictures") is not None) == server.blind
    assert server.count + other.count == SEEING.requests
    both = audited(FakeServer(blind=True), FakeServer(blind=True), SEEING)
    assert "answers the same without the picture" in both.features["pictures"]


def test_without_logprobs_a_difference_is_not_called_a_fault() -> None:
    report = audited(FakeServer(logprobs=False, flip=third), FakeServer(logprobs=False))
    assert report.verdict == "cannot tell"
    assert report.divergences[0].kind == "unknown"


def test_the_first_divergence_is_named() -> None:
    report = audited(FakeServer(flip=third), FakeServer())
    (found,) = report.divergences
    assert (found.prompt, found.at, found.kind) == (2, 4, "fault")
    assert found.gap == pytest.approx(2.0)


def test_nothing_answered_is_no_proof() -> None:
    report = audited(FakeServer(refuses="prompt"), FakeServer())
    assert (report.verdict, EXIT[report.verdict]) == ("cannot tell", 3)
    assert judge(Report())[0] == "cannot tell"


def test_the_number_of_requests_is_bounded_and_as_planned() -> None:
    one, other = FakeServer(), FakeServer()
    audited(one, other)
    assert one.count + other.count == PLAN.requests


def test_logprobs_in_both_layouts() -> None:
    completions = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.5}]}
    chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}]}  # fmt: skip  # noqa: E501
    assert tokens_of(completions) == tokens_of(chat)
    assert tokens_of(None) == ()
    assert math.isnan(tokens_of({"tokens": ["a"], "token_logprobs": [None]})[0].logprob)


def test_two_samples_of_one_distribution_are_not_told_apart_and_of_two_laws_are() -> None:
    rng = random.Random(0)
    counts = [[0] * 4 for _ in range(3)]
    for row, distribution in zip(counts, [(4, 3, 2, 1), (4, 3, 2, 1), (1, 2, 3, 4)], strict=True):
        for choice in rng.choices(range(4), distribution, k=500):
            row[choice] += 1
    same, other = compare_samples(counts[0], counts[1]), compare_samples(counts[0], counts[2])
    assert not same.refuted
    assert other.refuted
    assert 0 < same.detectable < 0.3
    assert compare_samples([], []).p_value == 1.0
    assert compare_samples([1] * 20, [1] * 20).detectable == 1.0  # all pooled: nothing could have been found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx2.Response(200, text="<html>"), "no JSON"),
        (httpx2.Response(401), "wants a key"),
        (httpx2.Response(404), "is it the server's address"),
        (httpx2.Response(200, json={"data": []}), "lists no model"),
    ],
)
def test_what_is_no_server_is_said_in_one_line(answer: httpx2.Response, message: str) -> None:
    side = Endpoint("http://one", transport=httpx2.MockTransport(lambda request: answer))
    with pytest.raises(UsageError, match=message):
        side.find_model()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://x"], "nothing to compare with"),
        (["x", "--against", "http://y"], "is no URL"),
        (["http://x", "--against-body", "{"], "is no JSON"),
        (["http://x", "--against-body", "[]"], "no JSON object"),
        (["http://x", "--against", "http://y", "--key-env", "PACELINE_NO_SUCH_KEY"], "is not set"),
        (["http://x", "--against", "http://y", "--key-file", "/nowhere/key"], "cannot read the key file"),
        (["http://127.0.0.1:9", "--against-body", "{}"], "cannot be reached"),
        (["http://127.0.0.1:9", "--against-body", "{}", "--image", __file__], "cannot be reached"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command.main(arguments, standalone_mode=False)


def test_command_writes_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(url: str, *rest: Any) -> Endpoint:
        assert rest[1] == "secret"
        return Endpoint(url, transport=httpx2.MockTransport(FakeServer()))

    monkeypatch.setenv("AUDIT_KEY", "secret")
    monkeypatch.setattr("paceline.audit.client.Endpoint", fake)
    out = tmp_path / "report.json"
    with pytest.raises(SystemExit) as stop:
        command.main(
            [
                "http://x",
                "--against-body",
                "{}",
                "--key-env",
                "AUDIT_KEY",
                "--samples",
                "30",
                "--json",
                str(out),
            ],
            standalone_mode=False,
        )
    assert stop.value.code == 0
    assert json.loads(out.read_text())["verdict"] == "lossless"
