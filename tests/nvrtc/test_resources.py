"""Resources: no kernel spills, none uses more registers than its budget, on any architecture."""

import pytest

from nox_kernels import build
from nox_kernels.errors import BuildError
from nox_kernels.ptxas_report import faults

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module")
def compiler():
    try:
        return build.open_nvrtc("sm_120")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("unit", "architecture"),
    [(unit, architecture) for unit in build.UNITS for architecture in unit.architectures],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_kernel_keeps_its_budget(compiler, unit, architecture):
    assert faults(unit, build.compile_unit(unit, architecture, compiler).log) == []


@pytest.mark.parametrize(
    "unit", [unit for unit in build.UNITS if unit.ptx], ids=lambda unit: unit.name
)
def test_the_ptx_for_newer_gpus_compiles(compiler, unit):
    ptx = build.compile_unit(unit, unit.ptx, compiler).image
    for kernel in unit.register_budget:
        assert f".entry {kernel}(".encode() in ptx
