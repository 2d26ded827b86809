"""Padding in every place of every model: each row gets what it gets alone, without padding and without a cache."""

from functools import cache
from itertools import product

import pytest
import torch

from fla_longhorn.attn_mode import FAMILIES
from tests.devices import slow_but
from tests.integration.swapped import make_model, spread
from tests.models.test_cache import build, near

T, WINDOW = 20, 4
ATTENTION = {
    '': None,
    ' hybrid': {'layers': [1], 'num_heads': 2},
    ' window': {'layers': [1], 'num_heads': 2, 'window_size': WINDOW},
}
OWN = {'diagonal': {}, 'exact': {'exact': True, 'num_heads': 2, 'hidden_ratio': 2}}
MODELS = [name + kind for name, kind in product([*OWN, *FAMILIES], ATTENTION)]
# columns of padding in the first row; the second one has none, the third one some on the left where `with_left`
PLACES = {
    'none': [],
    'left': range(6),
    'right': range(13, T),
    'between': [7, 8],
    'a window between': range(6, 6 + WINDOW + 1),
    'left of a later piece': [8, 9, 10],
    'right of a piece': [6, 7],
    'before a token': [12],
    'left, between, right': [0, 1, 5, 6, 11, 14, 15, 19],
    'every second': range(0, T, 2),
    'all but the last': range(T - 1),
    'all': range(T),
}
# what is not slow: each kind of attention, and what a family has beside the mixer
TELLING = ('diagonal', 'exact hybrid', 'gla window', 'rwkv7 hybrid')
FAST = ('between', 'left of a later piece')
# the calls in which the tokens are read: the columns of each
PIECES = {
    'whole': [T], 'turns': [8, 5, 7], 'turns and tokens': [8, 3, *[1] * 5, 4], 'tokens': [8, *[1] * 12],
    'from one': [*[1] * 9, 11],
}


@cache
def make(name: str, device):
    family, _, kind = name.partition(' ')
    attn = ATTENTION[' ' + kind if kind else '']
    if family in OWN:
        return build(device, **OWN[family], num_hidden_layers=2, attn=attn)
    model = make_model(family, device, attn=attn, initializer_range=0.2)
    with torch.no_grad():
        # parts that start as zeros count too
        for x in model.parameters():
            x.add_(torch.empty(x.shape).normal_(std=0.1, generator=torch.Generator().manual_seed(0)).to(device))
    return spread(model).eval()


def batch(place: str, device, with_left: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 50, (3 if with_left else 2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, list(PLACES[place])] = 0
    mask[2:, :2] = 0
    return ids.to(device), mask.to(device)


@torch.no_grad()
def alone(model, ids, mask) -> list[torch.Tensor]:
    rows = zip(ids, mask.bool(), strict=True)
    return [model(row[kept][None], use_cache=False).logits[0] if kept.any() else row.new_zeros(0) for row, kept in rows]


def wrong_rows(name, logits, mask, want) -> list[int]:
    assert logits.isfinite().all()
    got = [x[kept] for x, kept in zip(logits, mask.bool(), strict=True)]
    return [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if len(b) and not near(a, b)]


@pytest.mark.parametrize(('name', 'place'), slow_but(product(TELLING, FAST), product(MODELS, PLACES)))
@torch.no_grad()
def test_rows_by_themselves(name, place, device):
    """In one call and in several, with and without a cache; a look ahead from the cache gives the same and changes nothing."""
    model, wrong = make(name, device), []
    for with_left in (False, True):
        ids, mask = batch(place, device, with_left)
        want = alone(model, ids, mask)
        wrong += [('uncached', with_left, x) for x in wrong_rows(name, model(ids, mask, use_cache=False).logits, mask, want)]
        for kind, pieces in PIECES.items():
            past, outputs, at = None, [], 0
            for n in pieces:
                call = dict(attention_mask=mask[:, :at + n], past_key_values=past)
                ahead = model(ids[:, at:at + n], **call, use_cache=False).logits
                output = model(ids[:, at:at + n], **call, use_cache=True)
                assert near(ahead, output.logits)
                past, at = output.past_key_values, at + n
                outputs.append(output.logits)
            wrong += [(kind, with_left, x) for x in wrong_rows(name, torch.cat(outputs, 1), mask, want)]
    assert not wrong
