"""The paper's and the field's experiments: settings, results and pages; `python -m lab.experiments NAME`."""
