"""The mixer for zoology between residual blocks like zoology's, built as it builds them, on its task: associative recall.

Argument: a device.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from examples.mqar.data import IGNORE, MQAR, TrainingStream

NAME = 'fla_longhorn.contrib.zoology.LonghornMixer'


def build(name: str, kwargs: dict, **given) -> nn.Module:
    """zoology's `ModuleConfig(name=name, kwargs=kwargs).instantiate(**given)`."""
    module, name = name.rsplit('.', 1)
    return getattr(__import__(module, fromlist=[name]), name)(**given, **kwargs)


class Model(nn.Module):
    def __init__(self, vocab_size: int, d_model: int, layers: int, **options):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, d_model)
        self.mixers = nn.ModuleList(build(NAME, options, d_model=d_model, layer_idx=i) for i in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(layers))
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            y = mixer(norm(x))
            assert y.shape == x.shape
            x = x + y
        return self.head(x)


device = torch.device(sys.argv[1])
torch.manual_seed(0)
task = MQAR(vocab_size=16, seq_len=16, num_pairs=2)
stream = iter(TrainingStream(task, seed=0))
for options in ({}, {'exact': True}):
    model = Model(task.vocab_size, 32, 2, state_size=8, **options).to(device)
    assert [mixer.state_size(sequence_length=task.seq_len) for mixer in model.mixers] == [64 * 8] * 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        rows = [next(stream) for _ in range(64)]
        ids, labels = (torch.stack([row[name] for row in rows]).to(device) for name in ('input_ids', 'labels'))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(losses[0], sum(losses[-5:]) / 5)
