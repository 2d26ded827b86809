"""Language models as ONNX, and a program that generates from them in onnxruntime: `pip install 'fla-longhorn[onnx]'`.

`python -m fla_longhorn.onnx CHECKPOINT --output_dir DIR` is the command, :func:`fla_longhorn.onnx.export.export_onnx` the same
for a model in memory. :data:`fla_longhorn.onnx.translate.TRANSLATIONS` is for other modules that call the operators.
"""
