"""Texts and prompts of the recall suite, as `Just read twice` (arXiv 2407.05483) sets them; written for lm_eval's YAML files.

Each text is followed by a question whose answer it contains; a continuation with the answer in it counts.
Longer texts are cut to 950 tokens around what is asked for, as that paper's runs were (1000 with 50 for the answer).
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
    """The validation documents of `source`, their `field` cut to its part around the answer.

    `pretrained` and `tokenizer` are lm_eval's model arguments; `recall_data` a folder with a JSON-lines file by the last part
    of each source's name, in place of the hub.
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
    rows = [cut(without_summary(row, field), field, encoder) for row in data if len(answers(row)[0]) > 1]
    return {'validation': datasets.Dataset.from_list(rows)}


def answers(row: dict) -> list[str]:
    """All that count as right; the first is never missing."""
    found = row.get('answers') or [row.get('value') or '']
    return [x.strip() for x in found]


def without_summary(row: dict, field: str) -> dict:
    """SWDE's texts end with the authors' own prompt."""
    return row | {field: row[field].split(SUMMARY)[0]}


def cut(row: dict, field: str, tokenizer) -> dict:
    """`TEXT_TOKENS` tokens of the text, with the first mention of what is asked for in their middle; a short text is kept."""
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
    """The text without its repeated ending, in any case of letters, and without a last full stop."""
    text = text.strip()
    while ending and text.lower().endswith(ending.lower()):
        text = text[:-len(ending)].strip()
    return text.strip('.').strip()


def key_of(row: dict) -> str:
    return row['key'][0].upper() + row['key'][1:]


def keyed(row: dict) -> str:
    """FDA, SWDE: the text, then the name of one of its facts."""
    return f'{without_ending(row["text"], row["key"] + ":")}. {key_of(row)}:'


def keyed_twice(row: dict) -> str:
    text = without_ending(row['text'], row['key'] + ':') + '.'
    return f'Information about {key_of(row)}. {text}\n{text} {key_of(row)}:'


def asked(row: dict) -> str:
    """NQ, TriviaQA, DROP: the text, then a question in the form of a sentence to end."""
    return f'{passage(row)}. {row["question"].strip()}'


def asked_twice(row: dict) -> str:
    return f'{row["orig_question"].strip(":")} {passage(row)}.\n{passage(row)}. {row["question"].strip()}'


def passage(row: dict) -> str:
    """Without the marks of paragraphs, documents and titles that TriviaQA has."""
    return without_ending(re.sub(r'\[(PAR|DOC|TLE)\]', '', row['context']), row['question'].strip())


def completed(row: dict) -> str:
    """SQuAD: a text whose last sentence is to be ended."""
    return row['text'].strip()


def completed_twice(row: dict) -> str:
    return f'{row["question"]} {row["context"].split("Question:")[0]}\n{completed(row)}'


def target(row: dict) -> str:
    return answers(row)[0]


def contains(row: dict, results: list[str]) -> dict[str, int]:
    """Whether one of the answers is in what the model wrote, in any case of letters."""
    return {'contains': int(any(x.lower() in results[0].lower() for x in answers(row)))}
