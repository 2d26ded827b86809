"""Language models as ONNX, and a program that generates from them in onnxruntime: `pip install './packages/extras[onnx]'`.

`python -m fla_longhorn_extras.onnx CHECKPOINT --output_dir DIR` is the command; for a model in memory
:func:`fla_longhorn_extras.onnx.export.export_onnx` does the same. `TRANSLATIONS` in `translate.py` is for
other modules that call the operators.
"""
