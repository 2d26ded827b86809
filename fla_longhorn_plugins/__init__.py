"""The entry points by which vLLM and SGLang find Longhorn, called in each of their processes, whatever it serves.

They stand outside `fla_longhorn`, of which any module imports fla and transformers and patches both.
"""
