"""What people have on disk: each folder, whole or damaged, is held to one line. The list grows with each report.

Three tables: PUBLISHED (tests/published.py) are the layouts that are published, REFUSED and ACCEPTED what people make of
them. A report of a file that does not load becomes a row: a maker, and the line that its owner should read.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from layouts import PAGE, POINTER, edit, fifo, model, write
from paceline import LLM
from paceline.checkpoints.loading import read_entries
from paceline.cli import main
from paceline.errors import LoadError, PacelineError
from paceline.hub.resolve import resolve
from published import PROMPT, PUBLISHED

Change = Callable[[Path], object]
SHARD = "model-00001-of-00002.safetensors"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "google/gemma-4-E2B-it", "r": 8}


def info(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "info", "--no-measure", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("layout", PUBLISHED)
def test_a_published_layout_is_described_and_writes_what_transformers_writes(
    layout, tmp_path, monkeypatch, capsys
):
    make, line, drafter = PUBLISHED[layout]
    made = make(tmp_path / "gemma-4-it")
    more = ["--adapter", made.options["adapter"]] if made.options else []
    assert info(monkeypatch, str(made.path), *more) == 0
    out = capsys.readouterr().out
    assert line in out
    assert f"drafter      {drafter}: " in out
    greedy = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    texts = []
    for kind in ("auto", "none"):
        options = made.options | {
            "drafter": kind,
            "draft_tokens": 3,
            "dtype": "float32",
            "max_model_len": 64,
            "activations": "float32",
        }
        with LLM(made.path, **options) as llm:
            assert llm.info["drafter"] == (drafter if kind == "auto" else "none")
            (one,) = llm.generate([PROMPT], **greedy)
        texts.append(list(one.token_ids))
        assert bool(one.stats.drafted) == (kind == "auto")
    assert texts[0] == texts[1]
    if made.theirs is not None:
        (want,) = made.theirs.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
        assert texts[0] == want[len(PROMPT) :].tolist()


def only(folder: Path, *names: str) -> None:
    """Leave nothing but `names` in the folder."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def vocabulary(folder: Path, number: int) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    write(folder / "tokenizer.json", text.replace('"id": 0,', f'"id": {number},', 1))


def cut(path: Path, size: int) -> None:
    write(path, path.read_bytes()[:size])


def header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a safetensors file anew with another header; its data stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    raw = json.loads(data[8 : 8 + length])
    change(raw)
    text = json.dumps(raw).encode()
    write(path, len(text).to_bytes(8, "little") + text + data[8 + length :])


def overlap(raw: dict[str, Any]) -> None:
    """Two tensors of one size in one place."""
    places = {str(one["shape"]): one for name, one in raw.items() if name != "__metadata__"}
    for name, one in raw.items():
        if name != "__metadata__":
            one["data_offsets"] = places[str(one["shape"])]["data_offsets"]


