"""`backward()` under autocast, of a forward with it or without: allowed, as for every `nn.Linear`, with the same gradients."""

import pytest
import torch

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import slow_but
from tests.integration.swapped import make_model
from tests.models.test_cache import build
from tests.models.test_longhorn import VARIANTS


@pytest.mark.parametrize('checkpoints', [False, True], ids=['', 'checkpoints'])
@pytest.mark.parametrize('forward', [False, True], ids=['forward without', 'forward with'])
@pytest.mark.parametrize('name', slow_but(('paper', 'exact', 'gla'), [*VARIANTS, *FAMILIES]))
def test_backward_under_autocast(name, forward, checkpoints, device):
    options = {'num_hidden_layers': 2, 'initializer_range': 0.5}
    model = (make_model(name, device) if name in FAMILIES else build(device, **VARIANTS[name] | options)).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    ids, results = torch.randint(3, 53, (2, 70), device=device), []
    for backward in False, True:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=forward):
            loss = model(ids, labels=ids).loss
        with torch.autocast(device.type, torch.bfloat16, enabled=backward):
            loss.backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative_error(results[1], results[0]) <= 2e-2
