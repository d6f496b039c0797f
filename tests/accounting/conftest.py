"""A coarser grid for balls in bins, whose bounds stay bounds and take an eighth of the time."""

import pytest

from accounting import random_allocation


@pytest.fixture(scope="module")
def coarse_bins():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_allocation, "_POINTS", 2**16)
        random_allocation._sum.cache_clear()
        random_allocation._allocation.cache_clear()
        yield
    random_allocation._sum.cache_clear()
    random_allocation._allocation.cache_clear()
