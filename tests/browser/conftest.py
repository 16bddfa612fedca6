"""A real ComfyUI page for the tests: the host of tests/comfy, and a headless Chromium.

Needs, besides what tests/comfy needs:
    node and playwright-core (npm), the latter in the working directory or on NODE_PATH
    a Chromium: CHROMIUM, else chromium, chromium-browser or google-chrome on PATH
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMFY = HERE.parent / "comfy" / "conftest.py"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FIND_DRIVER = "require('module').createRequire(process.cwd() + '/').resolve('playwright-core')"


def _comfy_conftest():
    """The neighbour's fixtures; pytest has loaded the file only if its tests run too."""
    spec = importlib.util.spec_from_file_location("nox_comfy_fixtures", COMFY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(HERE / "support"))
_comfy = _comfy_conftest()
comfyui = _comfy.comfyui
venv_python = _comfy.venv_python
host_environment = _comfy.host_environment
host = _comfy.host
pytest_runtest_makereport = _comfy.pytest_runtest_makereport


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.comfy)


class Page:
    """ComfyUI's page; every call of driver.mjs is a method."""

    def __init__(self, node: str, chromium: str, url: str):
        self._process = subprocess.Popen(
            [node, HERE / "driver.mjs", url, chromium],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __getattr__(self, call: str):
        def ask(*arguments):
            request = json.dumps({"call": call, "arguments": arguments})
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "the browser ended"
            answer = json.loads(line)
            assert "error" not in answer, answer["error"]
            return answer["value"]

        return ask

    def stop(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="session")
def browser_tools() -> tuple[str, str]:
    """(node, chromium); without one of them, or playwright-core, the tests are skipped."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    found = subprocess.run([node, "-e", _FIND_DRIVER], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("no playwright-core; run `npm install playwright-core` or set NODE_PATH")
    chosen = os.environ.get("CHROMIUM")  # noqa: TID251 - where the browser is on this machine
    chromium = chosen or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if chromium is None:
        pytest.skip("no Chromium on PATH; set CHROMIUM to it")
    return node, chromium


@pytest.fixture(scope="session")
def browser(browser_tools, host, comfyui):
    """The page of the running host, whose input folder holds ComfyUI's example picture."""
    shutil.copy(comfyui / "input" / "example.png", host.base / "input")
    page = Page(*browser_tools, f"http://127.0.0.1:{host.port}")
    yield page
    page.stop()


@pytest.fixture(params=["classic", "vue"])
def page(browser, request):
    """The page opened anew, in each way of drawing nodes; it must end without an error."""
    browser.open(request.param == "vue")
    yield browser
    assert browser.errors() == []
