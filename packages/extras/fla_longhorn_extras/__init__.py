"""Longhorn where other libraries take models: each module says where."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fla_longhorn.hosts import Changes
    from fla_longhorn.models import LonghornConfig

# transformers' tensor-parallel styles of a language model, beside those of the base model
HEAD = {'lm_head': 'colwise_gather_output'}


def register(changes: Changes) -> None:
    """Called by `fla_longhorn.patch(packages=True)`, as `import fla_longhorn` calls it: `tp_plan='auto'` of transformers."""
    from fla_longhorn.models import LonghornConfig, LonghornForCausalLM

    changes.set_attribute(LonghornConfig, 'base_model_tp_plan', property(tensor_parallel_plan))
    changes.set_attribute(LonghornForCausalLM, '_tp_plan', HEAD)


def tensor_parallel_plan(config: LonghornConfig) -> dict[str, str] | None:
    # it imports fla_longhorn, whose import calls `register`
    from fla_longhorn_extras.tensor_parallel import styles_of_transformers

    return styles_of_transformers(config)
