"""Comfy host: starts a real ComfyUI as a process of its own and talks to it over HTTP."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent.parent / "host"
START_LIMIT_S = 120
RUN_LIMIT_S = 120
_LINE_START = re.compile(r"[\r\n]+|\[(?:INFO|WARNING|ERROR)\] ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOAD = "Requested to load "
_TIMES = re.compile(
    r"; [\d.]+ ms per \w+ call(, [\d.]+ ms per \w+ call)*(; (saved|lost) about [\d.]+ s)?$"
)


class HostError(AssertionError):
    """ComfyUI did not do what every test needs; carries the end of its log."""


@dataclass(frozen=True)
class Result:
    """What became of one prompt.

    Attributes:
        status: "success", "error", "interrupted" or "rejected" (by validation).
        error: What the user reads; "" after a success.
        outputs: Node id -> what its node shows.
        log: Nox's and the probes' lines while it ran, without level and colour.
        loads: Classes of the models that had to be loaded, in this order.
        cached: Ids of the nodes that did not run, for ComfyUI kept what they gave.
    """

    status: str
    error: str
    outputs: dict[str, dict]
    log: list[str]
    folder: Path = field(repr=False)
    loads: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)

    def shown(self, name: str) -> list:
        """What the only node that shows `name` shows."""
        (found,) = [output[name] for output in self.outputs.values() if name in output]
        return found

    @property
    def digests(self) -> list[str]:
        """Digest of every saved latent, by node id."""
        outputs = sorted((int(node), output) for node, output in self.outputs.items())
        return [output["latent"][0]["sha256"] for _, output in outputs if "latent" in output]

    @property
    def digest(self) -> str:
        """Digest of the saved latent: equal exactly where every bit is."""
        assert self.status == "success", self.error
        (digest,) = self.digests
        return digest

    @property
    def latent(self) -> list[np.ndarray]:
        """The saved latent: video and audio."""
        with np.load(self.folder / self.shown("latent")[0]["file"]) as file:
            return [file[name] for name in file.files]

    @property
    def timed_reports(self) -> list[str]:
        """The lines that Nox logs after a run of the sampler."""
        return [
            line
            for line in self.log
            if re.match("Nox (sage|sparse|veda) ?", line) and "attention calls" in line
        ]

    @property
    def reports(self) -> list[str]:
        """The same without times, which differ from run to run."""
        return [without_times(line) for line in self.timed_reports]

    @property
    def report(self) -> str:
        """The only one of them."""
        (line,) = self.reports
        return line

    def calls_of(self, probe: str) -> int:
        """How often a block probe was called."""
        return sum(line.startswith(f"probe {probe}: call ") for line in self.log)

    @property
    def video_file(self) -> Path:
        """The file that Nox Save Video wrote."""
        shown = [file for output in self.outputs.values() for file in output.get("images", ())]
        (saved,) = [file for file in shown if not file["filename"].endswith(".png")]
        return self.folder / saved["subfolder"] / saved["filename"]


def without_times(line: str) -> str:
    """A report's line up to what computed."""
    return _TIMES.sub("", line)


class Host:
    """One running ComfyUI."""

    def __init__(
        self,
        checkout: Path,
        python: Path,
        base: Path,
        environment: dict[str, str],
        # keeps the nodes of earlier graphs, so that what they hold may turn out to be stale
        options: tuple[str, ...] = ("--cache-lru", "100"),
    ):
        self.base = base
        self.output = base / "output"
        self.port = _free_port()
        self.log_file = base / "host.log"
        command = [python, HERE / "host_launch.py", checkout, "--cpu", "--listen", "127.0.0.1"]
        command += ["--port", self.port, "--base-directory", base, "--disable-api-nodes"]
        command += ["--database-url", "sqlite:///:memory:", "--disable-auto-launch"]
        command += options
        # what ComfyUI picks on CUDA; on the CPU it would pick sub-quadratic attention
        command += ["--use-pytorch-cross-attention"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,  # host_launch.py ends when this closes, so also if we die
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait_until_up(self) -> None:
        """Wait for the first answer."""
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/system_stats")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise HostError(f"ComfyUI did not come up:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the process in any case."""
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def log_tail(self, num_lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self._log_lines(0)[-num_lines:])

    def lines_since(self, start: int) -> list[str]:
        """Nox's and the probes' log lines after a size of the log."""
        return [line for line in self._log_lines(start) if line.startswith(("Nox", "probe "))]

    def _loads_since(self, start: int) -> list[str]:
        lines = self._log_lines(start)
        return [line.removeprefix(_LOAD) for line in lines if line.startswith(_LOAD)]

    def _log_lines(self, start: int) -> list[str]:
        text = self.log_file.read_bytes()[start:].decode(errors="replace")
        # progress bars end without a line break, so a line may start behind one
        return _LINE_START.split(_COLOUR.sub("", text))

    def get(self, path: str) -> bytes:
        """GET a path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read()

    def get_json(self, path: str):
        """GET a path that answers in JSON."""
        return json.loads(self.get(path))

    def post(self, path: str, data: dict) -> dict:
        """POST a JSON object."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(data).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def unload(self, *, forget_nodes: bool) -> None:
        """Unload every model, and on request let go of what nodes gave, as the page's buttons do.

        ComfyUI does so between two prompts: at the latest behind the one that is run here.
        """
        self.post("/free", {"unload_models": True, "free_memory": forget_nodes})
        preview = {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}
        number = {"class_type": "PrimitiveInt", "inputs": {"value": 0}}
        self.run({"1": number, "2": preview})

    def run(
        self, prompt: dict, interrupt_after: str | None = None, extra_data: dict | None = None
    ) -> Result:
        """Queue an API prompt and wait for its end.

        Args:
            prompt: Node id -> {"class_type", "inputs"}.
            extra_data: What the page sends beside it.
            interrupt_after: Press "interrupt" once a log line starts with this.
        """
        start = self.log_file.stat().st_size
        try:
            prompt_id = self.post(
                "/prompt", {"prompt": prompt} | ({"extra_data": extra_data} if extra_data else {})
            )["prompt_id"]
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read())
            return Result("rejected", _node_errors(answer), {}, [], self.output)
        end = time.monotonic() + RUN_LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            if interrupt_after and _has(self.lines_since(start), interrupt_after):
                interrupt_after = None
                self.post("/interrupt", {})
            entry = self.get_json(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                status, error = _outcome(entry["status"])
                return Result(
                    status,
                    error,
                    entry["outputs"],
                    self.lines_since(start),
                    self.output,
                    self._loads_since(start),
                    _cached(entry["status"]),
                )
            time.sleep(0.03)
        raise HostError(f"no answer to a prompt:\n{self.log_tail()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _has(lines: list[str], start: str) -> bool:
    return any(line.startswith(start) for line in lines)


def _node_errors(answer: dict) -> str:
    errors = [
        f"{error['message']}: {error['details']}"
        for node in answer["node_errors"].values()
        for error in node["errors"]
    ]
    return "\n".join(errors) or str(answer["error"])


def _cached(status: dict) -> list[str]:
    told = [data for event, data in status["messages"] if event == "execution_cached"]
    return [node for data in told for node in data["nodes"]]


def _outcome(status: dict) -> tuple[str, str]:
    messages = dict(status["messages"])
    if "execution_interrupted" in messages:
        return "interrupted", ""
    error = messages.get("execution_error", {}).get("exception_message", "")
    return status["status_str"], error.strip()
