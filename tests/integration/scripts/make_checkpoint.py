"""A byte-level language model, trained for a moment on real text, with its tokenizer and a task for lm_eval.

Arguments: a folder and a device.
"""

import json
import math
import random
import sys
from pathlib import Path

import torch
from stdlib_bytes import chunks, read_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

folder, device = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
# byte b is the token of the character that GPT-2's byte alphabet has for it; token 256 ends a text
alphabet = pre_tokenizers.ByteLevel.alphabet()
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = [b for b in range(256) if b not in printable]
characters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
assert set(characters.values()) == set(alphabet)
tokenizer = Tokenizer(models.BPE(vocab={**{characters[b]: b for b in range(256)}, '<end>': 256}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<end>', pad_token='<end>', model_max_length=512)
tokenizer.save_pretrained(folder / 'checkpoint')
assert tokenizer('a b\n')['input_ids'] == list(b'a b\n')

config = AutoConfig.for_model(
    'longhorn', hidden_size=48, num_hidden_layers=2, state_size=4, vocab_size=257, bos_token_id=256, eos_token_id=256,
    tie_word_embeddings=False, max_position_embeddings=512,
)
model = AutoModelForCausalLM.from_config(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.stack([row['input_ids'] for row in chunks(length=128, number=320)]).view(20, 16, 128).to(device)
for batch in [*ids, *ids]:
    model(batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval().save_pretrained(folder / 'checkpoint')

# text after that, which the model has not seen
unseen = bytes(read_bytes()[128 * 320:].tolist()).decode()
documents = [unseen[i:i + 150] for i in range(0, 1800, 150)]
shuffled = random.Random(0)
rows = []
for i, document in enumerate(documents):
    right, wrong = document[100:], ''.join(shuffled.sample(document[100:], 50))
    answer = i % 2
    rows.append({'start': document[:100], 'ends': [wrong, right] if answer else [right, wrong], 'answer': answer})
(folder / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
(folder / 'texts.jsonl').write_text(''.join(json.dumps({'text': document}) + '\n' for document in documents))
bits = []
with torch.no_grad():
    for document in documents:
        row = torch.tensor([256, *document.encode()], device=device)
        logits = model(row[None, :-1]).logits[0].log_softmax(-1)
        bits.append(-logits.gather(1, row[1:, None]).sum() / math.log(2) / len(document.encode()))
choices = []
with torch.no_grad():
    for row in rows:
        start, scores = list(row['start'].encode()), []
        for end in row['ends']:
            tokens = torch.tensor([*start, *end.encode()], device=device)
            logits = model(tokens[None, :-1]).logits[0].log_softmax(-1)
            scores.append(logits.gather(1, tokens[1:, None])[len(start) - 1:].sum().item())
        choices.append(int(scores[1] > scores[0]) == row['answer'])
print(json.dumps({'bits_per_byte': torch.stack(bits).mean().item(), 'acc': sum(choices) / len(choices)}))
