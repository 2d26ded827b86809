"""What vLLM and SGLang serve."""

import pytest

from packages.serving.tests import checkpoints


@pytest.fixture(scope='session')
def variant(tmp_path_factory):
    """A variant's checkpoint by its name, made once."""
    made = {}

    def get(name: str) -> checkpoints.Checkpoint:
        if name not in made:
            made[name] = checkpoints.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get
