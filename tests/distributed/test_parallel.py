"""Tensor and pipeline parallelism on four ranks: losses, gradients, generation and checkpoints are those of one process."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fla_longhorn import Longhorn, LonghornForCausalLM
from fla_longhorn.models import tensor_parallel_plan
from tests import forks
from tests.distributed.scripts import parallel
from tests.distributed.scripts.parallel import HYBRID, ON_FOUR, OPTIONS, STEPS, make_batches, make_model, make_optimizer, train

pytestmark = [pytest.mark.xdist_group('tensor parallel'), pytest.mark.slow]


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('parallel')
    forks.output('-m', 'tests.distributed.scripts.parallel', path)
    return path


@pytest.fixture(scope='module')
def found(folder) -> dict:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob('*.json')}


def is_close(errors: dict[str, float]) -> bool:
    return errors.pop('loss') <= 1e-6 and max(errors.values()) <= 1e-4


@pytest.mark.parametrize('name', [*OPTIONS, *(f'{name}, four ranks' for name in ON_FOUR)])
def test_options(found, name):
    assert is_close(found['options'][name]), found['options'][name]


def test_losses_of_rows(found):
    model = make_model(intermediate_size=64)
    expected = train(model, make_optimizer(model), parallel.rows, make_batches())
    assert found['curves']['FSDP2, tensor'] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_losses_of_context_parallel(found, exact):
    model = make_model(exact=exact, num_heads=2)
    expected = train(model, make_optimizer(model), parallel.packed, make_batches())
    assert found['curves'][f'context, FSDP2, tensor, {"exact" if exact else "diagonal"}'] == pytest.approx(expected, rel=1e-4)


def test_checkpoint_of_another_split(found):
    curves = found['curves']
    assert curves['tensor, from the checkpoint'] == pytest.approx(curves['FSDP2, tensor'][STEPS // 2:], rel=1e-4)


def test_checkpoint_in_one_process(found, folder):
    model = make_model(intermediate_size=64)
    optimizer = make_optimizer(model)
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / 'dcp', no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optimizer'])
    losses = train(model, optimizer, parallel.rows, make_batches()[STEPS // 2:])
    assert losses == pytest.approx(found['curves']['FSDP2, tensor'][STEPS // 2:], rel=1e-4)


@pytest.mark.parametrize('name', ['tensor', 'FSDP2, tensor'])
def test_from_pretrained(found, folder, name):
    names = {x for x, _ in make_model(3, **HYBRID).named_parameters()}
    split = set(found['transformers'][f'split, {name}'])
    # transformers leaves norms as they are
    assert split == (names if 'FSDP2' in name else {x for x in names if 'norm' not in x})
    assert is_close(found['transformers'][name]), found['transformers'][name]
    saved = AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    for key, x in make_model(3, **HYBRID).state_dict().items():
        assert torch.equal(saved[key], x), key


@pytest.mark.parametrize('name', ['greedy', 'prompt lookup'])
def test_generation(found, name):
    tokens, expected = found['transformers'][f'generated, {name}']
    assert tokens == expected


def test_cache_of_a_rank(found):
    """A head of four, of 16 channels."""
    assert found['transformers']['cached'] == [[2, 1, 6, 16], [2, 16, 4]]


@pytest.mark.parametrize('name', ['by hand, tensor', 'traced'])
def test_pipeline(found, name):
    def loss_of(model: LonghornForCausalLM, batch: torch.Tensor) -> torch.Tensor:
        # equal lengths, so that the mean of two microbatches is that of the batch
        return parallel.next_token_loss(model(batch, use_cache=False).logits, batch)

    model = make_model(3, tie_word_embeddings=False, num_heads=2)
    expected = train(model, make_optimizer(model), loss_of, make_batches(), max_norm=math.inf)
    assert found['pipeline'][name] == pytest.approx(expected, rel=1e-4)


def test_plan_of_another_model():
    with pytest.raises(TypeError, match='model must be one of Longhorn.s models, .* got Longhorn'):
        tensor_parallel_plan(Longhorn(hidden_size=16))


def test_pipeline_of_transformers():
    with pytest.raises(ValueError, match='pp_size must be 1'):
        LonghornForCausalLM.prepare_distribute_model(DistributedConfig(pp_size=2))
