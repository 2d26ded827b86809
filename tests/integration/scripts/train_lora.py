"""LoRA on the projections by PEFT: train the adapter, save it, load it on the frozen model, merge it.

Arguments: a folder and a device.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from stdlib_bytes import chunks
from transformers import AutoConfig, AutoModelForCausalLM

folder, device = sys.argv[1:]
torch.manual_seed(0)
config = AutoConfig.for_model('longhorn', hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=256)
base = AutoModelForCausalLM.from_config(config).to(device)
base.save_pretrained(f'{folder}/base')
frozen = {name: weight.clone() for name, weight in base.state_dict().items()}
targets = ['in_proj', 'x_proj', 'beta_proj', 'out_proj']
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type='CAUSAL_LM'))
trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
assert len(trained) == 2 * 2 * len(targets) and all('lora_' in name for name in trained)

ids = torch.stack([row['input_ids'] for row in chunks(length=96, number=8)]).to(device)
optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=2e-2)
losses = []
for _ in range(20):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in optimizer.param_groups[0]['params'])
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.95 * losses[0], losses
for name, weight in model.get_base_model().state_dict().items():
    if 'lora_' not in name:
        assert torch.equal(weight, frozen[name.replace('.base_layer', '')]), name

model.eval().save_pretrained(f'{folder}/adapter')
logits = model(ids).logits
loaded = AutoModelForCausalLM.from_pretrained(f'{folder}/base').to(device)
again = PeftModel.from_pretrained(loaded, f'{folder}/adapter').eval()
assert torch.equal(again(ids).logits, logits)
tokens = again.generate(input_ids=ids[:2, :16], max_new_tokens=8, do_sample=False, pad_token_id=0)
merged = again.merge_and_unload()
torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
assert torch.equal(merged.generate(input_ids=ids[:2, :16], max_new_tokens=8, do_sample=False, pad_token_id=0), tokens)
print('loss', losses[0], losses[-1])
