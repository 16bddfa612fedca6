"""Nox Report: what really ran, as text and as a picture."""

import numpy as np
import torch
from comfy_api.latest import io, ui

from . import report_picture, report_text
from .report import Report
from .report_store import lines_and_reports

NOTHING = "No sampling run with Nox H3 Attention is known upstream of this node."


class NoxReport(io.ComfyNode):
    """Says what the sampling run upstream of it did."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs keep their names and order for ever: saved workflows hold them."""
        # what comes in goes out, under its own type
        passed = io.MatchType.Template("passed")
        return io.Schema(
            node_id="NoxReport",
            display_name="Nox Report",
            category="Nox",
            description="What really ran in the sampler upstream: which steps and blocks were "
            "sparse, dense or left to ComfyUI, how long attention took, and what that saved. Wire "
            "it anywhere behind the sampler.",
            search_aliases=["statistics", "timing", "speed", "sparsity", "nox"],
            is_output_node=True,
            inputs=[
                io.MatchType.Input(
                    "after",
                    template=passed,
                    tooltip="Anything made by the sampler, such as its latent or the decoded "
                    "images. It is passed on unchanged; the wire only says which run is meant.",
                ),
            ],
            outputs=[
                io.MatchType.Output(
                    template=passed, id="after", display_name="after", tooltip="What came in."
                ),
                io.String.Output("text", tooltip="The report in words."),
                io.Image.Output(
                    "picture", tooltip="One column per evaluation of the model, one row per block."
                ),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, after) -> io.NodeOutput:
        """Pass `after` through; the report is that of the run upstream."""
        lines, reports = lines_and_reports(cls.hidden.prompt, cls.hidden.unique_id)
        if reports:
            text = "\n\n".join(report_text.full(report) for report in reports)
            drawn = report_picture.draw([_run_map(report) for report in reports])
        else:
            text = lines[0] if lines else NOTHING
            drawn = report_picture.message(text)
        picture = torch.from_numpy(np.asarray(drawn).astype(np.float32) / 255)[None]  # [1, H, W, 3]
        shown = ui.PreviewImage(picture, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(after, text, picture, ui=shown)


def _run_map(report: Report) -> report_picture.RunMap:
    title = report_text.badge(report).replace("\n", ". ")
    kinds = [[call[0] if call else "" for call in one.calls] for one in report.evaluations]
    return report_picture.RunMap(title, kinds, [one.step_idx for one in report.evaluations])
