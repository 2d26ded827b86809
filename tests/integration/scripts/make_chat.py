"""A small checkpoint with a tokenizer of bytes and a chat template, as `transformers serve` needs it."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

folder, model_type = sys.argv[1:]
alphabet = ['<pad>', '<eos>', *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytes_alone = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bytes_alone.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, pad_token='<pad>', eos_token='<eos>')
tokenizer.chat_template = '{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: '
tokenizer.save_pretrained(folder)

torch.manual_seed(0)
swapped = {} if model_type == 'longhorn' else {'attn_mode': 'longhorn', 'num_heads': 2}
config = AutoConfig.for_model(
    model_type, hidden_size=32, num_hidden_layers=2, vocab_size=len(alphabet), pad_token_id=0, bos_token_id=None,
    eos_token_id=1, initializer_range=0.5, **swapped,
)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
