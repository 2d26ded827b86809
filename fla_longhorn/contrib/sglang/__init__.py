"""Longhorn in SGLang, which finds it by the entry point :func:`fla_longhorn_plugins.sglang.register`."""
