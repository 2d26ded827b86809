"""Longhorn's models."""

from fla_longhorn.models.longhorn import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
    convert_official_state_dict,
)

__all__ = [
    'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel', 'convert_official_state_dict',
]
