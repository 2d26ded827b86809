"""Longhorn's language model beside fla's others in one run: training steps and generation.

    python -m benchmarks.model [--device cuda] [--json FILE] [--plot FILE.png] [--compare OLD.json]

Training: forward, backward and AdamW on random tokens; tokens a second (from the median step), and peak memory beyond the
model's and the optimizer's own. Generation by `generate`: milliseconds of the prompt and of each token after it, and bytes of
the cache, at growing prompts. On a GPU at the paper's 120M size under bfloat16 autocast, on a CPU at a small one in
float32. A model that can't run is reported as not run, with the reason. An interrupt ends the measuring and reports what
there is; the JSON is written after every model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from fla.models import DeltaNetConfig, GLAConfig, Mamba2Config, MambaConfig, TransformerConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import fla_longhorn  # noqa: F401  registers
from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from benchmarks.report import plots
from fla_longhorn.models import LonghornConfig


@dataclass(frozen=True)
class Size:
    """`blocks` are mixer and MLP; a model without MLPs has twice as many layers."""

    hidden_size: int
    blocks: int
    head_dim: int
    vocab_size: int
    batch_size: int
    seq_len: int
    prompts: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Row:
    """A model as data; `cannot` is why it isn't run, for a kind of device."""

    name: str
    config: Callable[[Size], PreTrainedConfig]
    cannot: dict[str, str] = field(default_factory=dict)
    build: Callable[[PreTrainedConfig], PreTrainedModel] = AutoModelForCausalLM.from_config


SIZES = {
    'cuda': Size(768, 12, 64, 50304, 8, 2048, (512, 2048, 8192, 32768), 32),
    'cpu': Size(128, 2, 32, 1000, 2, 256, (64, 256, 1024), 16),
}


def common(size: Size) -> dict:
    return {
        'hidden_size': size.hidden_size, 'vocab_size': size.vocab_size, 'tie_word_embeddings': True,
        'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': 0,
    }


def with_mlp(config: type, size: Size, **options) -> PreTrainedConfig:
    return config(**common(size), num_hidden_layers=size.blocks, **options)


def without_mlp(config: type, size: Size, **options) -> PreTrainedConfig:
    return config(**common(size), num_hidden_layers=2 * size.blocks, **options)


