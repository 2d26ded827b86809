"""lm_eval on a saved checkpoint: the tasks of Table 2 and of the recall suite on small local data of the same format, and
local tasks of its three kinds, whose figures are those that the model gives for one text at a time."""

import importlib.util
import json
import re

import pytest

from fla_longhorn.contrib.lm_eval import TASKS
from fla_longhorn.contrib.lm_eval.__main__ import main
from fla_longhorn.contrib.lm_eval.tables import TABLES, markdown
from tests import forks

pytestmark = pytest.mark.xdist_group('evaluation')
spec = importlib.util.spec_from_file_location('recall', TASKS / 'recall.py')
recall = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recall)

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


def write_table_2(folder) -> None:
    """Each dataset as a folder of its name, which `datasets` reads in place of the hub's."""
    for path in {path for path, _ in TABLE_2}:
        configs = [name for other, name in TABLE_2 if other == path]
        (folder / path).mkdir(parents=True)
        head = ['---', 'configs:']
        for name in configs:
            head += [f'- config_name: {name}', '  data_files:']
            for split in ('train', 'validation', 'test'):
                head += [f'  - split: {split}', f'    path: {name}.jsonl']
            (folder / path / f'{name}.jsonl').write_text(3 * (json.dumps(TABLE_2[path, name]) + '\n'))
        (folder / path / 'README.md').write_text('\n'.join([*head, '---', '']))


def write_recall(folder) -> None:
    folder.mkdir()
    for name, row in RECALL.items():
        # the last has no answer, and is left out
        rows = [row, row, row | {'value': '', 'answers': []}]
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory, device):
    """A report, its results by task and its samples by task, on a small checkpoint, and the figures of the local tasks."""
    folder = tmp_path_factory.mktemp('evaluation')
    printed = forks.output('-m', 'fla_longhorn', forks.SCRIPTS / 'make_checkpoint.py', folder, device, cwd=folder)
    write_table_2(folder)
    write_recall(folder / 'recall')
    tasks = forks.output('-m', 'fla_longhorn.contrib.lm_eval', cwd=folder).strip()
    forks.output(
        '-m', 'fla_longhorn', '-m', 'lm_eval', 'run', '--model', 'hf', '--model_args', 'pretrained=checkpoint,dtype=float32',
        '--tasks', 'longhorn_table2', 'longhorn_recall', 'longhorn_recall_twice', forks.SCRIPTS / 'tasks' / '*.yaml',
        '--include_path', tasks, '--device', device,
        '--metadata', json.dumps({'recall_data': str(folder / 'recall')}), '--batch_size', 4, '--output_path', 'out',
        '--log_samples', cwd=folder,
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
def test_recall(evaluated):
    """Prompts are those of `recall`, an answer counts where it is contained, and texts are cut around it."""
    _, results, samples, _ = evaluated
    for task in ('fda', 'swde', 'squad', 'nq', 'triviaqa', 'drop'):
        for suffix in ('', '_twice'):
            some = samples[f'longhorn_{task}{suffix}']
            assert len(some) == 2
            for sample in some:
                written = sample['resps'][0][0].lower()
                assert sample['contains'] == int(any(x.lower() in written for x in recall.answers(sample['doc'])))
            contained = sum(sample['contains'] for sample in some) / 2
            assert results[f'longhorn_{task}{suffix}']['contains,none'] == contained
    doc = samples['longhorn_fda'][0]['doc']
    # a byte is a token of this checkpoint
    assert len(doc['text'].encode()) == recall.TEXT_TOKENS
    assert 'The device is a Longhorn 3.' in doc['text']


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


def test_no_tokenizer():
    with pytest.raises(ValueError, match='give lm_eval the model argument pretrained or tokenizer'):
        recall.documents('a/b', 'text')


def test_tables():
    """A task that was not run is said to be."""
    text = markdown({'piqa': {'acc,none': 0.5}})
    assert '| this run | 50.00 | not run |' in text and 'Recall' not in text
    with pytest.raises(ValueError, match=r"results has none of the tasks of the tables: got \['other'\]"):
        markdown({'other': {}})
