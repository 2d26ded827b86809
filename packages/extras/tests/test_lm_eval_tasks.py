"""lm_eval on a saved checkpoint: the tasks of Table 2, of the recall suite and of long texts on small local data of the same
format, and local tasks of its three kinds, whose figures are those that the model gives for one text at a time."""

import importlib.util
import json
import re

import pytest

from fla_longhorn_extras.lm_eval import TASKS
from fla_longhorn_extras.lm_eval.__main__ import main
from fla_longhorn_extras.lm_eval.tables import TABLES, markdown
from tests import forks

pytestmark = pytest.mark.xdist_group('evaluation')


def load(name: str):
    """The module beside the tasks, which lm_eval loads by its path."""
    spec = importlib.util.spec_from_file_location(name, TASKS / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recall = load('recall')
# the values of S-NIAH 1 to 3
VALUES = {1: r'\d{7}', 2: r'\d{7}', 3: r'[0-9a-f]{8}-[0-9a-f-]{27}'}

LONG = ' '.join(f'sentence {i}.' for i in range(300))
KEYED = {'key': 'device name', 'value': ' Longhorn 3 ', 'text': f'{LONG} The device is a Longhorn 3. {LONG} device name:'}
ASKED = {
    'context': '[TLE] Herds [PAR] The bull is called Ferdinand.. the bull is', 'question': 'The bull is',
    'orig_question': 'What is the bull called?', 'answers': ['Ferdinand', 'Ferdi'], 'value': 'Ferdinand',
}
COMPLETED = {
    'context': 'Texas has 5 herds. Question: how many?', 'question': 'How many herds?', 'value': '50',
    'text': 'Texas has 50 herds.\nThe number of herds in Texas is ',
}
RECALL = {
    'based-fda': KEYED, 'based-swde-v2': KEYED | {'text': f'Herds. {recall.SUMMARY} device name:'}, 'based-squad': COMPLETED,
    'based_nq_1024': ASKED, 'based_triviaqa': ASKED, 'based_drop': ASKED,
}
# by the dataset's path and configuration, a document as it is on the hub
TABLE_2 = {
    ('baber/piqa', 'default'): {'goal': 'Open a jar', 'sol1': 'Turn the lid.', 'sol2': 'Eat the lid.', 'label': 0},
    ('Rowan/hellaswag', 'default'): {
        'ctx_a': 'A man rides.', 'ctx_b': 'he', 'activity_label': 'Riding', 'endings': ['falls.', 'flies.', 'dies.', 'sings.'],
        'label': '1',
    },
    ('allenai/winogrande', 'winogrande_xl'): {
        'sentence': 'Ann thanked Eve because _ had helped.', 'option1': 'Ann', 'option2': 'Eve', 'answer': '2',
    },
    ('allenai/ai2_arc', 'ARC-Easy'): {
        'question': 'What is hot?', 'choices': {'label': ['A', 'B'], 'text': ['fire', 'ice']}, 'answerKey': 'A',
    },
    ('allenai/ai2_arc', 'ARC-Challenge'): {
        'question': 'What is cold?', 'choices': {'label': ['A', 'B'], 'text': ['fire', 'ice']}, 'answerKey': 'B',
    },
    ('allenai/openbookqa', 'main'): {
        'question_stem': 'The sun is', 'choices': {'label': ['A', 'B'], 'text': ['a star', 'a fish']}, 'answerKey': 'A',
    },
    ('lighteval/siqa', 'default'): {
        'context': 'Jan sang.', 'question': 'Why?', 'answerA': 'for joy', 'answerB': 'for food', 'answerC': 'no', 'label': '1',
    },
    ('aps/super_glue', 'boolq'): {'passage': 'Cows eat grass.', 'question': 'do cows eat grass', 'label': 1},
}
LONG_TEXTS = {
    ('EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1'): {'page': ' = Cows = \n Cows eat 5 @,@ 000 blades . \n'},
    ('EleutherAI/lambada_openai', 'default'): {'text': 'Cows eat grass.'},
    ('baber/paul_graham_essays', 'default'): {'text': 'I like cows. They eat grass and sleep in the sun. ' * 50},
    **{('Xnhyacinth/LongBench', task): {
        'context': 'Cows eat grass.', 'question': 'What do cows eat?', 'answers': ['Paragraph 1, 段落1'],
        'all_classes': ['grass', 'hay'],
    } for task in (
        '2wikimqa', 'dureader', 'gov_report', 'hotpotqa', 'lcc', 'lsht', 'multi_news', 'multifieldqa_en', 'multifieldqa_zh',
        'musique', 'narrativeqa', 'passage_count', 'passage_retrieval_en', 'passage_retrieval_zh', 'qasper', 'qmsum',
        'repobench-p', 'samsum', 'trec', 'triviaqa', 'vcsum',
    )},
}
NEEDLES = {'max_seq_lengths': [4096, 8192], 'num_samples': 3}


def write_datasets(folder, documents) -> None:
    """Each dataset as a folder of its name, which `datasets` reads in place of the hub's."""
    for path in {path for path, _ in documents}:
        configs = [name for other, name in documents if other == path]
        (folder / path).mkdir(parents=True)
        head = ['---', 'configs:']
        for name in configs:
            head += [f'- config_name: {name}', '  data_files:']
            for split in ('train', 'validation', 'test'):
                head += [f'  - split: {split}', f'    path: {name}.jsonl']
            (folder / path / f'{name}.jsonl').write_text(3 * (json.dumps(documents[path, name]) + '\n'))
        (folder / path / 'README.md').write_text('\n'.join([*head, '---', '']))


def write_recall(folder) -> None:
    folder.mkdir()
    for name, row in RECALL.items():
        # the last has no answer, and is left out
        rows = [row, row, row | {'value': '', 'answers': []}]
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def write_sentence_tokenizer(folder) -> None:
    """NLTK's tables for English, without abbreviations: RULER cuts its haystack into sentences."""
    tables = folder / 'tokenizers' / 'punkt_tab' / 'english'
    tables.mkdir(parents=True)
    for name in ('collocations.tab', 'sent_starters.txt', 'abbrev_types.txt', 'ortho_context.tab'):
        (tables / name).write_text('')


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory, device):
    """A report, its results by task and its samples by task, on a small checkpoint, and the figures of the local tasks."""
    folder = tmp_path_factory.mktemp('evaluation')
    printed = forks.output(forks.SCRIPTS / 'make_checkpoint.py', folder, device, cwd=folder)
    write_datasets(folder, TABLE_2 | LONG_TEXTS)
    write_recall(folder / 'recall')
    write_sentence_tokenizer(folder / 'nltk')
    tasks = forks.output('-m', 'fla_longhorn_extras.lm_eval', cwd=folder).strip()
    forks.output(
        '-c', "import runpy, fla_longhorn; runpy.run_module('lm_eval', run_name='__main__', alter_sys=True)", 'run',
        '--model', 'hf', '--model_args', 'pretrained=checkpoint,dtype=float32,max_length=8192',
        '--tasks', 'longhorn_table2', 'longhorn_recall', 'longhorn_recall_twice', 'longhorn_long',
        forks.SCRIPTS / 'tasks' / '*.yaml', '--include_path', tasks, '--device', device,
        '--metadata', json.dumps({'recall_data': str(folder / 'recall')} | NEEDLES), '--batch_size', 4,
        '--output_path', 'out', '--log_samples', cwd=folder, env={'NLTK_DATA': str(folder / 'nltk')},
    )
    report, = (folder / 'out').rglob('results_*.json')
    samples = {
        re.match(r'samples_(.*)_\d{4}-', path.name)[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / 'out').rglob('samples_*.jsonl')
    }
    return report, json.loads(report.read_text())['results'], samples, json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_local_tasks(evaluated):
    _, results, samples, expected = evaluated
    assert results['unseen_text']['bits_per_byte,none'] == pytest.approx(expected['bits_per_byte'], rel=1e-4)
    assert results['unseen_text']['bits_per_byte,none'] < 5
    assert results['real_or_shuffled']['acc,none'] == expected['acc'] >= 0.75
    answers = [sample['resps'][0][0] for sample in samples['next_words']]
    assert 'exact_match,none' in results['next_words'] and len(answers) == 12 and any(answers)


