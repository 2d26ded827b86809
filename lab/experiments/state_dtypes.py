"""What states in 16 bits change: divergence from the same model with float32 states, token by token over a long text.

    python -m lab.experiments language_modeling lab/experiments/settings/state_dtypes.json
    python -m lab.experiments state_dtypes outputs/state_dtypes/results.json

Reads the checkpoints of the first command and writes `state_dtypes.json` beside its `results.json`. After each token, the
recurrence's states are rounded to a dtype and back, as a server does that stores them in it. For comparison, the weights are
rounded once instead, or the whole model computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import fla_longhorn  # noqa: F401  registers Longhorn with the Auto classes
from benchmarks.measure.machine import describe_machine
from examples.text.corpus import TextArguments
from lab.experiments import without_gpu
from lab.experiments.language_modeling import checkpoint_folder
from lab.experiments.tokens import token_blocks

Round = Callable[[Tensor], Tensor]


def stochastic(generator: torch.Generator) -> Round:
    """To bfloat16, up or down at random: up with the probability of the part that is cut off."""
    def rounded(x: Tensor) -> Tensor:
        noise = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
        return ((x.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return rounded


def roundings() -> dict[str, Round]:
    return {
        'float16 states': lambda x: x.half().float(),
        'bfloat16 states': lambda x: x.bfloat16().float(),
        'bfloat16 states, stochastic': stochastic(torch.Generator().manual_seed(0)),
    }


@torch.inference_mode()
def next_logits(model: PreTrainedModel, ids: Tensor, rounded: Round | None = None) -> Tensor:
    """Logits `[B, T, vocabulary]` in float32 of decoding `ids [B, T]`, with the states rounded after each token."""
    cache, logits = None, []
    for token in ids.split(1, dim=1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits.float())
        for layer in cache if rounded else ():
            layer['recurrent_state'].copy_(rounded(layer['recurrent_state']))
    return torch.cat(logits, 1)


def compare(logits: Tensor, reference: Tensor, ids: Tensor) -> dict[str, float]:
    """Mean Kullback-Leibler divergence from the reference in nats, and the loss of the text."""
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    divergence, eighth = (p.exp() * (p - q)).sum(-1), ids.shape[1] // 8
    loss = -q[:, :-1].gather(-1, ids[:, 1:, None])
    parts = {'kl_start': divergence[:, :eighth], 'kl': divergence, 'kl_end': divergence[:, -eighth:], 'loss': loss}
    return {name: x.mean().item() for name, x in parts.items()}


def measure(checkpoint: Path, ids: Tensor) -> dict[str, dict[str, float]]:
    """The comparisons of one model, by what is stored in 16 bits."""
    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    reference = next_logits(load(), ids)
    runs = {name: (load(), rounded) for name, rounded in roundings().items()}
    runs |= {'bfloat16 weights': (load().bfloat16().float(), None), 'bfloat16 model': (load().bfloat16(), None)}
    return {name: compare(next_logits(model, ids, rounded), reference, ids) for name, (model, rounded) in runs.items()}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments state_dtypes', description=__doc__.splitlines()[0])
    parser.add_argument('results', type=Path, help='results.json of `experiments language_modeling`')
    parser.add_argument('--tokens', type=int, default=8192, help='length of the texts')
    parser.add_argument('--texts', type=int, default=4, help='held-out texts, read side by side')
    parser.add_argument('--tokens_dir', type=Path, default=Path('outputs/tokens'), help='folder of the files of tokens')
    options = parser.parse_args(args)
    trained, output = json.loads(options.results.read_text()), options.results.parent
    transformers.logging.set_verbosity_error()
    without_gpu.install()
    blocks = token_blocks(
        TextArguments(**trained['setting']['text']), options.tokens, held_out=True, folder=options.tokens_dir,
    )
    ids, rows = torch.stack([blocks[i]['input_ids'] for i in range(options.texts)]), []
    for run in trained['runs']:
        checkpoint = checkpoint_folder(output, run['model'], run['seed']) / 'checkpoint'
        for stored, row in measure(checkpoint, ids).items():
            rows.append({'model': run['model'], 'seed': run['seed'], 'stored': stored, **row})
            print(rows[-1], flush=True)
    report = {
        'setting': trained['setting'], 'tokens': options.tokens, 'texts': options.texts, 'machine': describe_machine('cpu'),
        'runs': trained['runs'], 'rows': rows,
    }
    (output / 'state_dtypes.json').write_text(json.dumps(report, indent=1) + '\n')
