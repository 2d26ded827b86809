"""Adapters of PEFT: the tokens are those of the model with the adapter merged, beside requests without one."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from packages.serving.tests.checkpoints import NEW_TOKENS, generate, prompts


@pytest.mark.parametrize(('name', 'options'), [
    ('paper', {'max_num_batched_tokens': 32}), ('heads', {}), ('hybrid', {'tensor_parallel_size': 2}),
    ('gate-head', {}), ('gate-channel', {'tensor_parallel_size': 2}), ('heads', {'enforce_eager': False}),
], ids=str)
def test_adapters(engine, variant, tmp_path, name, options):
    """Two adapters of all linear layers, and none, in turns."""
    checkpoint = variant(name)
    linear = (x for x, module in checkpoint.model.model.named_modules() if isinstance(module, torch.nn.Linear))
    targets = {x.rpartition('.')[2] for x in linear}
    adapters, wanted = [None], [checkpoint.tokens]
    for i, rank in enumerate((8, 3)):
        torch.manual_seed(i)
        adapted = get_peft_model(copy.deepcopy(checkpoint.model), LoraConfig(
            r=rank, lora_alpha=16, target_modules=sorted(targets), init_lora_weights=False,
        ))
        adapted.save_pretrained(tmp_path / f'{i}')
        merged = adapted.merge_and_unload()
        adapters.append(LoRARequest(f'{i}', i + 1, str(tmp_path / f'{i}')))
        wanted.append([generate(merged, x) for x in prompts()])
    assert all(a != b and b != c and c != a for a, b, c in zip(*wanted, strict=True))
    # on a CPU vLLM gives requests without an adapter that in the last place: https://github.com/vllm-project/vllm/pull/48421
    llm = engine(checkpoint.folder, enable_lora=True, max_loras=3, max_lora_rank=8, **options)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{'prompt_token_ids': x} for x in prompts() for _ in adapters], sampling, use_tqdm=False,
        lora_request=adapters * len(prompts()),
    )
    tokens = [list(x.outputs[0].token_ids) for x in outputs]
    assert [tokens[i::3] for i in range(3)] == wanted