@pytest.mark.slow
def test_each_column_is_measured(evaluated, capsys):
    """Every task and metric of the tables, and the command that sets them beside the printed figures."""
    report, results, *_ = evaluated
    for table in TABLES:
        for task, metric in table.columns.values():
            assert 0 <= results[task][f'{metric},none'] <= 1, (task, metric)
            others = [key for key in results[task] if key.endswith(',none') and 'stderr' not in key]
            assert metric == 'acc_norm' or others == [f'{metric},none']
    main([str(report)])
    printed = capsys.readouterr().out
    assert 'not run' not in printed
    assert printed.count('this run') == 3


@pytest.mark.slow
def test_long_texts(evaluated):
    """Each task has its figures; needles fill their length, lie at their depth, and are found where the output has them."""
    _, results, samples, _ = evaluated
    assert {'word_perplexity,none', 'bits_per_byte,none'} <= set(results['wikitext'])
    assert {'perplexity,none', 'acc,none'} <= set(results['lambada_openai'])
    assert all('score,none' in results[f'longbench_{name}'] for path, name in LONG_TEXTS if path.endswith('LongBench'))
    for i, pattern in VALUES.items():
        task = f'longhorn_niah_single_{i}'
        some = samples[task]
        assert len(some) == 6
        for sample in some:
            doc = sample['doc']
            value, = doc['outputs']
            assert re.fullmatch(pattern, value) and doc['input'].count(value) == 1
            # a byte is a token of this checkpoint
            assert doc['max_length'] / 2 < len(doc['input'].encode()) + 128 == doc['length'] <= doc['max_length']
            before = doc['input'][:round(doc['depth'] * len(doc['input']))]
            assert value not in before and doc['input'].startswith(value, len(before))
            prompt = sample['arguments']['gen_args_0']['arg_0']
            assert prompt.startswith(doc['input']) and prompt.endswith(' mentioned in the provided text is')
            assert sample[str(doc['max_length'])] == (value in sample['resps'][0][0])
        for length in NEEDLES['max_seq_lengths']:
            mean = sum(sample[str(length)] for sample in some if sample['doc']['max_length'] == length) / 3
            assert results[task][f'{length},none'] == mean


