"""What the ranks exchange: sums, gathered numbers, what rank 0 says; and that a single process exchanges nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import normal
from ranked import together
from torch import Tensor, nn

from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator, seed_dropout
from tapernorm_lab.training import ranks
from tapernorm_lab.training.trainer import Diverged


def tensors(seed: int) -> list[Tensor]:
    """Small and large, of several dtypes and layouts, a scalar and an empty one among them."""
    return [
        normal(3, 5, seed=seed),
        normal(300, 700, seed=seed + 1),  # 1.6 MB: summed where it is
        normal(700, 300, seed=seed + 2).T,  # as large, and not contiguous
        normal(7, seed=seed + 3, dtype=torch.float32),
        normal(seed=seed + 4),
        torch.empty(0, dtype=torch.float64),
        normal(2, 3, seed=seed + 5, dtype=torch.bfloat16),
        torch.arange(4) + seed,
    ]


def summed() -> list[Tensor]:
    mine = tensors(10 * ranks.rank())
    places = [tensor.data_ptr() for tensor in mine]
    ranks.sum_over_ranks(mine)
    assert [tensor.data_ptr() for tensor in mine] == places
    return mine


def test_sums_are_over_all_ranks_in_place_whatever_the_size_and_dtype(tmp_path: Path) -> None:
    found = together(tmp_path, summed)
    expected = [a + b for a, b in zip(tensors(0), tensors(10), strict=True)]
    for mine in found:
        for got, want in zip(mine, expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def gradients(missing: dict[int, set[int]]) -> list[Tensor | None]:
    """Gradients of four parameters; `missing`: rank -> those that it lacks."""
    parameters = [nn.Parameter(normal(2, 3, seed=i)) for i in range(4)]
    for i, parameter in enumerate(parameters):
        if i not in missing[ranks.rank()]:
            parameter.grad = normal(2, 3, seed=20 + 10 * ranks.rank() + i)
    ranks.sum_gradients(parameters)
    return [parameter.grad for parameter in parameters]


def test_a_missing_gradient_counts_as_zero_and_stays_missing_where_all_lack_it(tmp_path: Path) -> None:
    found = together(tmp_path, gradients, {0: {1, 3}, 1: {2, 3}})
    for mine in found:
        assert mine[3] is None
        assert torch.equal(mine[0], normal(2, 3, seed=20) + normal(2, 3, seed=30))
        assert torch.equal(mine[1], normal(2, 3, seed=31))
        assert torch.equal(mine[2], normal(2, 3, seed=22))


def exchanged() -> dict[str, Any]:
    rank = ranks.rank()
    values = [0.1 + rank, math.nan if rank == 1 else 2.0, -1e300]
    refused = []
    for error in (UserError("no\nroom"), Diverged("it diverged")):

        def refuse(error: UserError = error) -> None:
            raise error

        try:
            ranks.from_leader(refuse)
        except UserError as raised:
            refused.append((type(raised).__name__, str(raised)))
    return {
        "count": ranks.count(),
        "leads": ranks.leads(),
        "gathered": ranks.gathered(values),
        "leader's": ranks.from_leader(lambda: {"path": Path(f"of rank {rank}")}),
        "dealt": list(ranks.dealt(range(8))),
        "share": ranks.share_of(torch.arange(12).view(6, 2)).tolist(),
        "refused": refused,
    }


def test_every_rank_learns_the_same_and_takes_a_part_of_its_own(tmp_path: Path) -> None:
    found = together(tmp_path, exchanged, ranks=3)
    rows = [[0.1, 2.0, -1e300], [1.1, math.nan, -1e300], [2.1, 2.0, -1e300]]
    for rank, mine in enumerate(found):
        assert mine["count"] == 3
        assert mine["leads"] == (rank == 0)
        assert str(mine["gathered"].tolist()) == str(rows)  # NaN equals itself in print
        assert mine["leader's"] == {"path": Path("of rank 0")}
        assert mine["refused"] == [("UserError", "no\nroom"), ("Diverged", "it diverged")]
    assert [mine["dealt"] for mine in found] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [row for mine in found for row in mine["share"]] == torch.arange(12).view(6, 2).tolist()


def test_a_single_process_is_rank_0_of_1_and_exchanges_nothing() -> None:
    before, after = tensors(0), tensors(0)
    ranks.sum_over_ranks(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    rows = torch.arange(15).view(5, 3)
    assert torch.equal(ranks.share_of(rows), rows)
    assert list(ranks.dealt("abc")) == ["a", "b", "c"]
    assert ranks.gathered([1.5, math.inf]).tolist() == [[1.5, math.inf]]
    assert ranks.from_leader(lambda: 7) == 7
    assert (ranks.rank(), ranks.count(), ranks.leads()) == (0, 1, True)
    parameter = nn.Parameter(normal(2))
    ranks.sum_gradients([parameter])
    assert parameter.grad is None
    with ranks.joined(1, torch.device("cpu")):
        assert ranks.count() == 1
    with (
        pytest.raises(UserError, match=r"devices_per_job is 2, but 1 process train"),
        ranks.joined(2, torch.device("cpu")),
    ):
        raise AssertionError


def test_ranks_drop_apart_and_a_single_process_drops_as_ever() -> None:
    draws = {}
    for rank in (None, 0, 1, 2):
        seed_dropout(3, 8, *([] if rank is None else [rank]))
        draws[rank] = torch.rand(5)
    assert torch.equal(draws[None], draws[0])
    torch.manual_seed(generator(3, "dropout/8").initial_seed())
    assert torch.equal(draws[0], torch.rand(5))
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
