"""Texts and prompts of the recall suite of `Just read twice` (arXiv 2407.05483), for lm_eval's YAML files.

A text is followed by a question whose answer it contains; a continuation that contains the answer is right. As in that paper,
longer texts are cut to 950 tokens around the answer (1000 with 50 for the continuation).
"""

from __future__ import annotations

import re
from pathlib import Path

import datasets
from transformers import AutoTokenizer

TEXT_TOKENS = 950
SUMMARY = 'Summary of information above...'


def documents(
    source: str, field: str, pretrained: str | None = None, tokenizer: str | None = None, recall_data: str | None = None,
    **metadata,
) -> dict[str, datasets.Dataset]:
    """The validation documents of `source`, with `field` cut around the answer.

    `pretrained` and `tokenizer` are lm_eval's model arguments. `recall_data` replaces the hub by a folder with one JSON-lines
    file per source, named by the last part of the source's name.
    """
    name = tokenizer or pretrained
    if not name:
        raise ValueError('these tasks cut texts by tokens: give lm_eval the model argument pretrained or tokenizer')
    encoder = AutoTokenizer.from_pretrained(name)
    if recall_data:
        file = Path(recall_data) / f'{source.rpartition("/")[2]}.jsonl'
        data = datasets.load_dataset('json', data_files={'validation': str(file)}, split='validation')
    else:
        data = datasets.load_dataset(source, split='validation')
    # SWDE's texts end with the authors' own prompt
    rows = [cut(row | {field: row[field].split(SUMMARY)[0]}, field, encoder) for row in data if len(answers(row)[0]) > 1]
    return {'validation': datasets.Dataset.from_list(rows)}


def answers(row: dict) -> list[str]:
    """All right answers; there is always a first one."""
    found = row.get('answers') or [row.get('value') or '']
    return [x.strip() for x in found]


def cut(row: dict, field: str, tokenizer) -> dict:
    """Cut the text to `TEXT_TOKENS` tokens with the first mention of the key or an answer in the middle."""
    text = row[field].strip()
    tokens = tokenizer(text, add_special_tokens=False)['input_ids']
    if len(tokens) <= TEXT_TOKENS:
        return row | {field: text}
    wanted = [x for x in (row.get('key'), *answers(row)) if x]
    mentions = [match.start() for x in wanted if (match := re.search(re.escape(x), text, re.IGNORECASE))]
    before = len(tokenizer(text[:min(mentions)], add_special_tokens=False)['input_ids']) if mentions else len(tokens)
    start = min(max(0, before - TEXT_TOKENS // 2), len(tokens) - TEXT_TOKENS)
    return row | {field: tokenizer.decode(tokens[start:start + TEXT_TOKENS])}


def without_ending(text: str, ending: str) -> str:
    """Remove a repeated ending, case-insensitively, and a final full stop."""
    text = text.strip()
    while ending and text.lower().endswith(ending.lower()):
        text = text[:-len(ending)].strip()
    return text.strip('.').strip()


def key_of(row: dict) -> str:
    return row['key'][0].upper() + row['key'][1:]


def keyed(row: dict) -> str:
    """FDA, SWDE: the text, then the name of a fact in it."""
    return f'{without_ending(row["text"], row["key"] + ":")}. {key_of(row)}:'


def keyed_twice(row: dict) -> str:
    text = without_ending(row['text'], row['key'] + ':') + '.'
    return f'Information about {key_of(row)}. {text}\n{text} {key_of(row)}:'


def asked(row: dict) -> str:
    """NQ, TriviaQA, DROP: the text, then a question as an incomplete sentence."""
    return f'{passage(row)}. {row["question"].strip()}'


def asked_twice(row: dict) -> str:
    return f'{row["orig_question"].strip(":")} {passage(row)}.\n{passage(row)}. {row["question"].strip()}'


def passage(row: dict) -> str:
    """The text without TriviaQA's marks of paragraphs, documents and titles."""
    return without_ending(re.sub(r'\[(PAR|DOC|TLE)\]', '', row['context']), row['question'].strip())


def completed(row: dict) -> str:
    """SQuAD: a text whose last sentence is incomplete."""
    return row['text'].strip()


def completed_twice(row: dict) -> str:
    return f'{row["question"]} {row["context"].split("Question:")[0]}\n{completed(row)}'


def target(row: dict) -> str:
    return answers(row)[0]


def contains(row: dict, results: list[str]) -> dict[str, int]:
    """Whether the model's output contains an answer, case-insensitively."""
    return {'contains': int(any(x.lower() in results[0].lower() for x in answers(row)))}
