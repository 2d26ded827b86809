"""Longhorn language models."""

from fla_longhorn.models.longhorn.classification import LonghornForSequenceClassification, LonghornForTokenClassification
from fla_longhorn.models.longhorn.configuration_longhorn import LonghornConfig
from fla_longhorn.models.longhorn.convert_longhorn import convert_official_state_dict
from fla_longhorn.models.longhorn.modeling_longhorn import LonghornForCausalLM, LonghornModel

__all__ = [
    'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel', 'convert_official_state_dict',
]
