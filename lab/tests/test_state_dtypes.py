"""States that are rounded after each token, and the divergence of what follows."""

import torch

from fla_longhorn import LonghornForCausalLM
from lab.experiments import state_dtypes
from tests.models.test_longhorn import small


def make():
    torch.manual_seed(0)
    return LonghornForCausalLM(small(exact=True)).eval()


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1 + 2 ** -9, -3.1, 0.0, 1e-30]).expand(20000, 4)
    rounded = state_dtypes.stochastic(torch.Generator().manual_seed(0))(x.contiguous())
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert len(rounded[:, 0].unique()) == 2
    torch.testing.assert_close(rounded.double().mean(0), x[0].double(), rtol=2e-4, atol=0)


def test_states_are_rounded_after_each_token():
    model, ids = make(), torch.randint(3, 53, (2, 9))
    seen = []

    def keep(x):
        seen.append(x.clone())
        return x.half().float()

    got = state_dtypes.next_logits(model, ids, keep)
    expected = model(ids).logits
    layers = model.config.num_hidden_layers
    assert len(seen) == ids.shape[1] * layers
    # the first token is read before anything is rounded
    torch.testing.assert_close(got[:, 0], expected[:, 0])
    assert 0 < (got - expected)[:, 1:].abs().max() < 1e-2
    torch.testing.assert_close(state_dtypes.next_logits(model, ids), expected, rtol=1e-4, atol=1e-5)


def test_comparisons_of_a_checkpoint(tmp_path):
    model, ids = make(), torch.randint(3, 53, (2, 16))
    model.save_pretrained(tmp_path)
    found = state_dtypes.measure(tmp_path, ids)
    assert list(found) == [*state_dtypes.roundings(), 'bfloat16 weights', 'bfloat16 model']
    assert all(0 < row['kl'] < 1e-2 for row in found.values())
    assert found['float16 states']['kl'] < found['bfloat16 states']['kl']
    logits = state_dtypes.next_logits(model, ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    same = state_dtypes.compare(logits, logits, ids)
    assert abs(same['kl']) < 1e-12 and abs(same['loss'] - loss.item()) < 1e-5
