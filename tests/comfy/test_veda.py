"""Mode veda: a predictor's routes in ComfyUI."""

from comfy_graphs import LARGE, latent_graph, veda


def test_veda_runs_and_differs_from_dense(host):
    result = host.run(latent_graph(veda(), canvas=LARGE, steps=2))
    assert result.status == "success", result.error
    print(result.report)
    print(result.log)
