import pytest
import torch

from ac_loss._job import Job
from ac_loss._objective import Objective
from ac_loss.backends.torch_backend.tiles import Tiles


@pytest.mark.usefixtures("small_pieces", "bf16_products")
@pytest.mark.parametrize(
    ("dtype", "bf16_products"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    indirect=["bf16_products"],
    ids=str,
)
def test_tiles_are_the_logits(draw, assert_near, dtype, bf16_products):
    inputs = draw(25, 31, 5, dtype=dtype, ignored=0.3)
    counted = (inputs["labels"] != -100).nonzero().squeeze(1)
    labels = inputs["labels"][counted]
    job = Job(objective=Objective(logit_scale=0.5), gemm_dtype=dtype, accum="fp32", labels=labels, rows=counted)
    tiles = Tiles(job, inputs["hidden"], inputs["weight"], inputs["bias"])
    product = (inputs["hidden"][counted] @ inputs["weight"].t()).to(job.loss_dtype)
    right = 0.5 * (product + inputs["bias"].to(job.loss_dtype))
    seen = torch.zeros_like(right)
    for rows in tiles.rows():
        found = torch.zeros(rows.stop - rows.start, dtype=torch.int64)
        for classes in tiles.classes():
            tile, slope = tiles.logits(tiles.chunk(rows), tiles.matrix(classes), classes, slope=True)
            assert slope is None
            assert tile.numel() <= 11 * 6
            seen[rows, classes] += tile
            column, inside = tiles.positions(rows, classes)
            found += (column + classes.start).mul(inside).squeeze(1)
            assert torch.equal(tiles.narrowed(tile), tile.to(bf16_products))
        assert torch.equal(found, labels[rows])
    assert_near(seen, right, dtype)


def test_no_rows_are_one_empty_tile(draw):
    inputs = draw(0, 31, 5)
    job = Job(objective=Objective(), gemm_dtype=torch.float64, accum="fp32", labels=inputs["labels"], rows=None)
    tiles = Tiles(job, inputs["hidden"], inputs["weight"], None)
    assert list(tiles.rows()) == [slice(0, 0)]
    assert list(tiles.classes()) == [slice(0, 31)]
