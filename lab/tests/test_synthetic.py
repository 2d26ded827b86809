"""The tasks of state tracking and of MAD, and fla's operators in PyTorch."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fla.layers.mamba2 import Mamba2
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_recurrent_kda
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from examples.mqar.data import IGNORE
from lab.experiments import chunkwise, mqar, without_gpu
from lab.experiments.synthetic import TASKS, cayley_table


def draw(task: str, seq_len: int, **options) -> tuple[list, list]:
    return tuple(x.tolist() for x in TASKS[task](np.random.default_rng(0), 40, seq_len, **options))


@pytest.mark.parametrize('group', ['Z2', 'Z5', 'S3', 'S5'])
def test_groups(group):
    """Associative, with an identity 0 and inverses; the product so far is right at each token."""
    table = cayley_table(group)
    elements = np.arange(len(table))
    assert len(table) == {'Z2': 2, 'Z5': 5, 'S3': 6, 'S5': 120}[group] and (np.sort(table, 0) == elements[:, None]).all()
    assert (table[0] == elements).all() and (table[:, 0] == elements).all()
    assert (table[table] == table[elements[:, None, None], table]).all() and (table != table.T).any() == (group[0] == 'S')
    for tokens, targets in zip(*draw('products', 9, group=group), strict=True):
        product = 0
        for token, target in zip(tokens, targets, strict=True):
            product = table[product, token]
            assert target == product


@pytest.mark.parametrize('options', [{}, {'noise': 0.3, 'noise_tokens': 6}])
def test_recall(options):
    noisy, asked = 0, 0
    for tokens, targets in zip(*draw('recall', 32, vocab_size=16, **options), strict=True):
        seen = {}
        for i in range(0, 32, 2):
            (key, value), (target, rest) = tokens[i:i + 2], targets[i:i + 2]
            assert rest == IGNORE
            if key >= 16 - options.get('noise_tokens', 0):
                noisy += 1
                assert target == IGNORE
                continue
            assert target == seen.get(key, IGNORE) and seen.setdefault(key, value) == value
            asked += target != IGNORE
    assert asked and bool(noisy) == bool(options)


@pytest.mark.parametrize('T', [5, 37])
def test_chunks(T):
    """Outputs and gradients of fla's operators, against its token by token."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, T, 2, 8), chunkwise.normalised(torch.randn(2, T, 2, 8)), torch.randn(2, T, 2, 5)
    g, beta = F.logsigmoid(4 * torch.randn(2, T, 2, 8)), 2 * torch.rand(2, T, 2)
    zeros = torch.zeros(2, T, 2)

    def gated(q, k, v, g, beta):
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g)

    for got, expected, inputs in (
        (chunkwise.chunk_gla, naive_recurrent_gla, (q, k, v, g)),
        (chunkwise.chunk_delta_rule, lambda q, k, v, beta: gated(q, k, v, zeros, beta), (q, k, v, beta)),
        (chunkwise.chunk_gated_delta_rule, gated, (q, k, v, g[..., 0], beta)),
        (chunkwise.chunk_gated_delta_rule, naive_recurrent_kda, (q, k, v, g, beta)),
    ):
        inputs = [x.clone().requires_grad_() for x in inputs]
        a, b = (op(*inputs)[0] for op in (got, expected))
        assert (a - b).norm() < 1e-5 * b.norm()
        do = torch.randn_like(a)
        for dx, dy in zip(torch.autograd.grad(a, inputs, do), torch.autograd.grad(b, inputs, do), strict=True):
            assert (dx - dy).norm() < 1e-4 * dy.norm()


@pytest.mark.parametrize('options', [{'n_groups': 1}, {'n_groups': 4}, {'dt_limit': [0.01, 0.05]}], ids=str)
def test_mamba2(options, monkeypatch):
    """fla's layer with the chunked operator against its own loop: outputs, gradients, and a token after the sequence."""
    set_seed(0)
    model = AutoConfig.for_model(
        'mamba2', hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, vocab_size=20, chunk_size=8,
        **options,
    )
    model = AutoModelForCausalLM.from_config(model)
    for x in model.parameters():
        # the state is near zero with fla's initialisation
        if x.dim() > 1:
            x.data.normal_(std=0.5)
    tokens = torch.randint(0, 20, (2, 37))
    results = []
    without_gpu.install()
    for forward in (without_gpu.mamba2_loop, without_gpu.mamba2_forward):
        monkeypatch.setattr(Mamba2, 'torch_forward', forward)
        model.zero_grad()
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with torch.no_grad():
            past = model.eval()(input_ids=tokens[:, :-1], use_cache=True).past_key_values
            step = model(input_ids=tokens[:, -1:], past_key_values=past, use_cache=True).logits
        results.append((loss.detach(), step, {name: x.grad.clone() for name, x in model.named_parameters()}))
    expected, got = results
    assert torch.allclose(expected[0], got[0], rtol=1e-6)
    assert (expected[1] - got[1]).norm() < 1e-5 * expected[1].norm()
    for name, dx in expected[2].items():
        assert (dx - got[2][name]).norm() < 1e-4 * dx.norm(), name


def test_run(tmp_path):
    """A grid from the setting to accuracies by length, and a task with a decoder of its own."""
    setting = {
        'title': 'tiny', 'rules': 'synthetic', 'columns': ['task', 'mixer'], 'plot': {'x': 'step', 'panels': 'seq_len'},
        'options': {
            'seq_len': 8, 'longest': 32, 'num_hidden_layers': 1, 'hidden_size': 16, 'state_size': 4, 'train_size': 64,
            'test_size': 32, 'epochs': 1, 'batch_size': 32, 'weight_decay': 0.1, 'embed_dropout': 0.0, 'stop_recall': 0.99,
            'tie_word_embeddings': False, 'initializer_range': 0.02, 'seed': 0, 'learning_rate': 1e-2,
        },
        'grid': {
            'task': [{'task': 'products', 'task_options': {'group': 'Z2'}}, {
                'task': 'compression', 'task_options': {'vocab_size': 5}, 'longest': 8,
            }],
            'mixer': ['exact', 'GLA', 'exact, negative eigenvalues'],
        },
    }
    path = tmp_path / 'tiny.json'
    path.write_text(json.dumps(setting))
    mqar.main([str(path), '--output_dir', str(tmp_path)])
    runs = json.loads((tmp_path / 'results.json').read_text())['runs']
    assert [run['cell']['mixer'] for run in runs] == 2 * setting['grid']['mixer']
    assert all(list(run['by_length']) == (['8', '16', '32'] if run['cell']['task'] == 'products' else ['8']) for run in runs)
