import pytest


@pytest.fixture(params=[False, True], ids=['diagonal', 'exact'])
def exact(request):
    return request.param
