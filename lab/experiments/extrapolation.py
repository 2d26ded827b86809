"""Length extrapolation (the paper's Fig. 1, right): perplexity by position, up to 16 times the training length.

    python -m lab.experiments extrapolation outputs/lm_small/results.json [--factor 16]

Reads the checkpoints of `python -m lab.experiments language_modeling` and writes `extrapolation.json` and `extrapolation.png`
beside its `results.json`. A held-out text of `factor` times the training length is read in one pass, from an empty state.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

import fla_longhorn  # noqa: F401  registers Longhorn with the Auto classes
from benchmarks.measure.machine import describe_machine
from benchmarks.report.plots import finish, label_ends, plot_band, shown, style
from examples.text.corpus import TextArguments
from lab.experiments import without_gpu
from lab.experiments.language_modeling import checkpoint_folder
from lab.experiments.tokens import token_blocks


@torch.inference_mode()
def loss_by_position(model, blocks, count: int, name: str | None = None) -> torch.Tensor:
    """Mean loss in nats at each position but the first, `[T - 1]` float64, over `count` blocks."""
    total = 0
    for i in tqdm(range(count), desc=name, leave=False):
        ids = blocks[i]['input_ids'][None].to(model.device)
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        total = total + F.cross_entropy(logits, ids[0, 1:], reduction='none').double().cpu()
    return total / count


def by_span(losses: torch.Tensor, span: int) -> list[dict]:
    """Loss and perplexity of each span of positions, as long as a training sequence."""
    spans = [losses[i:i + span] for i in range(0, len(losses), span)]
    return [{'end': i * span + len(x) + 1, 'loss': x.mean().item(), 'perplexity': math.exp(x.mean())}
            for i, x in enumerate(spans)]


def draw(report: dict, path: Path | str) -> None:
    figure = Figure(figsize=(8.5, 4.4), dpi=140, layout='constrained')
    axis = figure.subplots()
    curves = {}
    for run in report['runs']:
        curves.setdefault(run['model'], []).append(run['spans'])
    names = shown(list(curves), {name: sum(x[-1]['loss'] for x in some) for name, some in curves.items()})
    for name in names:
        ends, perplexities = ([[x[key] for x in spans] for spans in curves[name]] for key in ('end', 'perplexity'))
        mean = sum(x[-1] for x in perplexities) / len(perplexities)
        plot_band(axis, ends[0], perplexities, f'{mean:.2f}  {name}', style(name, names))
    length = report['block_size']
    finish(axis, f'Perplexity by position, trained on {length} tokens', 'position in the text (dotted: the training length)',
           f'perplexity of the {length} tokens up to there')
    # a narrow range has no power of ten
    axis.yaxis.set_major_locator(MaxNLocator(6))
    # not a series
    axis.vlines(length, 0, 1, transform=axis.get_xaxis_transform(), color='grey', linestyle=':', linewidth=1)
    label_ends(axis)
    figure.savefig(path)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments extrapolation', description=__doc__.splitlines()[0])
    parser.add_argument('results', type=Path, help='results.json of `lab.experiments language_modeling`')
    parser.add_argument('--factor', type=int, default=16, help='longest text, as a multiple of the training length')
    parser.add_argument('--tokens_dir', type=Path, default=Path('outputs/tokens'), help='folder of the files of tokens')
    parser.add_argument('--blocks', type=int, default=32, help='largest number of texts to read')
    options = parser.parse_args(args)
    trained = json.loads(options.results.read_text())
    setting, output = trained['setting'], options.results.parent
    transformers.logging.set_verbosity_error()
    without_gpu.install()
    blocks = token_blocks(
        TextArguments(**setting['text']), options.factor * setting['block_size'], held_out=True, folder=options.tokens_dir,
    )
    count = min(options.blocks, len(blocks))
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    runs = []
    for run in trained['runs']:
        folder = checkpoint_folder(output, run['model'], run['seed'])
        model = AutoModelForCausalLM.from_pretrained(folder / 'checkpoint').to(device).eval()
        spans = by_span(loss_by_position(model, blocks, count, run['model']), setting['block_size'])
        runs.append({'model': run['model'], 'seed': run['seed'], 'spans': spans})
        described = '  '.join(f'{x["end"]}: {x["perplexity"]:.3f}' for x in spans[:16])
        print(f'{run["model"]:>20}, seed {run["seed"]}: {described}')
    report = {
        'name': output.name, 'block_size': setting['block_size'], 'texts': count, 'machine': describe_machine(device),
        'runs': runs,
    }
    (output / 'extrapolation.json').write_text(json.dumps(report, indent=1) + '\n')
    draw(report, output / 'extrapolation.png')
    print(f'written to {output}/extrapolation.json and extrapolation.png')
