"""Of models made by `AutoConfig`, which parameters transformers' Trainer decays, and their dimensions, as JSON.

`trainer first` imports it before the plugin, `trainer last` after the first model is built, `without` has no plugin.
"""

import json
import sys

if sys.argv[1] == 'trainer first':
    from transformers import Trainer
if sys.argv[1] == 'without':
    import fla  # noqa: F401
else:
    import fla_longhorn  # noqa: F401
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

TINY = {'hidden_size': 32, 'num_hidden_layers': 2, 'vocab_size': 32}
FAMILIES = {
    'longhorn': {'hidden_ratio': 2, 'use_bias': True, 'attn': {'layers': [1], 'num_heads': 2}},
    'gla': {'attn_mode': 'longhorn', 'num_heads': 2},
    'stock gla': {'num_heads': 2},
}
found = {}
for name, options in FAMILIES.items():
    if sys.argv[1] == 'without' and name != 'stock gla':
        continue
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split()[-1], **TINY, **options))
    from transformers import Trainer
    trainer = Trainer(model=model, args=TrainingArguments(weight_decay=0.1, use_cpu=True, report_to='none'))
    optimizer = trainer.create_optimizer()
    decayed = {id(x) for group in optimizer.param_groups if group['weight_decay'] for x in group['params']}
    kept = {id(x) for group in optimizer.param_groups if not group['weight_decay'] for x in group['params']}
    assert not decayed & kept and decayed | kept == {id(x) for x in model.parameters()}
    assert {group['weight_decay'] for group in optimizer.param_groups} == {0.1, 0.0}
    found[name] = {n: [id(x) in decayed, x.dim()] for n, x in model.named_parameters()}
print(json.dumps(found))
