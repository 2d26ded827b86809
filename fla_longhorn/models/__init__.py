"""Longhorn's models."""

from fla_longhorn.models.convert_longhorn import convert_official_state_dict
from fla_longhorn.models.longhorn import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
)

__all__ = [
    'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel', 'convert_official_state_dict',
]
