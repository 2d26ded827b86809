"""Small models of each kind, and what transformers generates with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from tests.integration.scripts.byte_tokenizer import byte_tokenizer

LENGTHS = (1, 3, 7, 16, 31, 64, 100, 129)
NEW_TOKENS = 24
# options of an engine
OPTIONS = {
    'skip_tokenizer_init': True, 'dtype': 'float32', 'enforce_eager': True, 'max_model_len': 256, 'max_num_seqs': 8,
}
SIZES = {'hidden_size': 64, 'num_hidden_layers': 3, 'vocab_size': 256, 'bos_token_id': None, 'eos_token_id': None}
VARIANTS = {
    'paper': {},
    'heads': {
        'num_heads': 4, 'k_norm': 'l2', 'scalar_beta': True, 'hidden_ratio': 2, 'tie_word_embeddings': False, 'tie_qk': True,
    },
    'exact': {'exact': True, 'k_norm': 'l2', 'use_bias': True, 'conv_bias': False, 'conv_size': 3},
    'exact-heads': {
        'exact': True, 'scalar_beta': True, 'num_heads': 2, 'beta_rank': 3, 'state_size': 10, 'expand': 1,
        'allow_neg_eigval': True,
    },
    'hybrid': {
        'attn': {'layers': [1], 'num_heads': 2, 'num_kv_heads': 1, 'qkv_bias': True}, 'hidden_ratio': 2, 'value_proj': True,
    },
    'window': {
        'attn': {'layers': [0, 2], 'num_heads': 2, 'window_size': 24}, 'num_heads': 2, 'exact': True, 'num_hidden_layers': 4,
    },
    'gate-head': {'gate': 'head', 'num_heads': 4, 'allow_neg_eigval': True, 'use_bias': True},
    'gate-channel': {'gate': 'channel', 'num_heads': 2, 'value_proj': True},
    'exact-gate-head': {'gate': 'head', 'exact': True, 'num_heads': 2, 'scalar_beta': True, 'tie_qk': True},
    'exact-gate-channel': {'gate': 'channel', 'exact': True, 'allow_neg_eigval': True},
}
GATED = [name for name, options in VARIANTS.items() if 'gate' in options]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, the model in it, and the tokens `[prompt][NEW_TOKENS]` that `generate` gives."""

    folder: Path
    model: LonghornForCausalLM
    tokens: list[list[int]]


def build(name: str, folder: Path, **options: Any) -> LonghornForCausalLM:
    torch.manual_seed(0)
    model = LonghornForCausalLM(LonghornConfig(**SIZES | VARIANTS[name] | options)).eval()
    # random weights of the default size repeat one token
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if parameter.endswith(('_proj.weight', 'gate.up.weight')):
                value.mul_(4)
            elif parameter.endswith('A_log'):
                value.normal_()
    model.save_pretrained(folder)
    return model


def make(name: str, folder: Path) -> Checkpoint:
    model = build(name, folder)
    byte_tokenizer().save_pretrained(folder)
    tokens = [generate(model, prompt) for prompt in prompts()]
    assert all(len(set(some)) > 8 for some in tokens)
    return Checkpoint(folder, model, tokens)


def generate(model: LonghornForCausalLM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(prompt):].tolist()


def distributions(model: LonghornForCausalLM, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities `[len(tokens), vocab_size]` at each of `tokens` behind `prompt`, with logits in the model's dtype."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1:-1]
    return logits.float().log_softmax(-1)


def log_probabilities(model: LonghornForCausalLM, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of each of `tokens`."""
    return distributions(model, prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def served_log_probabilities(llm: Any) -> tuple[list[list[int]], torch.Tensor]:
    """The likeliest tokens behind each prompt, and their log-probabilities `[prompt, NEW_TOKENS]`, as vLLM gives them."""
    # not before the conftest has set what vLLM reads at import
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [x.outputs[0] for x in llm.generate([{'prompt_token_ids': x} for x in prompts()], sampling, use_tqdm=False)]
    tokens = [list(x.token_ids) for x in outputs]
    return tokens, torch.tensor([
        [step[token].logprob for step, token in zip(x.logprobs, some, strict=True)]
        for x, some in zip(outputs, tokens, strict=True)
    ])


def all_log_probabilities(model: LonghornForCausalLM, tokens: list[list[int]]) -> torch.Tensor:
    """:func:`log_probabilities` behind each prompt."""
    return torch.stack([log_probabilities(model, *pair) for pair in zip(prompts(), tokens, strict=True)])
