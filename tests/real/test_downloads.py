"""A hub on loopback: what is fetched before a refusal, and that `info` fetches no weights."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from decoders import LLAMA3, build_decoder
from layouts import edit, model, write
from small_tokenizers import SIZE, byte_level

MOST = 1_000_000  # bytes before a refusal


class Hub:
    """Serves the folders under `root` as repositories org/name; counts what it sends."""

    def __init__(self, root: Path) -> None:
        self.root, self.sent, self.asked = root, 0, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(send=False)

            def do_GET(self) -> None:
                self.answer(send=True)

            def answer(self, send: bool) -> None:
                parts = self.path.split("?")[0].strip("/").split("/")
                if parts[:2] == ["api", "models"]:
                    self.describe(root / parts[2] / parts[3], "tree" in parts, send)
                    return
                path = root / parts[0] / parts[1] / "/".join(parts[4:])
                if not path.is_file():
                    self.reply(404, b"", send, {"X-Error-Code": "EntryNotFound"})
                    return
                size = path.stat().st_size
                begin, end, status = 0, size - 1, 200
                if "Range" in self.headers:
                    first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                    begin, end, status = int(first), min(int(last or end), end), 206
                if send:
                    hub.asked.append((path.name, end - begin + 1))
                with path.open("rb") as file:
                    file.seek(begin)
                    data = file.read(end - begin + 1) if send else b""
                headers = {"ETag": f'"{path.name}"', "X-Repo-Commit": "c0ffee", "Accept-Ranges": "bytes"}
                self.reply(status, data, send, headers | ({} if send else {"Content-Length": str(size)}))

            def describe(self, folder: Path, tree: bool, send: bool) -> None:
                if not folder.is_dir():
                    self.reply(404, b"", send, {"X-Error-Code": "RepoNotFound"})
                    return
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                names = [path.relative_to(folder).as_posix() for path in files]
                about: object = {
                    "id": folder.name,
                    "sha": "c0ffee",
                    "siblings": [{"rfilename": n, "size": f.stat().st_size} for n, f in zip(names, files)],
                }
                if tree:
                    about = [
                        {"type": "file", "path": n, "size": f.stat().st_size, "oid": f.name}
                        for n, f in zip(names, files)
                    ]
                self.reply(200, json.dumps(about).encode(), send, {})

            def reply(self, status: int, data: bytes, send: bool, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if send:
                    hub.sent += len(data)
                    self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def paceline(hub: Hub, tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_address[1]}", "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    code = "from paceline.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=120,
    )


def big(folder: Path) -> None:
    """Weights with the header of gemma-4-E2B-it, 264 kB, and a file of its size, 10 GB, that holds nothing else."""
    text = gzip.decompress((Path(__file__).parent / "data" / "e2b_tensor_manifest.json.gz").read_bytes())
    header, at = {}, 0
    for name, one in json.loads(text)["tensors"].items():
        size = 2
        for n in one["shape"]:
            size *= n
        header[name] = {**one, "data_offsets": [at, at + size]}
        at += size
    data = json.dumps(header).encode()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + at)


def test_a_config_is_refused_before_anything_else_is_fetched(hub, tmp_path):
    folder = model(hub.root / "org" / "name")
    edit(folder / "config.json", model_type="gemma3n")
    for command in (("info", "org/name"), ("run", "hello", "--target", "org/name")):
        done = paceline(hub, tmp_path, *command)
        assert done.returncode == 3, done.stderr
        assert "is Gemma 3n, which paceline does not run" in done.stderr
    assert hub.sent < 20_000
    assert not [name for name, _ in hub.asked if name.endswith(("safetensors", "tokenizer.json"))]


def test_weights_that_do_not_fit_are_refused_by_their_header(hub, tmp_path):
    folder = model(hub.root / "org" / "name")
    big(folder)
    done = paceline(hub, tmp_path, "run", "hello", "--target", "org/name")
    assert done.returncode == 3, done.stderr
    assert "paceline: org/name: the weights do not fit config.json" in done.stderr
    assert hub.sent < MOST
    assert "model.safetensors" in dict(hub.asked)


def test_info_of_the_real_layout_fetches_no_weights(hub, tmp_path):
    """google/gemma-4-E2B-it's own config.json, names, shapes and dtypes."""
    folder = model(hub.root / "google" / "gemma-4-E2B-it")
    big(folder)
    write(folder / "config.json", (Path(__file__).parent / "data" / "e2b_config.json").read_text())
    done = paceline(hub, tmp_path, "info", "--no-measure", "https://huggingface.co/google/gemma-4-E2B-it")
    assert done.returncode == 0, done.stderr
    assert "35 (28 sliding, 7 full; 20 share K/V; per-layer inputs of 256); vocabulary 262,144" in done.stdout
    assert "target       google/gemma-4-E2B-it\n" in done.stdout
    assert "M parameters (BF16 x" in done.stdout
    assert "google/gemma-4-E2B-it-assistant fits" in done.stdout
    assert sum(size for name, size in hub.asked if name == "model.safetensors") < 600_000
    assert hub.sent < 2 * MOST  # with the tokenizer


