"""A root key that nothing reads is refused, with `+` and without, by the key meant."""

from __future__ import annotations

import pytest

from tests.config.test_conf import composed
from trainkit.cli.main import main
from trainkit.config.unread_keys import refuse_unread
from trainkit.errors import TrainkitError


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["+max_epochs=3"], "Did you mean trainer.max_epochs?"),
        (["++lr=0.3"], "Did you mean optimizer.lr?"),
        (["+seeds=3"], "Did you mean seed?"),
        (["+size=3", "+resize=${sizes}", "+sizes=4"], "as ${size}"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(words: list[str], meant: str) -> None:
    with pytest.raises(TrainkitError, match=r"nothing reads this key") as refused:
        refuse_unread(composed(*words))
    assert meant in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["+size=3", "trainer.max_steps=${size}"],
        ["+my={size: 3}", "trainer.max_steps=${my.size}"],
    ],
)
def test_a_key_that_another_value_uses_is_not(words: list[str]) -> None:
    refuse_unread(composed(*words))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_epochs=3", "Did you mean trainer.max_epochs?"),
        ("trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("trainr.max_steps=3", "Did you mean trainer?"),
    ],
)
def test_no_advice_is_given_that_does_nothing(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's own advice, `+max_epochs=3`, makes a key that nothing reads."""
    assert main(["train", "experiment=demo", word]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "To append to your config" not in shown
