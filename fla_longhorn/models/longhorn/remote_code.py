"""Longhorn's classes for :mod:`fla_longhorn.models.remote_code`; earlier versions' checkpoints import them from here."""

from __future__ import annotations

from typing import Any

from fla_longhorn.models.longhorn.classification import LonghornForSequenceClassification, LonghornForTokenClassification
from fla_longhorn.models.longhorn.configuration_longhorn import LonghornConfig
from fla_longhorn.models.longhorn.modeling_longhorn import LonghornForCausalLM, LonghornModel
from fla_longhorn.models.remote_code import wrap_save_pretrained


def register_for_auto_class(auto_class: str | type | None = None) -> None:
    """Does nothing: every checkpoint loads with `trust_remote_code=True`. transformers calls it when it has loaded one.

    Args:
        auto_class (str or type, Optional):
            Ignored. Default: `None`.
    """


_class: Any = LonghornConfig
_class.save_pretrained = wrap_save_pretrained(LonghornConfig.save_pretrained)
for _class in (
    LonghornConfig, LonghornModel, LonghornForCausalLM, LonghornForSequenceClassification, LonghornForTokenClassification,
):
    _class.register_for_auto_class = staticmethod(register_for_auto_class)
