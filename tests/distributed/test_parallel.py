"""Tensor and pipeline parallelism on four ranks: losses, gradients, generation and checkpoints are those of one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fla_longhorn import Longhorn, LonghornForCausalLM
from fla_longhorn.models import tensor_parallel_plan
from tests import forks
from tests.distributed.scripts import parallel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('name', ['options', 'pipeline'])
def test_equals_one_process(name, tmp_path):
    forks.output('-m', 'tests.distributed.scripts.parallel', name, tmp_path)


def test_curves_and_a_checkpoint_in_one_process(tmp_path):
    forks.output('-m', 'tests.distributed.scripts.parallel', 'curves', tmp_path)
    model = parallel.make_model(intermediate_size=64)
    optimizer, half = parallel.make_optimizer(model), parallel.STEPS // 2
    parallel.load_checkpoint(model, optimizer, tmp_path, no_dist=True)
    losses = parallel.train(model, optimizer, parallel.rows, parallel.make_batches()[half:])
    parallel.assert_same(losses, parallel.curve(parallel.rows, intermediate_size=64)[half:])


def test_transformers(tmp_path):
    forks.output('-m', 'tests.distributed.scripts.parallel', 'transformers', tmp_path)
    for name in parallel.SPLITS:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for key, x in parallel.make_model(3, **parallel.HYBRID).state_dict().items():
            assert torch.equal(saved[key], x), key


def test_plan_of_another_model():
    with pytest.raises(TypeError, match='model must be one of Longhorn.s models, .* got Longhorn'):
        tensor_parallel_plan(Longhorn(hidden_size=16))


def test_pipeline_of_transformers():
    with pytest.raises(ValueError, match='pp_size must be 1'):
        LonghornForCausalLM.prepare_distribute_model(DistributedConfig(pp_size=2))
