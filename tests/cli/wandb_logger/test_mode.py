"""Whether a run is online is decided by what was said, and by logins."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.wandb_logger import resolve_mode
from trainkit.errors import TrainkitError

KEY = "local" + 35 * "x"


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_SWEEP_ID": "s", "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "offline"),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "online"),
    ],
)
def test_mode_by_the_environment(
    private_wandb: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    environ: dict[str, str],
    expected: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(mode) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["home", "variable"])
def test_a_login_for_this_server_is_found(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = Path.home() / ".netrc" if where == "home" else private_wandb / "other"
    path.write_text(f"machine wandb.here\n  login user\n  password {KEY}\n")
    path.chmod(0o600)
    if where == "variable":
        monkeypatch.setenv("NETRC", str(path))
    assert resolve_mode("auto") == "offline"  # that is another server's

    import wandb

    wandb.teardown()  # the client reads its settings once
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert resolve_mode("auto") == "online"


def test_a_file_of_logins_that_holds_none_is_no_login(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.home() / ".netrc").write_text("machine wandb.here login user")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert resolve_mode("auto") == "offline"


@pytest.mark.parametrize("environ", [{}, {"WANDB_MODE": "online"}])
def test_online_without_a_login_is_refused_instead_of_asking(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainkitError, match="mode: online needs a login for https?://"):
        resolve_mode("auto" if environ else "online")
