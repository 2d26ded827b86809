"""The program of `docs/scale.md` and `docs/parallel.md` under torchrun: each of its loss curves is that of one process."""

import math
import re
from functools import partial

import pytest
import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from packages.extras.tests.distributed import test_parallel as parallel
from tests import forks

pytestmark = [pytest.mark.xdist_group('scale'), pytest.mark.slow]
PAGE = ''.join((forks.ROOT / 'docs' / name).read_text() for name in ('scale.md', 'parallel.md'))


@pytest.fixture(scope='module')
def losses(tmp_path_factory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp('scale')
    (folder / 'scale.py').write_text('\n\n'.join(re.findall(r'^```python\n(.*?)^```', PAGE, re.M | re.S)))
    program, *arguments = re.findall('`(torchrun .*?)`', PAGE)[0].split()
    assert program == 'torchrun' and arguments[-1] == 'scale.py'
    printed = forks.output('-m', 'torch.distributed.run', *arguments, cwd=folder)
    return {name: [float(x) for x in values.split()] for name, values in re.findall(r'^(.+): ([\d. ]+)$', printed, re.M)}


packed = partial(parallel.packed, bounds=(0, 100, 300, 384))


def one_process(loss_of, **options) -> list[float]:
    """The page's training, without the page's code."""
    torch.manual_seed(1)
    batches = (torch.randint(64, (8, 4, 1)) + torch.randint(1, 4, (8, 4, 1)) * torch.arange(96)) % 64
    torch.manual_seed(0)
    config = LonghornConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8, **options)
    model = LonghornForCausalLM(config).train()
    return parallel.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of, batches, max_norm=math.inf)


@pytest.mark.parametrize('name, loss_of, exact', [
    ('DDP', parallel.rows, False), ('FSDP2', parallel.rows, False), ('tensor', parallel.rows, False),
    ('diagonal, DDP', packed, False), ('diagonal, FSDP2', packed, False),
    ('exact, DDP', packed, True), ('exact, FSDP2', packed, True),
])
def test_equals_one_process(losses, name, loss_of, exact):
    expected = one_process(loss_of, exact=exact)
    assert losses[name] == pytest.approx(expected, rel=1e-5)
    assert losses[name][-1] < 0.8 * losses[name][0]


def test_pipeline_equals_one_process(losses):
    expected = one_process(parallel.rows, tie_word_embeddings=False)
    assert losses['pipeline'] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.8 * expected[0]


def test_own_initialisation_trains(losses):
    assert losses['FSDP2 initialised'][0] == pytest.approx(torch.tensor(64.).log().item(), rel=0.02)
    assert len(losses['FSDP2 initialised']) == 8
