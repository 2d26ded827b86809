"""Runs in transformers' folder of tests, where `tests.suite` copies it: the common tests with Longhorn's models."""

import unittest

import torch
from fla.models import GLAConfig, GLAForCausalLM, GLAModel
from transformers.models.auto import modeling_auto

from fla_longhorn import LonghornConfig, LonghornForCausalLM, LonghornModel

from .test_modeling_common import ModelTesterMixin

# labels are made for the classes in these lists
modeling_auto.MODEL_MAPPING_NAMES['longhorn'] = 'LonghornModel'
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES['longhorn'] = 'LonghornForCausalLM'
modeling_auto.MODEL_MAPPING_NAMES['gla'] = 'GLAModel'
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES['gla'] = 'GLAForCausalLM'
SIZE = {'hidden_size': 32, 'num_hidden_layers': 2, 'vocab_size': 99, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2}


class Tester:
    """Makes configs and inputs, as each model's tester in transformers does."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers = SIZE['hidden_size'], SIZE['num_hidden_layers']

    def __init__(self, parent, config_class, **options):
        self.parent, self.config_class, self.options = parent, config_class, options

    def get_config(self):
        return self.config_class(**SIZE, **self.options)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, SIZE['vocab_size'], (self.batch_size, self.seq_length))
        return self.get_config(), {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}


class Common(ModelTesterMixin):
    all_model_classes = (LonghornModel, LonghornForCausalLM)
    config_class, options = LonghornConfig, {}
    has_attentions = False
    # asks for the tests of `generate`, which the distribution lacks
    test_generation_tester_mixin_inheritance = None

    def setUp(self):
        self.model_tester = Tester(self, self.config_class, **self.options)


class PlainTest(Common, unittest.TestCase):
    pass


class ExactTest(Common, unittest.TestCase):
    options = {'exact': True, 'num_heads': 2, 'hidden_ratio': 2}


class HybridTest(Common, unittest.TestCase):
    options = {'attn': {'layers': [1], 'num_heads': 2}}


class SwappedTest(Common, unittest.TestCase):
    all_model_classes = (GLAModel, GLAForCausalLM)
    config_class, options = GLAConfig, {'attn_mode': 'longhorn', 'num_heads': 2}
