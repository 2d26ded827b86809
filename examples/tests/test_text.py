"""The example that learns to write: the command leaves its files, the saved model writes as before, and texts are held out."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from examples.text.__main__ import main
from examples.text.card import model_card
from examples.text.config import RunArguments
from examples.text.corpus import TextArguments, documents
from examples.text.data import END, byte_tokenizer, read_texts, to_rows
from examples.text.write import main as write_again
from examples.text.write import write

SMALL = {
    'held_out_every': 3, 'hidden_size': 32, 'num_hidden_layers': 1, 'state_size': 4, 'steps': 20, 'batch_size': 4,
    'block_size': 64, 'lengths': 64, 'learning_rate': 1e-2, 'prompts': 'hé', 'max_new_tokens': 40,
    'temperature': 0, 'target_bits': 8,
}
SHARED = 'a long line that a held-out file has too: {}'


@pytest.fixture
def files(tmp_path):
    """Six files; the third and the sixth are held out, and the first has a long line of the third."""
    folder = tmp_path / 'texts'
    folder.mkdir()
    for i in range(6):
        lines = [f'file {i} line {n}: naïve 你好 🙂' for n in range(50)]
        lines += ['short, in all files', '  ' + SHARED.format(2 if i == 0 else i)]
        (folder / f'{i}.txt').write_text('\n'.join(lines), encoding='utf-8', newline='\r\n' if i == 1 else '\n')
    return f'{folder}/*.txt'


def run_command(folder, files, device, **changes) -> int:
    named = SMALL | changes | {'files': files, 'output_dir': folder, 'device': device}
    return main([f'--{name}={value}' for name, value in named.items()])


def test_the_command(tmp_path, files, device, capsys):
    assert run_command(tmp_path / 'out', files, device) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / 'out' / 'text.json').read_text())
    assert 3 < report['bits_per_byte'] < 8 and len(report['baselines']) == 3
    # of what the held-out text holds, and as read in one pass
    assert list(report['bits_by_length']) == ['64', '1024'] and report['bits_by_length']['1024'] == report['bits_per_byte']
    assert report['bits_by_length']['64'] != report['bits_per_byte']
    assert report['held_out_files'] == ['texts/2.txt', 'texts/5.txt'] and report['read_bytes'] == 20 * 4 * 64
    losses = [entry['loss'] for entry in report['history'] if 'loss' in entry]
    assert losses[-1] < losses[0]

    card = ModelCard.load(tmp_path / 'out' / 'README.md')
    assert card.data.eval_results[0].metric_value == round(report['bits_per_byte'], 4)
    assert f'**{report["bits_per_byte"]:.2f}**' in card.text and report['command'] in card.text and 'texts/5.txt' in card.text

    sample, = report['samples']
    assert sample['text'].startswith('hé') and len(sample['text']) > 2 and sample['text'] in printed
    # the last line is the command
    python, *command = shlex.split(printed.splitlines()[-1])
    assert Path.cwd() / python == Path(sys.executable)
    assert command == ['-m', 'examples.text.write', str(tmp_path / 'out'), 'hé']
    assert write_again([*command[2:], '--max_new_tokens=40', '--temperature=0']) == 0
    assert capsys.readouterr().out == sample['text'] + '\n'


def test_the_card_of_an_own_file(tmp_path, files, device, capsys):
    """It states what is so of this text: no licence, no language, no other files, no lines removed."""
    path = tmp_path / 'texts/4.txt'
    path.write_bytes(3 * path.read_bytes())
    assert run_command(tmp_path / 'out', str(path), device, steps=1, max_new_tokens=2) == 0
    report = json.loads((tmp_path / 'out' / 'text.json').read_text())
    card, printed = ModelCard.load(tmp_path / 'out' / 'README.md'), capsys.readouterr().out
    assert card.data.language is None and '1 file,' in card.text
    assert f'Held-out text: {report["held_out_bytes"]:,} bytes, at most 16,384 of each: the end of texts/4.txt.' in card.text
    assert not [x for x in ('licence of', 'PSF', 'English', 'other texts', 'removed', '1 files') if x in card.text]
    assert '1 file of' in printed and 'bytes of 1 file' in printed


def test_the_card_of_installed_files():
    about = {'files': ['descriptions']} | dict.fromkeys((
        'steps', 'batch_size', 'block_size', 'learning_rate', 'seed', 'exact', 'num_hidden_layers', 'hidden_size',
        'state_size',
    ), 1)
    report = {
        'options': about, 'seconds': {'training': 1., 'processor': 1.}, 'bits_per_byte': 2., 'baselines': {}, 'samples': [],
        'parameters': 1, 'command': '', 'train_files': ['a', 'b'], 'train_bytes': 1, 'read_bytes': 1, 'held_out_bytes': 1,
        'held_out_files': ['c'], 'removed_bytes': 7, 'device': 'cpu', 'threads': 1, 'versions': {'torch': '2'},
    }
    card = model_card(report)
    assert card.data.language == 'en' and '2 files,' in card.text and 'training text: 7 bytes' in card.text
    assert 'licence of its package' in card.text and 'PSF' not in card.text and 'English' in card.text


class Speaker:
    """In place of a model: it says `text`, byte by byte, and notes what is on the screen after each."""

    device = torch.device('cpu')

    def __init__(self, text: str, capsys):
        self.text, self.capsys, self.pieces = text, capsys, []

    def generate(self, ids, streamer, **options):
        tokens = [ids, *torch.tensor([[*self.text.encode(), END]]).split(1, dim=1)]
        for token in tokens:
            streamer.put(token[0])
            self.pieces.append(self.capsys.readouterr().out)
        streamer.end()
        self.pieces.append(self.capsys.readouterr().out)
        return torch.cat(tokens, dim=1)


def test_the_stream_joins_characters(capsys):
    speaker = Speaker('ïve 你好吗 🙂🙂 é\nΩ ende', capsys)
    assert write(speaker, byte_tokenizer(), 'na', 99, 0, 0) == 'na' + speaker.text
    assert ''.join(speaker.pieces) == f'na{speaker.text}\n'
    assert '\N{REPLACEMENT CHARACTER}' not in ''.join(speaker.pieces)
    # it did not wait for the end
    assert len([piece for piece in speaker.pieces[:-1] if piece]) >= 6


def test_texts_are_apart(files):
    texts = read_texts([files], 3)
    train, held_out = (b'\n'.join(x).decode() for x in (texts.train, texts.held_out))
    assert texts.train_files == [f'texts/{i}.txt' for i in (0, 1, 3, 4)]
    assert SHARED.format(2) in held_out and SHARED.format(2) not in train
    assert SHARED.format(3) in train and 'short, in all files' in train and '\r' not in train
    assert texts.removed_bytes == len('  ' + SHARED.format(2))
    assert 'file 2' not in train and 'file 1' not in held_out


def test_one_file(tmp_path, files):
    """Its end is held out, in bytes of whole training text before it."""
    text = (tmp_path / 'texts/4.txt').read_bytes()
    texts = read_texts([str(tmp_path / 'texts/4.txt')], 5)
    assert texts.train[0] + texts.held_out[0] == text and len(texts.held_out[0]) == len(text) // 5
    assert texts.held_out_files == ['the end of texts/4.txt']
    one = TextArguments(files=[str(tmp_path / 'texts/4.txt')])
    halves = [list(documents(one, held_out)['text']) for held_out in (False, True)]
    assert (len(halves[0]), len(halves[1])) == (19, 1) and ''.join(halves[0] + halves[1]) == text.decode()


def test_tokens():
    text = 'naïve 你好 🙂 \x00'
    tokenizer = byte_tokenizer()
    assert tokenizer(text)['input_ids'] == list(text.encode()) and len(tokenizer) == END + 1
    assert tokenizer.decode(list(text.encode())) == text and tokenizer.eos_token_id == END
    assert to_rows([b'ab', b'cde'], 3).tolist() == [[97, 98, END], [99, 100, 101]]


@pytest.mark.parametrize(('name', 'options'), [
    ('steps', {'steps': 0}),
    ('held_out_every', {'held_out_every': 1}),
    ('lengths', {'lengths': [1]}),
    ('temperature', {'temperature': -1}),
    ('device', {'device': 'tpu'}),
])
def test_bad_options(name, options):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        RunArguments(**options)