def test_a_drafter_on_the_hub_is_checked_before_the_target_is_fetched(hub, tmp_path):
    model(hub.root / "org" / "name")
    edit(model(hub.root / "org" / "other", "assistant") / "config.json", backbone_hidden_size=8)
    done = paceline(hub, tmp_path, "run", "hello", "--target", "org/name", "--drafter", "org/other")
    assert done.returncode == 3, done.stderr
    assert "hidden" in done.stderr
    assert hub.sent < MOST


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with the rotary scaling of Llama 3 as F32 and Q8_0, 2 MB and 600 kB, and a config.json as some add."""
    from paceline.convert.to_gguf import write_gguf

    folder = tmp_path_factory.mktemp("llama")
    rope = {"rope_parameters": {**LLAMA3, "factor": 4.0}, "head_dim": 32}
    build_decoder("llama", folder / "hf", vocab_size=SIZE, hidden_size=128, intermediate_size=256, **rope)
    byte_level(folder / "hf")
    (folder / "gguf").mkdir()
    for kind in ("f32", "q8_0"):
        write_gguf(folder / "hf", folder / "gguf" / f"tiny-{kind.upper()}.gguf", kind)
    write(folder / "gguf" / "config.json", (folder / "hf" / "config.json").read_text())
    return folder / "gguf"


def test_a_gguf_file_of_the_hub_is_looked_at_fetched_and_run(hub, tmp_path, llama):
    shutil.copytree(llama, hub.root / "org" / "name")
    done = paceline(hub, tmp_path, "info", "org/name", "--no-measure", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"][0]["path"] == "org/name:tiny-Q8_0.gguf"
    assert found["next"] == "paceline pull org/name:tiny-Q8_0.gguf && paceline run org/name:tiny-Q8_0.gguf"
    size = (llama / "tiny-Q8_0.gguf").stat().st_size
    assert sum(n for name, n in hub.asked if name == "tiny-Q8_0.gguf") < 300_000 < size / 2
    hub.asked.clear()
    done = paceline(hub, tmp_path, "pull", "org/name:f32")
    assert done.returncode == 0, done.stderr
    assert {name for name, _ in hub.asked} == {"tiny-F32.gguf"}
    hub.asked.clear()
    args = (
        "run",
        "def parse(",
        "--target",
        "org/name:F32",
        "-n",
        "4",
        "--no-chat",
        "--no-native",
        "--drafter",
        "none",
    )
    done = paceline(hub, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not hub.asked  # it is here
    hub.server.shutdown()
    hub.server.server_close()
    offline = paceline(hub, tmp_path, *args)
    assert (offline.returncode, offline.stdout) == (0, done.stdout), offline.stderr
    assert "org/name:F32" in paceline(hub, tmp_path, "list").stdout


def test_the_assistant_in_the_repository_of_a_gguf_file_comes_with_it(hub, tmp_path):
    from paceline.convert.to_gguf import write_gguf
    from paceline.hub.resolve import bundled

    place = hub.root / "org" / "name"
    place.mkdir(parents=True)
    write_gguf(bundled("target"), place / "demo-BF16.gguf", None)
    write_gguf(bundled("assistant"), place / "mtp-demo-Q8_0.gguf", None, bundled("target"))
    write(place / "mtp-demo-Q4_0.gguf", b"GGUF")
    done = paceline(hub, tmp_path, "pull", "org/name")
    assert "its drafter org/name:mtp-demo-Q8_0.gguf is in" in done.stdout, done.stderr
    done = paceline(hub, tmp_path, "info", "org/name", "--no-measure")
    assert "mtp-demo-Q8_0.gguf lies beside the target" in done.stdout, done.stderr


def test_a_split_gguf_file_of_the_hub_is_one_model(hub, tmp_path, llama):
    import gguf

    place = hub.root / "org" / "name" / "F32"
    place.mkdir(parents=True)
    reader = gguf.GGUFReader(llama / "tiny-F32.gguf")
    writer = gguf.GGUFWriter(place / "tiny-F32.gguf", "llama", split_max_tensors=20)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.name for path in place.iterdir())
    assert len(parts) == 2
    done = paceline(hub, tmp_path, "pull", "org/name:F32")
    assert done.returncode == 0, done.stderr
    assert sorted({name for name, _ in hub.asked}) == parts
    done = paceline(hub, tmp_path, "info", "org/name", "--no-measure")
    assert "F32 x" in done.stdout, done.stderr


def test_a_gguf_file_that_cannot_be_run_is_refused_by_its_first_bytes(hub, tmp_path, llama):
    data = (llama / "tiny-F32.gguf").read_bytes().replace(b"llama", b"mamba", 1)
    write(hub.root / "org" / "name" / "m-Q4_0.gguf", data + bytes(3_000_000))
    write(hub.root / "org" / "broken" / "m-Q4_0.gguf", b"PK" + bytes(3_000_000))
    for command, words in {
        ("run", "hello", "--target", "org/name"): "org/name:m-Q4_0.gguf has the architecture 'mamba', which",
        ("pull", "org/name:Q8_0"): "org/name has no GGUF file tagged Q8_0: give one of Q4_0",
        ("info", "org/broken"): "org/broken:m-Q4_0.gguf is no GGUF file",
    }.items():
        hub.sent = 0
        done = paceline(hub, tmp_path, *command)
        assert done.returncode == 3, done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert hub.sent < MOST


def test_a_model_of_the_hub_runs(hub, tmp_path):
    write(model(hub.root / "org" / "name") / ".gitattributes", "*.bin filter=lfs")  # never fetched
    model(hub.root / "org" / "name-assistant", "assistant")
    args = (
        "run",
        "def parse(",
        "--target",
        "org/name",
        "--drafter",
        "org/name-assistant",
        "-n",
        "4",
        "--no-chat",
        "--no-native",
    )
    done = paceline(hub, tmp_path, *args)
    assert done.returncode == 0, done.stderr
    assert "org/name" in done.stderr
    (tmp_path / "plain").mkdir()
    here = paceline(hub, tmp_path, "run", "def parse(", "-n", "4", "--no-native", "--drafter", "none")
    assert done.stdout == here.stdout
    hub.server.shutdown()
    hub.server.server_close()
    offline = paceline(hub, tmp_path, *args)
    assert (offline.returncode, offline.stdout) == (0, here.stdout), offline.stderr


def test_no_such_repository(hub, tmp_path):
    done = paceline(hub, tmp_path, "info", "org/gone")
    assert done.returncode == 3, done.stderr
    assert "neither a local folder nor a repository you may read" in done.stderr
    assert done.stderr.count("\n") == 1
