"""Longhorn's core as a patch of fla: operators, layer and models in fla's own tree, without the plugin."""
