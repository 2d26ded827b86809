"""Longhorn in vLLM, which finds it by the entry point :func:`fla_longhorn_serving.vllm_plugin.register`."""
