"""Row chunks: the same result from less memory."""

import pytest
import torch

from nox_kernels.row_chunks import in_row_chunks


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 1000, 1024])
@pytest.mark.parametrize("max_rows", [1, 100, 256, 5000])
def test_every_row_goes_through_once_in_even_chunks(num_rows, max_rows):
    x = torch.arange(num_rows * 3, dtype=torch.float64).view(num_rows, 3)
    sizes = []

    def work(rows):
        sizes.append(len(rows))
        return torch.cat((rows, -rows), 1).float()

    out = in_row_chunks(work, x, max_rows)
    assert torch.equal(out, torch.cat((x, -x), 1).float())
    assert sum(sizes) == num_rows
    assert len(sizes) == -(-num_rows // max_rows)
    assert max(sizes) <= max_rows
    assert max(sizes) - min(sizes) <= 1


def test_no_rows_are_no_rows():
    assert in_row_chunks(lambda rows: rows * 2, torch.empty(0, 4), 256).shape == (0, 4)
