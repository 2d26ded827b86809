"""Lets torchvision's CUDA build be imported beside a CPU build of torch, for tests on a machine that has no fitting pair.

`make test-vision` puts this file among the packages, where Python imports it at its start. Such a torchvision cannot load its
compiled operators, and its import fails because it describes two of them all the same. A classifier calls neither, so they are
declared, without an implementation, when torchvision is first imported.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

OPERATORS = ('nms', 'qnms')
SCHEMA = '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor'
kept = []


class DeclareOperators(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == 'torchvision':
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec('torchvision')
            if spec is not None:
                declare()
            return spec
        return None


def declare() -> None:
    import torch

    if torch.version.cuda is None:
        library = torch.library.Library('torchvision', 'FRAGMENT')
        for name in OPERATORS:
            library.define(name + SCHEMA)
        kept.append(library)


sys.meta_path.insert(0, DeclareOperators())
