"""TLS, a Unix socket, and a proxy's path: the server as a good neighbour on its machine."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from paceline.errors import UsageError
from paceline.server.run import bind
from paceline.server.settings import ServerConfig
from paceline.server.start import address
from server.serving import Served, served


def make_certificate(folder: Path, password: str = "") -> tuple[str, str]:
    """Of localhost, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", key, "-out", cert, "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         *(["-passout", f"pass:{password}"] if password else ["-nodes"])],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


def test_https_with_a_certificate(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=cert)
    with (
        served(ssl_certfile=cert, ssl_keyfile=key, verify=trusted) as s,
        httpx.Client(base_url=s.url, verify=trusted) as client,
    ):
        assert s.url.startswith("https://")
        asked = {"prompt": "x", "max_tokens": 5, "seed": 1}
        whole = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        streamed = client.post("/v1/completions", json=asked | {"stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert whole
        with pytest.raises(httpx.TransportError):
            httpx.get(s.url.replace("https", "http") + "/health")
        with pytest.raises(httpx.TransportError):  # nobody here trusts it
            httpx.get(f"{s.url}/health")


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other = make_certificate(tmp_path / "other")
    (tmp_path / "locked").mkdir()
    locked = make_certificate(tmp_path / "locked", password="secret")
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    for pair, said in (
        ((str(tmp_path / "none.pem"), key), "No such file"),
        ((cert, other), "KEY_VALUES_MISMATCH|key values mismatch"),
        ((str(text), key), "cannot be used"),
        ((str(tmp_path), key), "cannot be used"),
        ((cert, None), "cannot be used"),
        (locked, "has a password"),
    ):
        with pytest.raises(UsageError, match=said):
            bind(ServerConfig(port=0, ssl_certfile=pair[0], ssl_keyfile=pair[1]))
    with pytest.raises(UsageError, match="ssl_certfile"):
        ServerConfig(ssl_keyfile=key)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "p.sock")
    transport = httpx.HTTPTransport(uds=path)
    with served(uds=path, transport=transport) as s:
        made = s.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
        assert made.status_code == 200
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        with socket.socket() as unasked:
            assert address(s.service.config, unasked) == f"unix:{path}"
        with pytest.raises(UsageError, match="in use"):
            bind(s.service.config)
    bind(ServerConfig(uds=path)).close()  # nobody listens on the file that was left
    text = tmp_path / "text"
    text.write_text("mine")
    for wrong in (str(text), str(tmp_path / "no" / "p.sock"), "x" * 300):
        with pytest.raises(UsageError, match="--uds"):
            bind(ServerConfig(uds=wrong))
    assert text.read_text() == "mine"
    assert ServerConfig(uds=path, host="0.0.0.0").uds == path, "no network can reach it: it needs no key"


@pytest.fixture(scope="module")
def proxied() -> Iterator[Served]:
    with served(root_path="/llm/one", keys=("key",)) as made:
        yield made


@pytest.mark.parametrize("root", ["", "/llm/one"], ids=["taken away", "left in"])
def test_a_path_of_a_proxy(proxied: Served, root: str) -> None:
    get = proxied.client.get
    assert get(f"{root}/v1/models").json()["data"][0]["id"] == "fake"
    assert get(f"{root}/health", headers={"Authorization": ""}).status_code == 200
    assert get(f"{root}/v1/models", headers={"Authorization": ""}).status_code == 401
    made = proxied.client.post(f"{root}/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert made.status_code == 200
    assert get(f"{root}/openapi.json").json()["servers"] == [{"url": "/llm/one"}]
    assert get(f"{root}/v1/v1/models").status_code == 200
    assert get(f"{root}/nowhere").status_code == 404
    for page in ("/", "/docs"):
        text = get(f"{root}{page}").text
        assert 'href="/' not in text, "the page's addresses are relative"
        assert 'src="/' not in text


def test_the_path_itself_leads_to_the_page(proxied: Served) -> None:
    moved = proxied.client.get("/llm/one", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, "/llm/one/")
    assert proxied.client.get("/llm/oneself").status_code == 404


@pytest.mark.parametrize(
    "wrong", ["", "llm", "/llm/", "/", "/v1", "/api/x", "/a b", "//x", "/x?y", "/a/../b?"]
)
def test_paths_that_cannot_be(wrong: str) -> None:
    with pytest.raises(UsageError, match="root_path"):
        ServerConfig(root_path=wrong)
