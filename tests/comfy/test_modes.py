"""The modes: which are equal to the bit, which differ, and by how much."""

import comfy_graphs as graphs
import pytest
from comfy_graphs import LARGE, MEDIUM, attention, dense_control, latent_graph, sigma_shift


def test_smoke(host):
    import time

    for p in ([], [attention("dense")], [attention("sage")], [attention("sparse", budget=20)]):
        for canvas in (graphs.SMALL, MEDIUM, LARGE):
            t = time.time()
            r = host.run(latent_graph(*p, canvas=canvas))
            print(p, canvas, time.time() - t, r.status, r.error, r.digests, r.log)
