"""A training loop under accelerate, on as many processes as it is launched with: for a folder and a device."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from stdlib_bytes import chunks
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

folder, device = sys.argv[1:]
accelerator = Accelerator(cpu=device == 'cpu')
set_seed(0)
config = AutoConfig.for_model('longhorn', hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=256)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(chunks(length=64, number=32), batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), 'mean').item())
accelerator.unwrap_model(model).save_pretrained(
    folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
)
if accelerator.is_main_process:
    with open(f'{folder}/losses.json', 'w') as file:
        json.dump({
            'processes': accelerator.num_processes, 'device': accelerator.device.type, 'losses': losses,
        }, file)
accelerator.end_training()
