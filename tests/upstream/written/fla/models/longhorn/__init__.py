from fla.models.longhorn.configuration_longhorn import LonghornConfig
from fla.models.longhorn.modeling_longhorn import LonghornForCausalLM, LonghornModel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

AutoConfig.register(LonghornConfig.model_type, LonghornConfig, exist_ok=True)
AutoModel.register(LonghornConfig, LonghornModel, exist_ok=True)
AutoModelForCausalLM.register(LonghornConfig, LonghornForCausalLM, exist_ok=True)


__all__ = ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel']
