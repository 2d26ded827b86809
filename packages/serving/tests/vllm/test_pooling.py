"""Embeddings, classes and scores are those of transformers."""

import pytest
import torch
from torch.nn.functional import normalize

from packages.serving.tests.checkpoints import prompts
from tests.integration.scripts.byte_tokenizer import byte_tokenizer
from tests.integration.server import PROMPTS

REQUESTS = [{'prompt_token_ids': x} for x in prompts()]
# the longer prompts are read in pieces
OPTIONS = {'skip_tokenizer_init': False, 'max_num_batched_tokens': 64}


def close(served, wanted) -> bool:
    return (torch.as_tensor(served) - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(('name', 'options'), [('paper', {'runner': 'pooling'}), ('hybrid', {})])
def test_embeddings(engine, variant, tmp_path, name, options):
    """The last token's hidden state, of a model with a head and one without, and the cosine between two of them."""
    model = variant(name).model
    (model if options else model.model).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    llm = engine(tmp_path, **OPTIONS, **options)

    def embed(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return normalize(model.model(torch.tensor([prompt])).last_hidden_state[0, -1], dim=0)

    for prompt, output in zip(prompts(), llm.embed(REQUESTS, use_tqdm=False), strict=True):
        assert close(output.outputs.embedding, embed(prompt))
    first, *others = (embed(list(x.encode())) for x in PROMPTS)
    scores = [x.outputs.score for x in llm.score(PROMPTS[0], PROMPTS[1:], use_tqdm=False)]
    assert close(scores, torch.stack([first @ x for x in others]))
