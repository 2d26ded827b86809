"""TRL's GRPO: the probabilities of sampled tokens in generation and in training."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import selective_log_softmax

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn_extras.batch_invariant import make_batch_invariant
from tests.integration.scripts.byte_tokenizer import byte_tokenizer

ROWS, NEW = 2, 24


class Watching(GRPOTrainer):
    """Compares the probabilities of the sampled tokens, of which it shuffles the rows between the two."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ratios, self.of_logits, self.generate = [], [], self.model.generate
        self.model.generate = self.sample

    def sample(self, *args, **kwargs):
        out = self.generate(*args, **kwargs, output_logits=True, return_dict_in_generate=True)
        logits = torch.stack(out.logits, 1)
        tokens = out.sequences[:, -logits.shape[1]:]
        self.sampled = list(zip(tokens, selective_log_softmax(logits, tokens), strict=True))
        return out.sequences

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        assert model.training and found[0].requires_grad
        # TRL's own come from the hidden states, by its product with the weight of `lm_head`
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, -logits_to_keep - 1:-1]
        of_logits = selective_log_softmax(logits.detach().float(), input_ids[:, -logits_to_keep:])
        for tokens, new, own, mask in zip(input_ids, found[0].detach(), of_logits, attention_mask.bool(), strict=True):
            tokens, mask = tokens[-logits_to_keep:], mask[-logits_to_keep:]
            n = int(mask.sum())
            old, = (old for sampled, old in self.sampled if torch.equal(sampled[:n], tokens[mask]))
            self.ratios.append(new[mask] - old[:n])
            self.of_logits.append(own[mask] - old[:n])
        return found


@pytest.fixture
def log_ratios(tmp_path, device):
    """The logarithms of tokens' probabilities in training by those in generation: TRL's, and of the logits."""
    def measure(exact, dtype, invariant):
        tokenizer = byte_tokenizer('<pad>', '<end>', pad_token='<pad>', eos_token='<end>', padding_side='left')
        config = LonghornConfig(
            hidden_size=64, num_hidden_layers=2, vocab_size=len(tokenizer), exact=exact, bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
        model = LonghornForCausalLM(config).to(device, dtype)
        with torch.no_grad():
            for x in model.parameters():
                x += 0.1 * torch.randn_like(x)
        trainer = Watching(
            model=make_batch_invariant(model) if invariant else model, processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            train_dataset=Dataset.from_dict({'prompt': ['abc', 'a longer prompt', 'x y z', 'forty']}),
            args=GRPOConfig(
                output_dir=str(tmp_path), per_device_train_batch_size=ROWS, num_generations=ROWS, max_completion_length=NEW,
                max_steps=3, learning_rate=1e-3, report_to='none', use_cpu=device.type == 'cpu', bf16=False,
                save_strategy='no',
            ),
        )
        before = [x.clone() for x in model.parameters()]
        trainer.train()
        assert any(not torch.equal(x, old) for x, old in zip(model.parameters(), before, strict=True))
        assert len(trainer.ratios) == 3 * ROWS and all(len(x) > 4 for x in trainer.ratios)
        return torch.cat(trainer.ratios), torch.cat(trainer.of_logits)
    return measure


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_ratios_of_a_batch_invariant_model_are_one(log_ratios, exact, dtype, device):
    ratios, of_logits = log_ratios(exact, dtype, invariant=True)
    assert of_logits.count_nonzero() == 0
    if device.type == 'cpu':
        assert ratios.count_nonzero() == 0
    else:
        # a kernel of TRL's sums the exponentials of the logits
        assert ratios.abs().max() < 1e-5


def test_ratios_of_other_models_are_not(log_ratios):
    _, of_logits = log_ratios(True, torch.float32, invariant=False)
    assert 0 < of_logits.abs().max() < 1e-4
