"""Longhorn's models."""

from fla_longhorn.models.longhorn import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
    convert_official_state_dict,
)
from fla_longhorn.parallel.tensor_parallel import tensor_parallel_plan

__all__ = [
    'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel', 'convert_official_state_dict', 'tensor_parallel_plan',
]
