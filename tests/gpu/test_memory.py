"""Memory of a block of MiniMax-H3's real size."""

import pytest
import torch

from tests.bench.bench_block_memory import CHUNKS, Block, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def peaks():
    """In MiB, beside the hidden states and the weights."""
    return measure(Block())


@pytest.mark.parametrize("mode", ["sage", "sparse"])
def test_a_block_needs_no_more_than_with_the_hosts_attention(peaks, mode):
    host, nox, mlp = peaks["attention"]["host"], peaks["attention"][mode], peaks["mlp"]
    assert max(nox, mlp) <= max(host, mlp) + 64


@pytest.mark.parametrize("max_rows", CHUNKS)
def test_chunks_lower_the_peak_of_the_mlp_and_change_no_bit(peaks, max_rows):
    assert peaks["values_that_chunks_change"][max_rows] == 0
    assert peaks["chunked_mlp"][max_rows] < 0.6 * peaks["mlp"]
