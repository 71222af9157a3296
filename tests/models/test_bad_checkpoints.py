"""Every way a checkpoint can be wrong ends in one clear line with a next step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_assistant, build_target
from paceline.errors import ConfigError, PairError, WeightsError
from paceline.models.registry import inspect, load_assistant, load_target

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    build_target("e2b", root / "target")
    build_assistant("e2b", root / "assistant", ordered=True)
    return root


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made / "target", tmp_path / "target"))


def set_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            raw.pop(name)
        else:
            raw[name] = value
    path.write_text(json.dumps(raw))


def set_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_refused(folder: Path, kind: type[Exception], words: str) -> None:
    """Loading and inspecting both say `words`, in one line."""
    with pytest.raises(kind, match=words) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)
    assert any(re.search(words, line) for line in inspect(folder).unsupported)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma4_txt"}, "did you mean 'gemma4_text'"),
        ({"model_type": "falcon"}, "unknown as a target: paceline runs gemma4_text"),
        ({"model_type": ...}, "no model_type"),
        ({"model_type": "gemma4"}, "no text_config"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"head_dim": ...}, "lacks head_dim"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"layer_types": ["full_attention"] * 5}, "must name 6 layers"),
        ({"layer_types": [["full_attention"]] * 6}, "must name 6 layers"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "last of layer_types"),
        ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, "layer kind without K/V"),
        ({"use_bidirectional_attention": "all"}, "read causally"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
        ({"global_head_dim": 64}, "remove the wrong one"),
        ({"per_layer_config": {"9": {}}}, "layer numbers below 6"),
        ({"per_layer_config": {"2": {"skip": ["mlp"]}}}, "overrides skip in layer 2"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "shares the K/V of layer 2"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"enable_moe_block": True}, "lacks num_experts"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "no entry for sliding_attention"),
        ({"rope_parameters": {k: {"rope_type": "yarn", "rope_theta": 1e4} for k in
          ("full_attention", "sliding_attention")}}, "'yarn' is not supported"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0"),
    ],
)  # fmt: skip
def test_config(folder, changes, words):
    set_config(folder, **changes)
    assert_refused(folder, ConfigError, words)


def test_eos_outside_the_vocabulary(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert_refused(folder, ConfigError, "eos_token_id=.*vocabulary of 96")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_config_is_no_json(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json (is not readable JSON|does not hold)"):
        load_target(folder)
    assert inspect(folder).role == "unknown"


def test_no_folder_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.json: give a model folder"):
        load_target(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NAME), r"1 missing \(layers.0.mlp.up_proj.weight\)"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}), "1 that it does not describe"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}), "layers.9.mlp.up_proj"),
        (
            lambda t: t.update({NAME: torch.zeros(3, 48)}),
            r"shape \[3, 48\] where config.json needs \[64, 48\]",
        ),
        (lambda t: t.update({NAME: t[NAME].double()}), "has dtype F64, not one of F32, BF16, F16"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), "has dtype I8"),
        (
            lambda t: t.update({NAME.replace("model", "model.language_model", 1): t[NAME].clone()}),
            "is there twice",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(96, 48)}), "ties lm_head .* differ"),
        (lambda t: [t.pop(n) for n in list(t)], r"missing \(layers.0.input_layernorm.weight, .*\.\.\.\)"),
    ],
)
def test_tensors(folder, change, words):
    set_tensors(folder, change)
    assert_refused(folder, WeightsError, words)


def test_skipped_by_name_and_said_so(folder):
    """Towers, K/V of layers that share another's, and a tied copy of the head load as nothing."""
    alone = load_target(folder)

    def add(tensors):
        tensors["model.vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight"] = torch.zeros(4)
        tensors["model.embed_audio.embedding_projection.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.full((3,), float("nan"))

    set_tensors(folder, add)
    target = load_target(folder)
    assert len(target.skipped) == 6
    assert torch.equal(target.layers[5].down.data, alone.layers[5].down.data)
    about = inspect(folder)
    assert not about.unsupported
    assert about.skipped == {"K/V of layers that share another's": 48, "vision_tower": 16, "embed_audio": 8}


def test_shared_kv_is_not_skipped_where_the_layer_owns_it(folder):
    set_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.v_norm.weight": torch.zeros(3)}))
    assert_refused(folder, WeightsError, "layers.0.self_attn.v_norm")


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: dict | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(folder, WeightsError, "corrupt or truncated .*: download it again")


def test_trailing_bytes(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert_refused(folder, WeightsError, "bytes of data where the header describes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update(data_offsets=[0, 4]), "takes 4 bytes where its shape needs"),
        (lambda e: e.update(data_offsets=[-4, 4]), "not whole numbers"),
        (lambda e: e.update(data_offsets=[0]), "not whole numbers"),
        (lambda e: e.update(shape=[2**70, 0.5]), "not whole numbers"),
        (lambda e: e.update(shape=[2**70, 2**70]), "where its shape needs"),
        (lambda e: e.update(dtype="F4"), "unknown dtype 'F4'"),
        (lambda e: e.update(dtype=["F32"]), "unknown dtype"),
        (
            lambda e: e.update(data_offsets=[o + 4 for o in e["data_offsets"]]),
            "leaves a hole before it|overlaps",
        ),
        (
            lambda e: e.update(data_offsets=[o - 4 for o in e["data_offsets"]]),
            "leaves a hole before it|overlaps",
        ),
    ],
)
def test_header_entries(folder, change, words):
    path = folder / "model.safetensors"
    header, data = header_of(path)
    change(header[NAME])
    write(path, header, data)
    assert_refused(folder, WeightsError, words)


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xff", b"[" * 100_000, b'{"a": 1}', b"9" * 5000])
def test_header_is_no_header(folder, header):
    path = folder / "model.safetensors"
    write(path, header, b"")
    assert_refused(folder, WeightsError, "corrupt or truncated")


def test_same_name_twice_in_one_header(folder):
    path = folder / "model.safetensors"
    header, data = header_of(path)
    text = json.dumps(header)
    write(path, (text[:-1] + f', "{NAME}": {json.dumps(header[NAME])}}}').encode(), data)
    assert_refused(folder, WeightsError, "holds the tensor .* twice")


def shard(folder: Path) -> dict[str, str]:
    """Split the single file in two with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    return {n: file for file, part in parts.items() for n in part}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded(folder):
    whole = load_target(folder)
    write_index(folder, shard(folder))
    parts = load_target(folder)
    assert all(torch.equal(a.up.data, b.up.data) for a, b in zip(whole.layers, parts.layers))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda names: names | {NAME: "c.safetensors"}, "c.safetensors is named in the index but missing"),
        (lambda names: names | {n: "b.safetensors" for n in [NAME] if names[n] == "a.safetensors"}
         | {n: "a.safetensors" for n in [NAME] if names[n] == "b.safetensors"}, "where it is not"),
        (lambda names: names | {NAME: "../a.safetensors"}, "does not name safetensors files beside it"),
        (lambda names: names | {NAME: "a.bin"}, "does not name safetensors files beside it"),
        (lambda names: list(names), "does not name safetensors files"),
    ],
)  # fmt: skip
def test_wrong_index(folder, change, words):
    write_index(folder, change(shard(folder)))
    assert_refused(folder, WeightsError, words)


def test_shards_without_index(folder):
    shard(folder)
    assert_refused(folder, WeightsError, "has 2 safetensors files and no model.safetensors.index.json")


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_unopened(folder, pickle):
    (folder / "model.safetensors").unlink()
    assert_refused(folder, WeightsError, "has no .safetensors file")
    (folder / pickle).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert_refused(folder, WeightsError, f"only pickled weights .{pickle}.*save_pretrained")


def test_remote_code_is_never_run(folder, tmp_path):
    touched = tmp_path / "touched"
    (folder / "modeling.py").write_text(f"open({str(touched)!r}, 'w')")
    set_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    load_target(folder)
    assert not touched.exists()


# -- pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": 64}, "hidden size 64 against 48"),
        ({"vocab_size": 108}, "vocabulary 108 against 96"),
        ({"num_key_value_heads": 2}, "2 K/V heads of size 16 against 1 of 16"),
        ({"global_head_dim": 64}, "full_attention with 1 K/V heads of size 64 against 1 of 32"),
        ({"sliding_window": 9}, "sliding window 9 against 8"),
    ],
)
def test_drafter_of_another_target(made, tmp_path, changes, words):
    build_assistant("e2b", tmp_path, **changes)
    target = load_target(made / "target")
    with pytest.raises(PairError, match=words) as caught:
        load_assistant(tmp_path, target)
    assert str(tmp_path) in str(caught.value)
    assert str(made / "target") in str(caught.value)
    assert any(re.search(words, line) for line in inspect(tmp_path, target=made / "target").unsupported)
    assert not inspect(tmp_path).unsupported


def test_drafter_that_reads_layers_the_target_lacks(tmp_path):
    build_target("dense", tmp_path / "t", layer_types=["full_attention"] * 6)
    build_assistant("dense", tmp_path / "a")
    with pytest.raises(PairError, match="reads sliding_attention layers, of which the target has none"):
        load_assistant(tmp_path / "a", load_target(tmp_path / "t"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_centroids": 7}, "do not divide a vocabulary"),
        ({"centroid_intermediate_top_k": 13}, "13 of them active"),
        ({"backbone_hidden_size": ...}, "lacks backbone_hidden_size"),
        ({"model_type": "gemma4_text"}, "is a target, not an MTP drafter"),
        ({"model_type": "gemma4_asistant"}, "did you mean 'gemma4_assistant'"),
    ],
)
def test_drafter_config(made, tmp_path, changes, words):
    folder = Path(shutil.copytree(made / "assistant", tmp_path / "a"))
    set_config(folder, **changes)
    with pytest.raises(ConfigError, match=words):
        load_assistant(folder, load_target(made / "target"))


@pytest.mark.parametrize("value", [0, 10_000, -1])
def test_token_ordering_must_be_a_permutation(made, tmp_path, value):
    folder = Path(shutil.copytree(made / "assistant", tmp_path / "a"))
    set_tensors(folder, lambda t: t["masked_embedding.token_ordering"].fill_(value))
    with pytest.raises(WeightsError, match="does not name every token once"):
        load_assistant(folder, load_target(made / "target"))


def test_drafter_given_as_target(made):
    with pytest.raises(ConfigError, match="is an MTP drafter, not a target: give it as the drafter"):
        load_target(made / "assistant")