def test_needle_lengths(monkeypatch):
    """Refused: a length without a metric, and one that the generator's texts are far from."""
    niah = load('niah')
    with pytest.raises(ValueError, match=r'max_seq_lengths must be some of \(1024, .*\), got \[1000\]'):
        niah.documents('repeat', 'numbers', max_seq_lengths=[1000], pretrained='none')
    monkeypatch.setattr(niah, 'get_tokenizer', lambda name: None)
    monkeypatch.setattr(niah, 'generate_samples', lambda *args, **options: [{'length': 414}])
    with pytest.raises(ValueError, match='max_seq_lengths holds 1024, for which lm_eval makes a text of 414 tokens'):
        niah.documents('repeat', 'numbers', pretrained='none')


def test_prompts():
    short = KEYED | {'text': 'A device.\ndevice name:Device name:'}
    assert recall.keyed(short) == 'A device. Device name:'
    assert recall.keyed_twice(short) == 'Information about Device name. A device.\nA device. Device name:'
    assert recall.asked(ASKED) == 'Herds  The bull is called Ferdinand. The bull is'
    assert recall.asked_twice(ASKED) == (
        'What is the bull called? Herds  The bull is called Ferdinand.\nHerds  The bull is called Ferdinand. The bull is'
    )
    assert recall.completed(COMPLETED) == 'Texas has 50 herds.\nThe number of herds in Texas is'
    assert recall.completed_twice(COMPLETED) == (
        'How many herds? Texas has 5 herds. \nTexas has 50 herds.\nThe number of herds in Texas is'
    )
    assert recall.contains(ASKED, ['it is FERDI.']) == {'contains': 1}
    assert recall.contains(ASKED, ['a bull']) == {'contains': 0}


def test_tables():
    """A task that was not run is said to be."""
    text = markdown({'piqa': {'acc,none': 0.5}})
    assert '| this run | 50.00 | not run |' in text and 'Recall' not in text
    with pytest.raises(ValueError, match=r"results has none of the tasks of the tables: got \['other'\]"):
        markdown({'other': {}})
