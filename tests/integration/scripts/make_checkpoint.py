"""A byte-level language model, trained for a moment on real text, with its tokenizer and a task for lm_eval.

Arguments: a folder and a device. Prints what lm_eval must find, as JSON.
"""

import ast
import json
import math
import random
import sys
import textwrap
from pathlib import Path

import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import fla_longhorn  # noqa: F401  registers the model

folder, device = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
tokenizer = byte_tokenizer('<end>', eos_token='<end>', pad_token='<end>', model_max_length=512)
tokenizer.save_pretrained(folder / 'checkpoint')
assert tokenizer('a b\n')['input_ids'] == list(b'a b\n')

config = AutoConfig.for_model(
    'longhorn', hidden_size=48, num_hidden_layers=2, state_size=4, vocab_size=257, bos_token_id=256, eos_token_id=256,
    tie_word_embeddings=False, max_position_embeddings=512,
)
model = AutoModelForCausalLM.from_config(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# text that every machine has: modules of Python's standard library
text = ''.join(Path(module.__file__).read_text(encoding='utf-8') for module in (ast, textwrap)).encode()
ids = torch.tensor(list(text[:20 * 16 * 128])).view(20, 16, 128).to(device)
for batch in [*ids, *ids]:
    model(batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval().save_pretrained(folder / 'checkpoint')

# text after that, which the model has not seen
unseen = text[20 * 16 * 128:].decode()
documents = [unseen[i:i + 150] for i in range(0, 1800, 150)]
shuffled = random.Random(0)
rows = []
for i, document in enumerate(documents):
    right, wrong = document[100:], ''.join(shuffled.sample(document[100:], 50))
    answer = i % 2
    rows.append({'start': document[:100], 'ends': [wrong, right] if answer else [right, wrong], 'answer': answer})
(folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
(folder / 'texts.jsonl').write_text(''.join(json.dumps({'text': document}) + '\n' for document in documents))


@torch.no_grad()
def log_probability(start: list[int], end: str) -> float:
    tokens = torch.tensor([*start, *end.encode()], device=device)
    logits = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return logits.gather(1, tokens[1:, None])[len(start) - 1:].sum().item()


bits = [-log_probability([256], x) / math.log(2) / len(x.encode()) for x in documents]
scores = [[log_probability(list(row['start'].encode()), end) for end in row['ends']] for row in rows]
hits = [int(score[1] > score[0]) == row['answer'] for score, row in zip(scores, rows, strict=True)]
print(json.dumps({'bits_per_byte': sum(bits) / len(bits), 'acc': sum(hits) / len(hits)}))
