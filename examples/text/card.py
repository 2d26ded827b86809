"""The model card of a run, from its report."""

from __future__ import annotations

from huggingface_hub import EvalResult, ModelCard, ModelCardData

TEMPLATE = """---
{{ card_data }}
---

# A byte-level Longhorn of {{ "{:,}".format(report.parameters) }} parameters

Written by `python -m examples.text` of [fla-longhorn](https://arxiv.org/abs/2407.14207), to try training and generation.

## Use

```bash
{{ report.command }}
```

In Python, `import fla_longhorn` and then `AutoModelForCausalLM` and `AutoTokenizer` load this folder. Byte b is token b.

## Data

{{ report.train_files | length }} files, {{ "{:,}".format(report.train_bytes) }} bytes, of which the training read
{{ "{:,}".format(report.read_bytes) }}. They are installed with Python and its packages (`{{ options.files | join("`, `") }}`:
`stdlib` is the Python library under the PSF licence, `descriptions` are those of installed packages, each under its package's
licence). `text.json` names all.

Held out: {{ report.held_out_files | length }} whole files, {{ "{:,}".format(report.held_out_bytes) }} bytes. From the training
text, {{ "{:,}".format(report.removed_bytes) }} bytes were removed: lines of {{ long_line }} bytes or more that the held-out text has
too. Held out are {{ report.held_out_files | join(", ") }}.

## Results

| prediction of the held-out text | bits per byte |
| --- | --- |
{% for name, value in report.baselines.items() -%}
| {{ name }} | {{ "%.2f" | format(value) }} |
{% endfor -%}
| **this model** | **{{ "%.2f" | format(report.bits_per_byte) }}** |

The model reads {{ options.eval_block_size }} bytes at a time and knows nothing before them; it was trained on {{ options.block_size }} at a
time. Frequencies are counted in the training text. gzip has seen only the held-out text.

## Settings

{{ options.steps }} steps of {{ options.batch_size }} blocks of {{ options.block_size }} bytes, AdamW with peak learning rate
{{ options.learning_rate }}, seed {{ options.seed }}; {{ options.num_hidden_layers }} layers of width {{ options.hidden_size }},
{{ options.state_size }} memory entries per channel, the {{ "exact" if options.exact else "diagonal" }} form. Training took
{{ "%.0f" | format(report.seconds.training) }} s ({{ "%.0f" | format(report.seconds.training_processor) }} s of processor time) on
{{ report.device }} with {{ report.threads }} threads, torch {{ report.versions.torch }}.

## Limits

It has seen little text, all of it code and descriptions of packages in English. What it writes looks like that text and is not
true: names, links, licences and code are made up, and parts can be copied from the files above. Not for use beyond a demo.

## Samples

{% for sample in report.samples -%}
````text
{{ sample.text }}
````

{% endfor -%}
"""


def model_card(report: dict, long_line: int) -> ModelCard:
    data = ModelCardData(
        language='en', library_name='transformers', pipeline_tag='text-generation', tags=['longhorn', 'byte-level'],
        model_name='longhorn-text', eval_results=[EvalResult(
            task_type='text-generation', dataset_type='text', dataset_name='held-out files', metric_type='bits_per_byte',
            metric_value=round(report['bits_per_byte'], 4),
        )],
    )
    return ModelCard.from_template(
        data, template_str=TEMPLATE, report=report, options=report['options'], long_line=long_line,
    )
