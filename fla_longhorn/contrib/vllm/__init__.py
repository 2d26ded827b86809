"""Longhorn in vLLM, which finds it by the entry point :func:`fla_longhorn_plugins.vllm.register`."""