def index(change: Callable[[dict[str, str]], object]) -> Change:
    def make(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        change(raw["weight_map"])
        write(path, raw)

    return make


def folder_as(name: str) -> Change:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def other_tokenizer(folder: Path) -> None:
    """Of a larger vocabulary than the model's table has rows."""
    letters = {chr(0x4E00 + i): i for i in range(10_000)}
    Tokenizer(WordLevel(letters, unk_token="\u4e00")).save(str(folder / "tokenizer.json"))


def whole_beside(folder: Path) -> None:
    """Somebody joined the parts, and left the index and one part."""
    tensors = {
        name: data for file in sorted(folder.glob("*.safetensors")) for name, data in load_file(file).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / SHARD).unlink()


def keep_adapter(folder: Path) -> None:
    only(folder, "tokenizer.json", "tokenizer_config.json")
    write(folder / "adapter_config.json", ADAPTER)
    write(folder / "adapter_model.safetensors", b"")


def gguf(path: Path, architecture: str) -> Path:
    """A file that says its architecture and nothing else."""
    key, value = b"general.architecture", architecture.encode()
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return write(path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=...)


def config(**changes: object) -> Change:
    return lambda folder: edit(folder / "config.json", **changes)


def put(name: str, content: object) -> Change:
    return lambda folder: write(folder / name, content)


REFUSED: list[tuple[str, Change, str]] = [
    # row 4: what is not the file it is named as
    ("lfs weights", put(SHARD, POINTER), f"{SHARD} is a Git LFS pointer, not the file itself: run `git lfs pull`"),
    ("lfs tokenizer", put("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    ("lfs index", put("model.safetensors.index.json", POINTER), "index.json is a Git LFS pointer"),
    ("page as weights", put(SHARD, PAGE), f"{SHARD} is a web page (a login or error page"),
    ("page as config", put("config.json", PAGE), "config.json is a web page"),
    ("page as tokenizer", put("tokenizer.json", PAGE), "tokenizer.json is a web page"),
    # what is cut short, or written wrong
    ("truncated weights", lambda f: cut(f / SHARD, 100_000), f"{SHARD} is corrupt or truncated ("),
    ("truncated header", lambda f: cut(f / SHARD, 50), f"{SHARD} is corrupt or truncated ("),
    ("truncated config", lambda f: cut(f / "config.json", 100), "config.json is not readable JSON"),
    ("truncated tokenizer", lambda f: cut(f / "tokenizer.json", 5000), "tokenizer.json cannot be read as a tokenizer"),
    ("empty config", put("config.json", ""), "config.json is not readable JSON"),
    ("empty tokenizer", put("tokenizer.json", ""), "tokenizer.json cannot be read as a tokenizer"),
    ("empty weights", put(SHARD, b""), f"{SHARD} is corrupt or truncated (it has 0 bytes"),
    ("empty index", put("model.safetensors.index.json", "{}"), "its weight_map does not name safetensors files"),
    ("overlapping tensors", lambda f: header(f / SHARD, overlap), f"{SHARD} is corrupt or truncated ("),
    ("negative offsets", lambda f: header(f / SHARD, lambda raw: [one.update(data_offsets=[-2, 0]) for name, one in
     raw.items() if name != "__metadata__"]), "are not whole numbers): download it again"),
    ("index that leads out", index(lambda m: m.update(dict.fromkeys(m, "../other.safetensors"))),
     "its weight_map does not name safetensors files beside it"),
    ("index that leads elsewhere", index(lambda m: m.update(dict.fromkeys(m, "/etc/x.safetensors"))),
     "its weight_map does not name safetensors files beside it"),
    ("index of another model", index(lambda m: m.update({"model.layers.99.x": SHARD})),
     f"puts model.layers.99.x into {SHARD}, where it is not: download both again"),
    # row 5: an adapter's folder
    ("adapter", keep_adapter, "is an adapter for google/gemma-4-E2B-it, not a whole model"),
    ("adapter of many lines", lambda f: (keep_adapter(f), write(
        f / "adapter_config.json", {"base_model_name_or_path": "a\nb " * 5000})), "is an adapter for a b a b"),
    # row 10: text side
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json: copy it there"),
    ("broken tokenizer", put("tokenizer.json", "{"), "tokenizer.json cannot be read as a tokenizer"),
    ("broken template", put("chat_template.jinja", "{% for %}"), "the model's chat template cannot be read"),
    ("template in latin-1", put("chat_template.jinja", b"\xe9"), "chat_template.jinja is not UTF-8 text"),
    # row 12: other models, and misspellings
    ("gemma 1", config(model_type="gemma"), "model_type 'gemma' is Gemma 1, which paceline does not run"),
    ("gemma 3n", config(model_type="gemma3n"), "is Gemma 3n, which paceline does not run"),
    ("gemma 5", config(model_type="gemma5_text"), "model_type 'gemma5_text' is unknown as a target: paceline runs"),
    ("misspelt", config(model_type="gemma4_txt"), "did you mean 'gemma4_text'?"),
    ("long type", config(model_type="x" * 10**6), "xxx... is unknown as a target"),
    # row 18: downloads that were interrupted
    ("no weights yet", lambda f: [p.unlink() for p in f.glob("*.safetensors")] and [
        (f / "model.safetensors.index.json").unlink(), write(f / ".cache/huggingface/download/x.incomplete", b"")],
     "has no .safetensors file: the download is not complete"),
    ("one shard", lambda f: (f / SHARD).unlink(), "is named in the index but missing: the download is not complete"),
    ("nothing yet", lambda f: (only(f), write(f / ".cache/huggingface/download/config.json.incomplete", b"")),
     "the download is not complete: run `hf download` again"),
    # other folders
    ("gguf", lambda f: (only(f), write(f / "gemma-Q4_K_M.gguf", b"GGUF")), "it has only 4 bytes"),
    ("vision part alone", lambda f: (only(f), gguf(f / "mmproj-gemma.gguf", "clip")),
     "mmproj-gemma.gguf is the vision part of a model, which paceline does not run: give the GGUF file of the language"),
    ("gguf of another kind", lambda f: (only(f), gguf(f / "x-Q4_K_M.gguf", "mamba")),
     "has the architecture 'mamba', which paceline does not run: give a GGUF file of llama"),
    ("a later part alone", lambda f: (only(f), write(f / "x-00002-of-00003.gguf", b"GGUF")),
     "x-00002-of-00003.gguf is a part of 3, and x-00001-of-00003.gguf is missing: download it too"),
    ("a part missing", lambda f: (only(f), write(f / "x-00001-of-00002.gguf", b"GGUF")),
     "is a part of 2, and x-00002-of-00002.gguf is missing: download it too"),
    ("pickles", lambda f: (only(f), write(f / "pytorch_model.bin", b"")), "has pickled weights (pytorch_model.bin)"),
    ("weights alone", lambda f: (f / "config.json").unlink(), "but has no config.json: copy it there"),
    ("a level too high", lambda f: (only(f), model(f / "gemma")), "but its folder gemma has: give"),
    ("empty", lambda f: only(f), "has no config.json: give a model folder in Hugging Face layout"),
    # row 26: drafters of other engines
    ("eagle-3", config(model_type="llama", architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000),
     "eagle3: global_head_dim=128 is not known to this version"),
    ("eagle-3 of speculators", config(model_type=..., speculators_model_type="eagle3"),
     "eagle3: config.json has no transformer_layer_config"),
    ("dflash", config(model_type="qwen3", architectures=["DFlashDraftModel"], dflash_config={}),
     "dflash: global_head_dim=128 is not known to this version"),
    ("dflash 2", config(model_type="qwen3", architectures=["DFlash2DraftModel"], dflash_config={}),
     "dflash2: global_head_dim=128 is not known to this version"),
    ("dspark", config(model_type="qwen3", architectures=["Qwen3DSparkModel"]),
     "dspark: global_head_dim=128 is not known to this version"),
    ("p-eagle", config(model_type=..., speculators_model_type="peagle"),
     "peagle: config.json has no transformer_layer_config"),
    ("qwen mtp", config(model_type="qwen3_next_mtp", architectures=["Qwen3NextMTP"]), "(MTP) head, which paceline"),
    ("broken sampling", put("generation_config.json", {"top_p": 7}), "generation_config.json: top_p is 7, not a number"),
    # M2 and L1: hostile
    ("1e12 layers", config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000, not a whole number"),
    ("1e30 window", config(sliding_window=1e30), "sliding_window is 1e+30, not a whole number"),
    ("10**30 window", config(sliding_window=10**30), "sliding_window is 1000000000000000000000000000000, not"),
    ("10**400 softcap", config(final_logit_softcapping=10**400), "config.json is not readable JSON (a number of 401"),
    ("NaN softcap", config(final_logit_softcapping=float("nan")), "final_logit_softcapping is nan, not a number"),
    ("NaN epsilon", config(rms_norm_eps=float("nan")), "rms_norm_eps is nan, not a number"),
    ("huge vocabulary", config(vocab_size=2**40), "vocab_size is 1099511627776, not a whole number"),
    ("huge heads", config(num_attention_heads=2**40, num_key_value_heads=1), "num_attention_heads is 1099511627776"),
    ("deep config", put("config.json", "[" * 10**6), "config.json is not readable JSON"),
    ("deep index", put("model.safetensors.index.json", "[" * 10**6), "index.json is not readable JSON"),
    ("list as config", put("config.json", "[]"), "config.json does not hold a JSON object"),
    ("latin-1 config", put("config.json", b'{"model_type": "\xe9"}'), "config.json is not UTF-8 text"),
    ("fifo as config", lambda f: fifo(f / "config.json"), "config.json is a pipe, socket or device, not a file"),
    ("fifo as weights", lambda f: fifo(f / SHARD), "is a pipe, socket or device"),
    ("fifo as template", lambda f: fifo(f / "chat_template.jinja"), "is a pipe, socket or device"),
    ("fifo as tokenizer", lambda f: fifo(f / "tokenizer.json"), "is a pipe, socket or device"),
    ("folder as config", lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "is a folder, not a"),
    ("link loop", lambda f: loop(f / "config.json"), "cannot read"),
    ("link loop of weights", lambda f: loop(f / SHARD), f"{SHARD} is named in the index but missing"),
    ("link loop of the tokenizer", lambda f: loop(f / "tokenizer.json"), "cannot read"),
    ("folder as weights", folder_as(SHARD), f"{SHARD} is a folder, not a file"),
    ("folder as template", folder_as("chat_template.jinja"), "chat_template.jinja is a folder, not a file"),
    ("folder as index", folder_as("model.safetensors.index.json"), "2 safetensors files and no model.safetensors"),
    ("fifo as generation_config", lambda f: fifo(f / "generation_config.json"), "is a pipe, socket or device"),
    ("fifo as gguf", lambda f: (only(f), fifo(f / "x.gguf")), "x.gguf is a pipe, socket or device"),
    ("folder as gguf", lambda f: (only(f), (f / "x.gguf").mkdir()), "has no config.json: give a model folder"),
    ("dangling link", lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("gone")),
     "config.json is a link to a file that is gone"),
    ("id of 2^31-1", lambda f: vocabulary(f, 2**31 - 1), "has a token with the id 2147483647"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_in_one_line(change, line, tmp_path, monkeypatch, capsys):
    folder = model(tmp_path / "gemma")
    change(folder)
    assert info(monkeypatch, str(folder)) == 3
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert len(err) < 800


ACCEPTED: list[tuple[str, Change, str]] = [
    # row 7: an adapter is no shard
    ("adapter beside one file", lambda f: write(f / "adapter_model.safetensors", b"junk"), "8,192 tokens"),
    ("another model's tokenizer", other_tokenizer,
     "10,000 tokens for a model of 8,192: this tokenizer seems to be another model's, take the one from"),
    # row 17: byte order marks
    ("BOM in config", lambda f: write(f / "config.json", b"\xef\xbb\xbf" + (f / "config.json").read_bytes()), "gemma4"),
    ("BOM in tokenizer", lambda f: write(
        f / "tokenizer.json", b"\xef\xbb\xbf" + (f / "tokenizer.json").read_bytes()), "tokenizer    8,192 tokens"),
    ("BOM in index", lambda f: write(f / "model.safetensors.index.json", b"\xef\xbb\xbf" + (
        f / "model.safetensors.index.json").read_bytes()), "8,192 tokens"),
    ("blank template", put("chat_template.jinja", " \n"), "template     none: this model takes prompts"),
    ("an assistant with an endless name", config(assistant_model="x" * 5000), "no gemma-assistant beside the target"),
    ("BOM in template", lambda f: write(f / "chat_template.jinja", b"\xef\xbb\xbfhello"), "template     5 characters"),
    # row 23: where older files keep the template
    ("chat_template.json", lambda f: (no_template(f), write(
        f / "chat_template.json", {"chat_template": "1234567"})), "template     7 characters"),
    ("processor_config.json", lambda f: (no_template(f), write(
        f / "processor_config.json", {"chat_template": {"default": "123456789"}})), "template     9 characters"),
    ("no template", lambda f: no_template(f), "template     none: this model takes prompts"),
    # row 22: what the makers suggest is shown
    ("generation_config", put("generation_config.json", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
     "sampling     temperature 1, top_k 64, top_p 0.95, where a request says nothing else"),
    # C20: transformers takes the whole file, whatever lies beside it
    ("a whole file beside a left-over index", whole_beside, "weights  "),
    # P3: under auto an assistant that cannot be used is left out, and said
    ("half an assistant", lambda f: write(f.parent / "gemma-assistant/config.json", {"model_type": "gemma4_assistant"}),
     "ngram: the drafter beside the target cannot be used"),
    ("assistant without weights", lambda f: [p.unlink() for p in model(
        f.parent / "gemma-assistant", "assistant").glob("*.safetensors")], "has no .safetensors file"),
    ("foreign assistant", lambda f: edit(model(f.parent / "gemma-assistant", "assistant") / "config.json",
                                         backbone_hidden_size=8), "cannot be used"),
    ("empty folder named gguf", folder_as("x.gguf"), "gemma4"),
    ("its own assistant", lambda f: model(f.parent / "gemma-assistant", "assistant"), "lies beside the target"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_accepted_and_said(change, line, tmp_path, monkeypatch, capsys):
    folder = model(tmp_path / "gemma")
    change(folder)
    assert info(monkeypatch, str(folder)) == 0
    assert line in capsys.readouterr().out


def test_one_shard_and_an_adapter_without_an_index(tmp_path):
    folder = model(tmp_path / "gemma")
    (folder / "model.safetensors.index.json").unlink()
    (folder / SHARD).unlink()
    write(folder / "adapter_model.safetensors", b"junk")
    assert read_entries(folder)  # of the one shard that is left


def test_a_folder_is_named_in_many_ways(tmp_path, monkeypatch, capsys):
    """Row 3: `.`, `..`, a link, `~` and a trailing slash are the same folder."""
    folder = model(tmp_path / "gemma")
    model(tmp_path / "gemma-assistant", "assistant")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    for name in (".", "./", "../gemma", str(folder) + "/", "~/gemma"):
        assert resolve(name, "target") == folder
        assert info(monkeypatch, name) == 0
        assert "gemma-assistant lies beside the target" in capsys.readouterr().out
    assert info(monkeypatch, "../link") == 0
    assert info(monkeypatch, "/") == 3
    assert "/ has no config.json" in capsys.readouterr().err


def test_a_cache_folder_is_its_snapshot(tmp_path):
    """Row 18: `models--org--name` itself is opened; an unfinished one is reported as that."""
    repository = tmp_path / "models--google--gemma-4-E2B-it"
    model(repository / "snapshots" / "abc")
    newer = model(repository / "snapshots" / "def")
    os.utime(newer / "config.json", (2**31, 2**31))
    assert resolve(repository, "target") == newer
    write(repository / "refs" / "main", "abc\n")
    assert resolve(repository, "target").name == "abc"
    assert resolve(repository / "snapshots", "target").name == "abc"
    unfinished = tmp_path / "models--org--name"
    write(unfinished / "blobs" / "x.incomplete", b"")
    with pytest.raises(LoadError, match="the download is not complete, run `hf download org/name`"):
        resolve(unfinished, "target")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x.bin", "is a pickle, which can run code"),
        ("x.safetensors", "is a Git LFS pointer"),
        ("x.txt", "is a file: give the model folder"),
    ],
)
def test_a_file_in_the_place_of_a_folder(name, line, tmp_path):
    path = write(tmp_path / name, POINTER if name == "x.safetensors" else "x")
    with pytest.raises(PacelineError, match=line):
        resolve(path, "target")


def test_a_folder_of_several_gguf_models(tmp_path, monkeypatch, capsys):
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-x.gguf"):
        gguf(tmp_path / name, "llama")
    assert info(monkeypatch, str(tmp_path)) == 2
    line = "holds 2 GGUF models (x-Q4_K_M.gguf, x-Q8_0.gguf, ...): give the path of one\n"
    assert capsys.readouterr().err.endswith(line)


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (mode & os.X_OK and Path(path) == tmp_path / "gemma")
    )
    with pytest.raises(LoadError, match=r"cannot read .*gemma \(Permission denied\): change its permissions"):
        resolve(model(tmp_path / "gemma"), "target")  # who runs the tests may be root, who may everything


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "gemma").symlink_to("gone")
    with pytest.raises(PacelineError, match="is a link that leads nowhere"):
        resolve(tmp_path / "gemma", "target")


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_target_as_argument_or_option(tmp_path, monkeypatch, capsys):
    """Row 20: `run X "prompt"`, `run --target X`, `info X`, `info --target X`."""
    folder = str(model(tmp_path / "gemma"))
    texts = []
    for args in ((folder, "def parse("), ("--target", folder, "def parse("), ("def parse(",)):
        assert (
            call(monkeypatch, "run", *args, "--no-chat", "-n", "4", "--no-native", "--drafter", "none") == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert call(monkeypatch, "run", folder, "def", "parse(") == 2
    assert "a prompt of several words in quotes" in capsys.readouterr().err
    assert info(monkeypatch, "--target", folder) == 0
    assert folder in capsys.readouterr().out
    assert info(monkeypatch, folder, "--target", folder) == 2
    assert "the target is given twice" in capsys.readouterr().err
    assert call(monkeypatch, "serve", folder, "--target", folder) == 2
    assert "the target is given twice" in capsys.readouterr().err
