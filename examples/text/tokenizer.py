"""Bytes as tokens: byte b is token b, and one more token ends a text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({characters[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = AddedToken('<|end|>', special=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
