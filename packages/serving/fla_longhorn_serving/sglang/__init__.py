"""Longhorn in SGLang, which finds it by the entry point :func:`fla_longhorn_serving.sglang_plugin.register`."""
