"""The list of mutations fits the code: an edit whose text is gone would be found only by running them all, for an hour."""

from tests.mutate.mutation import ROOT
from tests.mutate.rooms import ROOMS


def test_every_mutation_matches_its_file():
    for mutations in ROOMS.values():
        for mutation in mutations:
            # a clone may be without the packages
            if mutation.path.startswith('fla_longhorn/') or (ROOT / 'packages').exists():
                mutation.apply((ROOT / mutation.path).read_text(encoding='utf-8'))
