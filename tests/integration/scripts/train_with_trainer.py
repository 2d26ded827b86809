"""Train a model from `AutoConfig` with transformers' Trainer, checkpoint and resume; nothing here names the plugin.

Arguments: a folder and a device.
"""

import json
import sys
from pathlib import Path

from stdlib_bytes import chunks
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

output_dir, device = Path(sys.argv[1]), sys.argv[2]
set_seed(0)
config = AutoConfig.for_model('longhorn', hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=256)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=TrainingArguments(
        output_dir=str(output_dir), max_steps=8, save_steps=4, logging_steps=1, per_device_train_batch_size=4,
        learning_rate=1e-2, lr_scheduler_type='cosine', seed=0, use_cpu=device == 'cpu', report_to='none', disable_tqdm=True,
    ),
    train_dataset=chunks(length=96, number=48),
)
trainer.train(resume_from_checkpoint=bool(list(output_dir.glob('checkpoint-*'))))
trainer.save_model(output_dir / 'final')
losses = [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
(output_dir / 'losses.json').write_text(json.dumps(losses))
