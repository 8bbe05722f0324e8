"""A small model that has learned something, so that its choices are clear, and its export."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebbtide.platform import export_manifest
from ebbtide.platform.export_manifest import ExportManifest

MAX_MODEL_LEN = 256
SYMBOLS = "\U0001fae0\u9f9ce\u0301n\u0303"
"""A melting face (4 bytes), a turtle (3 bytes), and letters with combining marks (1 + 2 bytes)."""

_TRAIN_STEPS, _LENGTH = 120, 128


def corpus(seed: int) -> str:
    """Sentences with enough choice to be learned but not to be known by heart, and symbols."""
    draw = random.Random(seed)
    nouns = ["tide", "moon", "boat", "gull", "pier", "wave", "rope", "lamp", "crew", "sand"]
    verbs = ["lifts", "turns", "meets", "leaves", "finds", "holds"]
    lines = []
    for _ in range(3000):
        a, b, c = (draw.choice(nouns) for _ in range(3))
        lines.append(f"the {a} {draw.choice(verbs)} the {b} and the {c} {draw.choice(verbs)} it.")
        if draw.random() < 0.25:
            lines.append(f"{SYMBOLS} " * draw.randint(3, 8))
    return "\n".join(lines)


def _write_tokenizer(folder: Path) -> Any:
    """One token per byte: every character outside ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{byte: 1 + i for i, byte in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}the {% endif %}"
    )
    fast.save_pretrained(folder)
    return fast


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: on a busy machine more of them wait for each other, spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(text: str, tokenizer: Any) -> Any:
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=288,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=MAX_MODEL_LEN,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=0,
                tie_word_embeddings=True,
            )
        )
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for step in range(_TRAIN_STEPS):
            optimizer.param_groups[0]["lr"] = 6e-3 * min((step + 1) / 15, 1 - step / _TRAIN_STEPS)
            starts = torch.randint(0, len(tokens) - _LENGTH, (8,)).tolist()
            batch = torch.stack([tokens[start : start + _LENGTH] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert loss.item() < 0.6, "the model has not learned enough for its logits to differ"
    return model.eval()


def write_export(folder: Path) -> None:
    """The trained model as ``ebbtide export`` would write it."""
    model = _train(corpus(seed=0), _write_tokenizer(folder))
    model.save_pretrained(folder)
    _describe(folder, model)


def write_other(folder: Path, of: Path) -> None:
    """The export of a model that says other things."""
    shutil.copytree(of, folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.neg_()
    model.save_pretrained(folder)
    (folder / export_manifest.MANIFEST).unlink()
    _describe(folder, model)


def _describe(folder: Path, model: Any) -> None:
    manifest = ExportManifest(
        run="tide",
        step=_TRAIN_STEPS,
        dataset_sha256="0" * 64,
        dtype="fp32",
        parameters=model.num_parameters(),
        files=export_manifest.describe(folder, [path.name for path in folder.iterdir()]),
    )
    (folder / export_manifest.MANIFEST).write_bytes(export_manifest.to_bytes(manifest))