def wide_heads(size: Size) -> int:
    """Heads of 128 channels, as GLA and DeltaNet have."""
    return max(size.hidden_size // 128, 1)


def mamba2(config: type, size: Size) -> PreTrainedConfig:
    heads = 2 * size.hidden_size // size.head_dim
    return without_mlp(config, size, head_dim=size.head_dim, num_heads=heads, n_groups=1)


TRITON = {'cpu': "its mixer's kernels are Triton's and need a GPU"}
SCAN = {} if find_spec('mamba_ssm') else {'cuda': 'mamba_ssm is not installed; without it a loop over tokens stands in'}
REFERENCE = {'cuda': 'a loop over tokens, for machines without a GPU'}

MODELS = (
    Row('Longhorn', partial(without_mlp, LonghornConfig)),
    Row('Longhorn, exact', lambda size: without_mlp(LonghornConfig, size, exact=True)),
    Row('GLA', lambda size: with_mlp(GLAConfig, size, num_heads=wide_heads(size)), cannot=TRITON),
    Row('GLA, attn_mode=longhorn', lambda size: with_mlp(GLAConfig, size, attn_mode='longhorn')),
    Row('DeltaNet', lambda size: with_mlp(DeltaNetConfig, size, num_heads=wide_heads(size)), cannot=TRITON),
    Row('DeltaNet, attn_mode=longhorn', lambda size: with_mlp(DeltaNetConfig, size, attn_mode='longhorn')),
    Row('Mamba', partial(without_mlp, MambaConfig), cannot=SCAN),
    Row('Mamba2', partial(mamba2, Mamba2Config), cannot=TRITON),
    Row('Transformer', lambda size: with_mlp(TransformerConfig, size, num_heads=size.hidden_size // size.head_dim)),
    Row("transformers' Mamba", partial(without_mlp, transformers.MambaConfig), REFERENCE, transformers.MambaForCausalLM),
    Row("transformers' Mamba2", partial(mamba2, transformers.Mamba2Config), REFERENCE, transformers.Mamba2ForCausalLM),
)


def random_tokens(size: Size, batch_size: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, size.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0)).to(device)


def measure_training(model: PreTrainedModel, size: Size, device: torch.device, seconds: float) -> dict:
    ids = random_tokens(size, size.batch_size, size.seq_len, device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []

    def step() -> None:
        with torch.autocast('cuda', torch.bfloat16) if device.type == 'cuda' else nullcontext():
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    step()
    peak = timing.peak_bytes(step, device)
    figures = timing.summarize(timing.clock_times(step, device, seconds))
    if not torch.stack(losses).isfinite().all():
        raise FloatingPointError('the training loss is not finite')
    return figures | {'tokens_per_s': 1e3 * ids.numel() / figures['ms'], 'peak_bytes': peak}


class Clock:
    """A streamer of `generate` that notes when the prompt and each token passed by, in milliseconds."""

    def __init__(self):
        self.runs = []

    def put(self, tokens: torch.Tensor) -> None:
        self.runs[-1].append(1e3 * time.perf_counter())

    def end(self) -> None:
        pass


def measure_generation(model: PreTrainedModel, size: Size, prompt: int, device: torch.device, seconds: float) -> dict:
    """Times of the prompt with the first token and of each later token, and the bytes of the cache in the end."""
    ids = random_tokens(size, 1, prompt, device)
    clock = Clock()

    def generate():
        clock.runs.append([])
        with torch.autocast('cuda', torch.bfloat16) if device.type == 'cuda' else nullcontext():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=1 + size.new_tokens,
                max_new_tokens=1 + size.new_tokens, do_sample=False, return_dict_in_generate=True, streamer=clock,
            )

    cache = generate().past_key_values
    clock.runs.clear()
    timing.clock_times(generate, device, seconds)
    steps = [[after - before for before, after in pairwise(run)] for run in clock.runs]
    if any(len(run) != 1 + size.new_tokens for run in steps):
        raise ValueError(f'generated {[len(run) for run in steps]} tokens in place of {1 + size.new_tokens}')
    return {
        'prompt': prompt, 'first': timing.summarize([run[0] for run in steps]),
        'token': timing.summarize([x for run in steps for x in run[1:]]), 'state_bytes': tensor_bytes(cache),
    }


def tensor_bytes(value: object, seen: set[int] | None = None) -> int:
    """Bytes of all tensors in a cache, whatever holds them."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, (str, int, float, type)) or id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(x, seen) for x in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(x, seen) for x in value)
    return sum(tensor_bytes(x, seen) for x in vars(value).values()) if hasattr(value, '__dict__') else 0


def measure(row: Row, size: Size, device: torch.device, seconds: float) -> dict:
    """Identity and status, and the figures unless the model can't run."""
    result = {'model': row.name}
    if device.type in row.cannot:
        return result | {'status': 'not run', 'reason': row.cannot[device.type]}
    try:
        torch.manual_seed(0)
        model = row.build(row.config(size)).to(device)
        result['parameters'] = model.num_parameters()
        result['training'] = measure_training(model.train(), size, device, seconds)
        model.eval()
        result['generation'] = [measure_generation(model, size, prompt, device, seconds) for prompt in size.prompts]
    except Exception as error:  # what another family's model needs may be missing in any way
        return result | {'status': 'not run', 'reason': timing.describe_error(error)}
    return result | {'status': 'ok'}


def print_row(row: dict) -> None:
    if row['status'] != 'ok':
        print(f'{row["model"]:30}{row["status"]}: {row["reason"]}', flush=True)
        return
    training = row['training']
    peak = '' if training['peak_bytes'] is None else f'{training["peak_bytes"] / 2**20:.0f}'
    cells = ''.join(f'{x["token"]["ms"]:9.2f} ms {x["state_bytes"] / 2**10:9.0f} KB' for x in row['generation'])
    print(f'{row["model"]:30}{row["parameters"] / 1e6:9.2f}M{training["tokens_per_s"]:12.0f} {peak:>9}{cells}', flush=True)


def times_by_name(report: dict) -> dict[str, dict]:
    times = {}
    for row in report['rows']:
        if row['status'] == 'ok':
            times[f'{row["model"]}, training step'] = row['training']
            times |= {f'{row["model"]}, token after {x["prompt"]}': x['token'] for x in row['generation']}
    return times


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.model', description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=('cpu', 'cuda'))
    parser.add_argument('--models', nargs='+', help='only models whose name holds one of these')
    parser.add_argument('--seconds', type=float, help='of repeats for each time (default: 2 on a GPU, else 0.2)')
    for name in ('hidden_size', 'blocks', 'batch_size', 'seq_len', 'new_tokens'):
        parser.add_argument(f'--{name}', type=int)
    parser.add_argument('--prompts', type=int, nargs='+')
    plots.add_report_arguments(parser)
    options = parser.parse_args(args)
    device = torch.device(options.device)
    changed = {name: value for name, value in vars(options).items() if name in asdict(SIZES['cpu']) and value is not None}
    size = Size(**asdict(SIZES[device.type]) | changed)
    seconds = options.seconds if options.seconds is not None else 2.0 if device.type == 'cuda' else 0.2
    other = json.loads(Path(options.compare).read_text()) if options.compare else None
    transformers.logging.set_verbosity_error()

    machine = describe_machine(device)
    print(f'{machine["device"]}, {machine["threads"]} threads, commit {machine["commit"]}')
    print(', '.join(f'{name} {value}' for name, value in asdict(size).items()))
    prompts = ''.join(f'{f"a token after {n}":>24}' for n in size.prompts)
    print(f'\n{"model":30}{"parameters":>10}{"tokens/s":>12}{"peak MB":>10}{prompts}', flush=True)
    report = {'machine': machine, 'size': asdict(size), 'rows': []}
    try:
        for row in MODELS:
            if not options.models or any(part in row.name for part in options.models):
                report['rows'].append(measure(row, size, device, seconds))
                print_row(report['rows'][-1])
                if options.json:
                    timing.write_report(report, options.json)
    except KeyboardInterrupt:
        print('stopped')
    if options.json:
        timing.write_report(report, options.json)
    if options.plot:
        plots.draw_models(report, options.plot)
    if other:
        print('\n'.join([f'\nagainst {options.compare}:', *timing.compare(report, other, times_by_name)]))
