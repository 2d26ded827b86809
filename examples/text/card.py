"""The model card of a run, made of its report."""

from __future__ import annotations

from textwrap import indent

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from examples.text.data import EVAL_BLOCK, HELD_OUT_BYTES, LONG_LINE, count_files

# of the texts that are installed, all English
LICENCES = {
    'descriptions': ' `descriptions` are those of all installed packages, each under the licence of its package.',
    'stdlib': ' `stdlib` are modules of the Python library, under the PSF licence.',
}


def model_card(report: dict) -> ModelCard:
    """`report` is what `text.json` holds."""
    options, seconds = report['options'], report['seconds']
    installed = set(options['files']) <= set(LICENCES)
    licences = ''.join(LICENCES.get(x, '') for x in options['files'])
    kind = ', nearly all of it English descriptions of packages and code' if installed else ''
    removed = f"""
Lines of {LONG_LINE} bytes or more that these contain were removed from the training text: {report['removed_bytes']:,} bytes.
""" if report['removed_bytes'] else ''
    data = ModelCardData(
        language='en' if installed else None, library_name='transformers',
        pipeline_tag='text-generation', tags=['longhorn', 'byte-level'],
        model_name='longhorn-text', eval_results=[EvalResult(
            task_type='text-generation', dataset_type='text', dataset_name='held-out files', metric_type='bits_per_byte',
            metric_value=round(report['bits_per_byte'], 4),
        )],
    )
    results = '\n'.join(f'| {name} | {bits:.2f} |' for name, bits in report['baselines'].items())
    samples = '\n\n---\n\n'.join(indent(sample['text'], '    ', lambda line: True) for sample in report['samples'])
    return ModelCard(f"""---
{data}
---

# A byte-level Longhorn of {report['parameters']:,} parameters

A [Longhorn](https://arxiv.org/abs/2407.14207) trained from random weights by `python -m examples.text` of fla-longhorn. From a
checkout, this lets it write again:

    {report['command']}

After `import fla_longhorn`, `AutoModelForCausalLM` and `AutoTokenizer` load this folder. Byte b is token b.

## Data

Training text: {count_files(report['train_files'])}, {report['train_bytes']:,} bytes, from:
{', '.join(options['files'])}.{licences}
In training, {report['read_bytes']:,} bytes were read.

Held-out text: {report['held_out_bytes']:,} bytes, at most {HELD_OUT_BYTES:,} of each: {', '.join(report['held_out_files'])}.
{removed}`text.json` names all files.

## Results

| held-out text, predicted | bits per byte |
| --- | --- |
{results}
| **by this model** | **{report['bits_per_byte']:.2f}** |

The model reads {EVAL_BLOCK} bytes at a time and knows nothing of those before. Frequencies are counted in the training text;
gzip knows only the held-out text.

## Settings

{options['steps']} steps of {options['batch_size']} blocks of {options['block_size']} bytes, AdamW, learning rate
{options['learning_rate']} with a cosine to a tenth of it, weight decay 0.1, seed {options['seed']}; layers:
{options['num_hidden_layers']}, width: {options['hidden_size']}, memory entries per channel: {options['state_size']}, the
{'exact' if options['exact'] else 'diagonal'} form. Training took {seconds['training']:.0f} s, of processor time
{seconds['processor']:.0f} s, on {report['device']}, threads: {report['threads']}, torch {report['versions']['torch']}.

## Limits

The model is small and has read little{kind}. It follows the form of these texts,
not their sense: names, links, licences and code that it writes are made up, and some may be copied from the files. After an
indented line it may write nothing but spaces. It is for trying out training and generation, and for no other use.

## Samples

{samples}
""")
