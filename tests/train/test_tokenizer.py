from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from ebbtide.platform.errors import ConfigError, DataError, NotFound
from ebbtide.train.tokenizer import EOS_TOKEN, TextTokenizer, load_tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat\n" * 20, "def the(cat):\n    return mat\n" * 20]
TRAINED = train_tokenizer(TEXTS, 275)


def save(tokenizer: TextTokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in tokenizer.files.items():
        (folder / name).write_bytes(data)
    return folder


@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    (ids,) = TRAINED.encode([text])
    assert TRAINED.tokenizer.decode(ids) == text


def test_training_again_gives_the_same_bytes() -> None:
    assert train_tokenizer(TEXTS, 275).files == TRAINED.files
    assert train_tokenizer(iter(TEXTS), 270).files != TRAINED.files


def test_size() -> None:
    assert TRAINED.vocab_size == 275
    assert train_tokenizer(["ab"], 5000).vocab_size < 275
    with pytest.raises(ConfigError, match="257"):
        train_tokenizer(TEXTS, 256)


def test_text_never_becomes_a_special_token() -> None:
    (ids,) = TRAINED.encode([f"a{EOS_TOKEN}b"])
    assert TRAINED.eos_id not in ids
    assert TRAINED.tokenizer.decode(ids) == f"a{EOS_TOKEN}b"


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(save(TRAINED, tmp_path / "made"))
    assert len(loaded) == TRAINED.vocab_size
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == TRAINED.eos_id
    text = "the cat , the\n\n  mat ."
    assert loaded(text)["input_ids"] == TRAINED.encode([text])[0]
    assert loaded.decode(TRAINED.encode([text])[0]) == text
    chat = [{"role": "user", "content": "hello"}]
    prompt = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: hello\nassistant:"


def test_a_given_tokenizer_is_kept_as_it_is(tmp_path: Path) -> None:
    folder = save(TRAINED, tmp_path / "given")
    for given_uri in (str(folder), str(folder / "tokenizer.json"), f"file://{folder}"):
        loaded = load_tokenizer(given_uri)
        assert loaded.files == TRAINED.files
        assert (loaded.vocab_size, loaded.eos_id) == (TRAINED.vocab_size, TRAINED.eos_id)
        assert loaded.encode(TEXTS) == TRAINED.encode(TEXTS)


def test_settings_and_template_beside_it_are_kept(tmp_path: Path) -> None:
    folder = save(TRAINED, tmp_path / "given")
    config = {"eos_token": {"content": "!"}, "model_max_length": 77, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    loaded = load_tokenizer(str(folder))
    kept = json.loads(loaded.files["tokenizer_config.json"])
    assert loaded.eos_id == TRAINED.tokenizer.token_to_id("!")
    assert kept["model_max_length"] == 77
    assert kept["bos_token"] == kept["pad_token"] == "!"
    assert "chat_template" not in kept
    assert loaded.files["chat_template.jinja"] == b"{{ messages }}"


def test_truncation_padding_and_added_tokens_of_a_given_one_do_not_touch_the_text(
    tmp_path: Path,
) -> None:
    from tokenizers.processors import TemplateProcessing

    other = Tokenizer.from_buffer(TRAINED.files["tokenizer.json"])
    other.enable_truncation(4)
    other.enable_padding(length=9)
    other.post_processor = TemplateProcessing(
        single=f"{EOS_TOKEN} $A", special_tokens=[(EOS_TOKEN, TRAINED.eos_id)]
    )
    other.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode(TEXTS) == TRAINED.encode(TEXTS)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "\0"])
def test_what_is_not_a_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="is not a Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_file_of_any_name_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"notes\.txt: is not a Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path / "notes.txt"))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"give a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_end_of_text_must_be_known(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(DataError, match="no end-of-text token; name it as eos_token"):
        load_tokenizer(str(tmp_path))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "b"}')
    with pytest.raises(DataError, match="eos_token 'b'"):
        load_tokenizer(str(tmp_path))
    config.write_text('{"eos_token": "a"}')
    assert load_tokenizer(str(tmp_path)).eos_id == 0
    config.write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is not valid"):
        load_tokenizer(str(tmp_path))
