"""What tests of configurations share."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig

from tests.config.test_conf import composed


@pytest.fixture(scope="package")
def demo() -> DictConfig:
    """The demo's configuration, to be copied and changed: composing takes long."""
    return composed()
