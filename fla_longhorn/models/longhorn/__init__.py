"""Longhorn language models."""

from fla_longhorn.models.longhorn.configuration_longhorn import LonghornConfig
from fla_longhorn.models.longhorn.modeling_longhorn import (
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
)

__all__ = [
    'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel',
]
