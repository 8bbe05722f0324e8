"""A model of 3 million parameters without any training, and a tokenizer with a token per byte."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebbtide.platform import export_manifest
from ebbtide.platform.export_manifest import ExportManifest

MAX_MODEL_LEN = 4096


def write_model(folder: Path) -> None:
    """Write an export with its manifest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{byte: 1 + i for i, byte in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,  # no token that the tokenizer does not know
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=MAX_MODEL_LEN,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    manifest = ExportManifest(
        run="bench",
        step=0,
        dataset_sha256="0" * 64,
        dtype="fp32",
        parameters=model.num_parameters(),
        files=export_manifest.describe(folder, [path.name for path in folder.iterdir()]),
    )
    (folder / export_manifest.MANIFEST).write_bytes(export_manifest.to_bytes(manifest))
