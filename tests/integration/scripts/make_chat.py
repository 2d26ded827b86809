"""A small checkpoint with a tokenizer of bytes and a chat template, as `transformers serve` needs it."""

import sys

import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import fla_longhorn  # noqa: F401  registers the model

folder, model_type = sys.argv[1:]
tokenizer = byte_tokenizer('<pad>', '<eos>', pad_token='<pad>', eos_token='<eos>')
tokenizer.chat_template = '{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: '
tokenizer.save_pretrained(folder)

torch.manual_seed(0)
swapped = {} if model_type == 'longhorn' else {'attn_mode': 'longhorn', 'num_heads': 2}
config = AutoConfig.for_model(
    model_type, hidden_size=32, num_hidden_layers=2, vocab_size=258, pad_token_id=256, bos_token_id=None, eos_token_id=257,
    initializer_range=0.5, **swapped,
)
model = AutoModelForCausalLM.from_config(config)
# random weights of the default size repeat the last token, whatever the state
with torch.no_grad():
    for name, value in model.named_parameters():
        if name.endswith('_proj.weight'):
            value.mul_(4)
    # only characters of one byte, as servers hold the bytes of others back until they are whole
    model.get_output_embeddings().weight[128:256] = 0
model.save_pretrained(folder)
