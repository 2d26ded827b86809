"""The paper's Fig. 1, left: average perplexity over the eight sets of Table 2 against tokens seen.

    python -m lab.experiments perplexity outputs/lm_1.3B/results.json [--limit 1000]

Reads the checkpoints that the command `language_modeling` saved during training (`save_steps`) and at its end. The
sets are PIQA, HellaSwag, WinoGrande, ARC-easy, ARC-challenge, OpenBookQA, SIQA and BoolQ, from lm_eval's tasks. The paper does
not say which text is scored. Here it is the question with the right answer, as the task words them: a set's perplexity is the
exponential of its mean loss per token, averaged over the eight sets. `perplexity.json` and `perplexity.png` go beside
`results.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

import fla_longhorn  # noqa: F401  registers Longhorn with the Auto classes
from benchmarks.measure.machine import describe_machine
from benchmarks.report.plots import label_ends, plot_band, shown, style, tidy
from examples.text.corpus import TextArguments, encoder
from fla_longhorn_extras.lm_eval.tables import TABLES
from lab.experiments.language_modeling import checkpoint_folder

IGNORE = -100


def right_answers(task, limit: int | None) -> list[str]:
    """The documents of a task of lm_eval, each as its question with the right answer."""
    task.build_all_requests(limit=limit)
    texts = []
    for _, choices in itertools.groupby(task.instances, key=lambda x: x.doc_id):
        some = list(choices)
        doc = some[0].doc
        # WinoGrande has the choice before the blank, and the same end for both
        right = int(task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc))
        texts.append(''.join(some[right].args))
    return texts


def eight_sets(limit: int | None = None) -> dict[str, list[str]]:
    """Texts by the names of Table 2; lm_eval finds their data on the hub, or in folders of their names."""
    from lm_eval.tasks import TaskManager, get_task_dict

    names = {label: task for label, (task, _) in TABLES[0].columns.items()}
    tasks = get_task_dict(list(names.values()), TaskManager())
    return {label: right_answers(tasks[name], limit) for label, name in names.items()}


@torch.inference_mode()
def perplexity(model, texts: list[torch.Tensor], batch_size: int) -> float:
    """Losses of texts of token ids `[T]`, from their second token on. Padding in a batch does not count."""
    loss, count = 0., 0
    texts = sorted(texts, key=len)
    for i in range(0, len(texts), batch_size):
        some = texts[i:i + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True).to(model.device)
        labels = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=IGNORE).to(model.device)
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        loss += F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction='sum').item()
        count += sum(len(x) - 1 for x in some)
    return math.exp(loss / count)


def checkpoints(folder: Path, last: int) -> list[tuple[int, Path]]:
    """Steps and folders of a run's checkpoints, and of the final model after `last` steps."""
    found = [(int(path.name.removeprefix('checkpoint-')), path) for path in (folder / 'trainer').glob('checkpoint-*')]
    return sorted([x for x in found if x[0] != last] + [(last, folder / 'checkpoint')])


def draw(report: dict, path: Path | str) -> None:
    figure = Figure(figsize=(8.5, 4.4), dpi=140, layout='constrained')
    axis = figure.subplots()
    curves: dict[str, list[list[dict]]] = {}
    for run in report['runs']:
        curves.setdefault(run['model'], []).append(run['history'])
    names = shown(list(curves), {name: sum(x[-1]['average'] for x in some) for name, some in curves.items()})
    for name in names:
        tokens = [x['tokens'] / 1e9 for x in curves[name][0]]
        plot_band(axis, tokens, [[x['average'] for x in history] for history in curves[name]], name, style(name, names))
    axis.set(title='Average perplexity of eight sets', xlabel='tokens seen (billions)', ylabel='perplexity')
    tidy(axis)
    label_ends(axis)
    figure.savefig(path)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments perplexity', description=__doc__.splitlines()[0])
    parser.add_argument('results', type=Path, help='results.json of `experiments language_modeling`')
    parser.add_argument('--limit', type=int, help='largest number of documents of a set (default: all)')
    parser.add_argument('--batch_size', type=int, default=16, help='texts at a time')
    options = parser.parse_args(args)
    trained = json.loads(options.results.read_text())
    setting, output = trained['setting'], options.results.parent
    transformers.logging.set_verbosity_error()
    encode = encoder(TextArguments(**setting['text']))
    # no end-of-text token is added: these are not whole texts
    sets = {
        label: [torch.from_numpy(ids[:-1].astype('int64')) for ids in encode(texts)]
        for label, texts in eight_sets(options.limit).items()
    }
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    runs = []
    for run in trained['runs']:
        folder = checkpoint_folder(output, run['model'], run['seed'])
        history = []
        for step, path in tqdm(checkpoints(folder, run['history'][-1][0]), desc=f'{run["model"]}, seed {run["seed"]}'):
            model = AutoModelForCausalLM.from_pretrained(path).to(device).eval()
            found = {label: perplexity(model, texts, options.batch_size) for label, texts in sets.items()}
            tokens = step * setting['sequences_per_step'] * setting['block_size']
            history.append({'step': step, 'tokens': tokens, 'average': sum(found.values()) / len(found), 'sets': found})
            print(f'{run["model"]:>20}, seed {run["seed"]}, {tokens:,} tokens: {history[-1]["average"]:.3f}', flush=True)
        runs.append({'model': run['model'], 'seed': run['seed'], 'history': history})
    report = {'machine': describe_machine(device), 'documents': {label: len(x) for label, x in sets.items()}, 'runs': runs}
    (output / 'perplexity.json').write_text(json.dumps(report, indent=1) + '\n')
    draw(report, output / 'perplexity.png')
