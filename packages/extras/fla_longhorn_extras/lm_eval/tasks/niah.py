"""RULER's S-NIAH 1 to 3 (arXiv 2404.06654): lm_eval's texts, from 1,024 tokens on, with the depth of the needle.

lm_eval's own tasks have no metric below 4,096 tokens, and papers on recurrent models report 1,024 to 8,192.
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from lm_eval.tasks.ruler.common_utils import get_tokenizer, postprocess_pred, resolve_tokenizer_name, string_match_all
from lm_eval.tasks.ruler.niah_utils import TEMPLATE
from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

# `_niah_yaml` lists a metric for each of these lengths
LENGTHS = tuple(1024 << i for i in range(8))


def documents(
    haystack: str, values: str, max_seq_lengths: Sequence[int] = LENGTHS[:4], num_samples: int = 500, **metadata,
) -> dict[str, Dataset]:
    """`num_samples` texts of each length in tokens: one of `values` (`numbers`, `uuids`) in a haystack (`repeat`, `essay`).

    `metadata` has lm_eval's model arguments, of which `tokenizer` or `pretrained` names the tokenizer.
    """
    if not max_seq_lengths or not set(max_seq_lengths) <= set(LENGTHS):
        raise ValueError(f'max_seq_lengths must be some of {LENGTHS}, got {max_seq_lengths}')
    tokenizer = get_tokenizer(resolve_tokenizer_name(metadata))
    samples = []
    for length in max_seq_lengths:
        some = generate_samples(
            get_haystack(haystack), tokenizer, max_seq_length=length, template=TEMPLATE, type_haystack=haystack,
            type_needle_k='words', type_needle_v=values, num_samples=num_samples,
        )
        if some[0]['length'] < length / 2:
            raise ValueError(
                f"max_seq_lengths holds {length}, for which lm_eval makes a text of {some[0]['length']} tokens: it adds 500 "
                'words of essays at a time, which are too many of these tokens'
            )
        samples += [x | {'depth': x['input'].index(x['outputs'][0]) / len(x['input'])} for x in some]
    return {'test': Dataset.from_list(samples)}


def found(sample: dict, results: list[str]) -> dict[str, float]:
    """Whether the model's output contains the value, as the metric of the text's length."""
    return {str(sample['max_length']): string_match_all(postprocess_pred(results), [sample['outputs']])}
