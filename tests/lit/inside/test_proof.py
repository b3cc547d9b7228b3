"""What a fit and `check` say of an inner cut is what was measured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.core.inside.common import CLASSES, WIDTH, Net, batch, nt_xent
from tests.lit.inside.common import Foreign, data, fit
from trainkit import MicroBatching, TrainkitError, check

OPTIONS = MicroBatching(size=4, inside="net")


def draws(net: Any, x: Tensor) -> Tensor:
    """Noise drawn by row, as in a variational encoder."""
    out = net.plain(x)
    return out + 0.3 * torch.randn_like(out)


def counts(net: Any, x: Tensor) -> Tensor:
    """Counts its rows, which a few rows do not show, since it draws as well."""
    return net.plain(x) * (1 + len(x) / 50) + 1e-9 * torch.rand(len(x), 1)


def mixes(net: Any, x: Tensor) -> Tensor:
    """Rows that see each other."""
    out = net.plain(x)
    return out - out.mean(0)


def mean_of_squares(out: Tensor, labels: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("net", [Net(dropout=0.5), Net(draws)])
def test_a_fit_says_exact_where_it_was_measured(net: nn.Module, capsys: Any) -> None:
    fit(Foreign(net=net, calls=2), OPTIONS)
    assert "proof: exact on 7 of your rows" in capsys.readouterr().out


class ByHand(Foreign):
    """Steps by itself, and knows nothing of windows."""

    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("net", "loss"), [(Net(), nt_xent), (Net(counts), mean_of_squares)]
)
def test_a_module_that_steps_by_itself_is_proved_as_it_is_cut(
    net: nn.Module, loss: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss is no mean over rows, so parts that step alone would be off."""
    is_off = loss is mean_of_squares
    warns = pytest.warns(UserWarning, match="Chunks of rows do not give")
    with warns if is_off else nullcontext():
        fit(ByHand(loss, net=net), OPTIONS)
    assert ("proof: exact on 7 of your rows" in capsys.readouterr().out) is not is_off


def test_require_refuses_a_net_that_depends_on_the_number_of_rows() -> None:
    module = Foreign(mean_of_squares, net=Net(counts))
    with pytest.raises(TrainkitError, match="proof=.require.: .* not the big batch"):
        fit(module, OPTIONS, proof="require")


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Net(mixes), "its output of a row depends on other rows"),
        (nn.Sequential(Net(), nn.BatchNorm1d(CLASSES)), "BatchNorm"),
    ],
)
def test_rows_that_see_each_other_are_refused_by_name(net: nn.Module, why: str) -> None:
    with pytest.raises(TrainkitError, match=f"^net: .*{why}"):
        fit(Foreign(net=net), OPTIONS)


def test_auto_goes_around_what_mixes_rows() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Net())
    cut = MicroBatching(size=4, inside="auto")
    assert check(Foreign(net=net), batch(), micro_batches=cut).exact


def test_auto_refuses_where_all_rows_see_each_other() -> None:
    class Whole(Foreign):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            return (self.net(x) @ x.T).square().mean()

    module = Whole(net=nn.BatchNorm1d(WIDTH))
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        TrainkitError,
        match='inside="auto": no submodule of Whole can run .* net: its rows must',
    ):
        fit(module, MicroBatching(size=4, inside="auto"))


@pytest.mark.parametrize(("net", "exact"), [(Net(draws), True), (Net(counts), False)])
def test_check_follows_the_cut(net: nn.Module, exact: bool) -> None:
    module = Foreign(mean_of_squares, net=net)
    report = check(module, batch(), micro_batches=OPTIONS)
    assert report.exact == exact
    assert {cut.name for cut in report.cuts} == {"inner cut"}
    if not exact:
        assert [cause.place for cause in report.causes] == ["net"]
        with pytest.raises(AssertionError, match="chunks of rows do not give"):
            report.assert_exact()


def test_the_remedy_of_a_loss_across_rows_works_as_printed() -> None:
    report = check(Foreign(), batch())
    assert not report.exact
    line = report.causes[0].remedy[0]
    assert line.startswith("micro_batching = ")
    options = eval(
        line.removeprefix("micro_batching = "), {"MicroBatching": MicroBatching}
    )
    assert check(Foreign(), batch(), micro_batches=options).exact


def test_a_submodule_that_is_not_called_is_named() -> None:
    class Around(Foreign):
        """Calls another method of the net."""

        def forward(self, x: Any) -> Tensor:
            x = torch.stack(x) if isinstance(x, list) else x
            return self.net.head(self.net.body(x))

    def listed(rows: list[Any]) -> Any:
        return [x for x, _ in rows], torch.stack([label for _, label in rows])

    untold = DataLoader(data().dataset, batch_sampler=[[*range(22)]], collate_fn=listed)
    for loader in (data(), untold):
        with pytest.warns(UserWarning, match="net ran whole. .* calls it with 0. Only"):
            fit(Around(), OPTIONS, loader=loader)


def unlike(rows: list[Any]) -> Any:
    """A list of tensors of unlike lengths, as of images."""
    x, labels = zip(*rows, strict=True)
    return [each.repeat(1 + n % 3, 1) for n, each in enumerate(x)], torch.stack(labels)


@pytest.mark.parametrize("collate", [None, unlike])
def test_a_submodule_that_gets_a_list_of_samples_is_said_to_run_whole(
    collate: Any,
) -> None:
    def lists(net: Any, x: Any) -> Tensor:
        return net.plain(torch.stack([each[0] for each in x]))

    class Lists(Foreign):
        def forward(self, x: Any) -> Tensor:
            return self.net([each.view(-1, each.shape[-1]) for each in x])

    loader = DataLoader(data().dataset, batch_size=22, collate_fn=collate)
    with pytest.warns(UserWarning, match="net ran whole. Of a loader batch of 22 rows"):
        fit(Lists(net=Net(lists)), OPTIONS, loader=loader)
