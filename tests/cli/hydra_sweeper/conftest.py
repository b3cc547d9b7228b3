"""What the tests of Hydra's sweeper share."""

from tests.cli.sweep.conftest import no_account

__all__ = ["no_account"]
