"""Language models in onnxruntime: the tokens and logits of PyTorch, from one file for all batches and lengths."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fla_longhorn import LonghornForCausalLM
from fla_longhorn_extras.onnx.export import export_onnx
from fla_longhorn_extras.onnx.generate import Model, generate
from fla_longhorn_extras.with_states import WithStates
from tests.models.test_longhorn import VARIANTS, small

OPTIONS = {
    'paper': {},
    'exact': {'exact': True, 'tie_word_embeddings': False},
    'exact, heads': VARIANTS['exact'],
    'scalar': VARIANTS['untied'],
    'negative': {**VARIANTS['plain modules'], 'allow_neg_eigval': True, 'conv_size': 1, 'conv_bias': False},
    'negative, exact': {
        'allow_neg_eigval': True, 'exact': True, 'num_heads': 4, 'expand': 1.5, 'beta_rank': 3, 'tie_word_embeddings': False,
    },
}


def build(**options) -> LonghornForCausalLM:
    """With logits far apart."""
    torch.manual_seed(1)
    model = LonghornForCausalLM(small(eos_token_id=None, bos_token_id=None, **options)).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    return model


@pytest.fixture(scope='module', params=OPTIONS)
def exported(request, tmp_path_factory) -> tuple[LonghornForCausalLM, Path]:
    folder, model = tmp_path_factory.mktemp('model'), build(num_hidden_layers=2, **OPTIONS[request.param])
    export_onnx(model, folder)
    return model, folder


@pytest.fixture(scope='module')
def pair(exported) -> tuple[LonghornForCausalLM, Model]:
    model, folder = exported
    return model, Model(folder, threads=1)


def tokens(B: int, T: int) -> torch.Tensor:
    return torch.randint(53, (B, T))


@pytest.mark.parametrize(('B', 'T'), [(1, 1), (1, 2), (3, 1), (3, 9), (1, 64), (1, 65), (2, 130)])
def test_logits_and_states(pair, B, T):
    """From random states too, against PyTorch without a cache or with one."""
    model, graph = pair
    ids = tokens(B, T)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    logits, states = graph(ids.numpy(), graph.new_states(B))
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-4, rtol=0)
    before = [torch.randn(x.shape) for x in states]
    with torch.no_grad():
        expected = WithStates(model)(ids, *before)
    logits, after = graph(ids.numpy(), [x.numpy() for x in before])
    for own, x in zip((logits, *after), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), x, atol=1e-4, rtol=0)


@pytest.mark.parametrize(('B', 'T'), [(1, 1), (3, 1), (1, 70), (3, 12)])
def test_same_greedy_tokens(pair, B, T):
    model, graph = pair
    ids = tokens(B, T)
    # all ones: `generate` takes tokens that are the pad token for padding
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)[:, T:]
    # not the same token again and again
    assert all(len(set(row)) > 5 for row in expected.tolist())
    assert generate(graph, ids.tolist(), 200) == expected.tolist()


def test_pieces(pair):
    _, graph = pair
    ids = tokens(2, 40).numpy()
    expected, states = graph(ids, graph.new_states(2))
    for cuts in ([1], [17], [39], [3, 4, 30]):
        piecewise = graph.new_states(2)
        for piece in np.split(ids, cuts, 1):
            logits, piecewise = graph(piece, piecewise)
        for own, x in zip((logits, *piecewise), (expected, *states), strict=True):
            np.testing.assert_allclose(own, x, atol=1e-5)
