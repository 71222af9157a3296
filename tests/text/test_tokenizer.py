"""Tokenizers in Gemma's style and byte-level BPE, trained here; the library's own decode is the oracle."""

import json

import pytest
import transformers
from tokenizers import processors

from paceline.errors import LoadError, PromptError
from paceline.text.tokenizer import Tokenizer
from text.tiny_tokenizers import CONFIG, byte_level, gemma_style

TEXTS = ["def parse(text):\n    return x", "  two  spaces ", "", "\n\n", "naïve café", "日本語 and 한국어", "😀🇨🇭👩‍💻 ok",
         "tab\tand ▁ itself", "<|turn>user\nhi<turn|>", "�", "a<0x41>b"]  # fmt: skip


@pytest.fixture(params=[gemma_style, byte_level], scope="module")
def tokenizer(request):
    return Tokenizer(request.param(), CONFIG)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_the_library_agree(tokenizer, text):
    ids = tokenizer.encode(text, add_bos=False)
    plain = text.replace("<|turn>", "").replace("<turn|>", "")
    if "▁" not in text:  # Gemma's normalizer makes it a space
        assert tokenizer.decode(ids) == plain
        assert tokenizer.decode(ids, skip_special=False) == text
    if "<0x41>" not in text:
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


def test_bos_once(tokenizer):
    bos = tokenizer.bos_id
    assert tokenizer.encode("def")[0] == bos
    assert tokenizer.encode("<bos>def").count(bos) == 1
    assert tokenizer.encode("") == [bos]
    assert bos not in tokenizer.encode("def", add_bos=False)
    assert tokenizer.encode("<|turn>user")[1] == tokenizer.token_id("<|turn>")


def test_special_and_added_tokens():
    tokenizer = Tokenizer(gemma_style(), CONFIG)
    plain = tokenizer.token_id("[plain]")
    assert plain == tokenizer.vocab_size - 1
    assert tokenizer.decode([plain]) == "[plain]"
    assert tokenizer.special_ids == frozenset(range(6))
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer.token_text(4) == "<|turn>"
    assert tokenizer.token_text(6 + 0xE2) == "�"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    """Padded vocabularies have rows without a token."""
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 99, -1]) == ""


def test_broken_bytes_do_not_break(tokenizer):
    ids = [tokenizer.token_id("<0xE2>"), tokenizer.token_id("<0x82>")]
    if None not in ids:  # each byte, as the library has it
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == "��"
        assert tokenizer.decode([*ids, *tokenizer.encode("x", add_bos=False)]) == "��x"


def test_a_lone_surrogate_is_the_users_error(tokenizer):
    with pytest.raises(PromptError, match="surrogate"):
        tokenizer.encode("\ud800")


def write(folder, backend, **files):
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return Tokenizer.load(folder)


def test_load_reads_what_stands_beside(tmp_path):
    tokenizer = write(
        tmp_path, gemma_style(), tokenizer_config={**CONFIG, "extra_special_tokens": {"eot_token": "<turn|>"}},
        config={"eos_token_id": 1, "text_config": {"eos_token_id": 3}}, generation_config={"eos_token_id": [1, 5]},
    )  # fmt: skip
    assert tokenizer.eos_ids == (1, 5)
    assert tokenizer.special_tokens["eot_token"] == "<turn|>"
    assert tokenizer.adds_bos
    assert tokenizer.template is None


def begins_with_bos():
    return processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)])


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("processor", [begins_with_bos, lambda: processors.ByteLevel(trim_offsets=False)])
def test_bos_is_that_of_transformers(said, processor, tmp_path):
    """SmolLM2 and Qwen name a BOS that no text begins with."""
    backend = byte_level()
    assert backend.token_to_id("<bos>") == 2
    backend.post_processor = processor()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    mine = write(
        tmp_path, backend, tokenizer_config=config | ({} if said is None else {"add_bos_token": said})
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(x):", "<bos>a", ""):
        expected = theirs(text).input_ids
        assert mine.encode(text) == (expected[1:] if expected[:2] == [2, 2] else expected)  # never twice


@pytest.mark.parametrize(
    ("make", "config", "adds"),
    [
        (gemma_style, {"bos_token": "<bos>"}, True),  # Gemma is lost without one
        (byte_level, {"bos_token": "<bos>"}, False),
        (gemma_style, {"bos_token": "<bos>", "add_bos_token": False}, False),
        (byte_level, {"bos_token": "<bos>", "add_bos_token": True}, True),
        (gemma_style, {"add_bos_token": True}, False),
    ],
)
def test_bos_where_tokenizer_json_says_nothing(make, config, adds, tmp_path):
    assert write(tmp_path, make(), tokenizer_config=config).adds_bos == adds


def test_a_tokenizer_json_that_leaves_bos_to_the_template(tmp_path):
    """As transformers 5 saves that of Gemma 4."""
    backend = gemma_style()
    backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    tokenizer = write(tmp_path, backend, tokenizer_config={"bos_token": "<bos>"})
    assert tokenizer.encode("def") == [2, *tokenizer.encode("def", add_bos=False)]


def test_end_ids_fall_back(tmp_path):
    assert write(tmp_path, gemma_style(), config={"text_config": {"eos_token_id": [5]}}).eos_ids == (5,)
    assert write(tmp_path, gemma_style(), config={"eos_token_id": 3}, tokenizer_config=CONFIG).eos_ids == (
        3,
        1,
    )


@pytest.mark.parametrize("form", ["file", "config", "list"])
def test_chat_template_sources(tmp_path, form):
    config = dict(CONFIG)
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text("T")
        config["chat_template"] = "other"
    else:
        named = [{"name": "x", "template": "no"}, {"name": "default", "template": "T"}]
        config["chat_template"] = "T" if form == "config" else named
    assert write(tmp_path, gemma_style(), tokenizer_config=config).template == "T"


def test_missing_and_corrupt_files_say_the_next_step(tmp_path):
    with pytest.raises(LoadError, match=r"has no tokenizer.json: copy it there"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(LoadError, match=r"cannot be read as a tokenizer .*download it again"):
        Tokenizer.load(tmp_path)
    gemma_style().save(str(tmp_path / "tokenizer.json"))
    for text in ("{nonsense", "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(LoadError, match=r"tokenizer_config.json .*download it again"):
            Tokenizer.load(tmp_path)


def test_startup_is_light():
    import subprocess
    import sys

    heavy = "torch', 'transformers', 'scipy', 'huggingface_hub"
    code = f"import sys, paceline.text.tokenizer, paceline.text.stream; assert not {{'{heavy}'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("make", [gemma_style, byte_level])
def test_truncation_and_padding_of_the_file_are_switched_off(make, tmp_path):
    """Files that were saved after training hold both; transformers switches them off, too."""
    text = "def parse(text):\n    return text.split()"
    expected = Tokenizer(make(), CONFIG).encode(text)
    for length, long in ((4, text), (64, "def")):
        backend = make()
        backend.enable_truncation(4)
        backend.enable_padding(length=length, pad_id=0)
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode(text) == expected
        assert tokenizer.pad_id is None
        assert 0 not in tokenizer.encode(long)
