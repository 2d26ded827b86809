"""In bfloat16 tokens may differ; the log-probabilities are as near to float32 as those of transformers in bfloat16."""

import copy

import pytest

from packages.serving.tests.checkpoints import all_log_probabilities, served_log_probabilities


@pytest.mark.parametrize('name', ['heads', 'exact', 'hybrid', 'gate-channel', 'exact-gate-head'])
def test_log_probabilities(engine, variant, name):
    checkpoint = variant(name)
    tokens, served = served_log_probabilities(engine(checkpoint.folder, dtype='bfloat16'))
    models = checkpoint.model, copy.deepcopy(checkpoint.model).bfloat16()
    wanted, other = (all_log_probabilities(model, tokens) for model in models)
    assert 0 < (served - wanted).norm() <= 1.5 * (other - wanted).norm()
