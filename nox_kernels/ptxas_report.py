"""Ptxas report: what NVRTC's log says of each kernel, and which of it is a fault."""

import re
from typing import NamedTuple

from .build import Unit

# C7508: setmaxnreg ignored. C7510 to C7520: wgmma serialised, or a wait put before it, each for
# another reason. They cost a Hopper kernel much of its speed and change nothing else.
_NOTE = re.compile(r"^.*\(C(?:7508|751\d|7520)\).*$", re.MULTILINE)
_FUNCTION = re.compile(
    r"Function properties for (?P<name>\S+)\s+(?:ptxas\s+\.\s+)?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"(?:\s+ptxas info\s+: Used (?P<registers>\d+) registers)?"
)


class Resources(NamedTuple):
    """What one function takes; num_registers is None for one that is called, not launched."""

    num_registers: int | None
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spills(self) -> str | None:
        """Its use of local memory as words, or None."""
        stack, stores, loads = self[1:]
        if not (stack or stores or loads):
            return None
        return f"spills {stores} bytes out and {loads} in, and has a stack of {stack} bytes"


def resources(log: str) -> dict[str, Resources]:
    """Kernel -> resources, from the log of a compilation with --ptxas-options=-v."""
    return {name: used for name, used in _functions(log).items() if used.num_registers is not None}


def _functions(log: str) -> dict[str, Resources]:
    return {
        match["name"]: Resources(
            num_registers=int(match["registers"]) if match["registers"] else None,
            stack_bytes=int(match["stack"]),
            spill_store_bytes=int(match["stores"]),
            spill_load_bytes=int(match["loads"]),
        )
        for match in _FUNCTION.finditer(log)
    }


def faults(unit: Unit, log: str) -> list[str]:
    """What keeps a cubin from release, one line each."""
    found = [note.strip() for note in _NOTE.findall(log)]
    found += [f"{name} {used.spills}" for name, used in _functions(log).items() if used.spills]
    used = {name: kernel.num_registers or 0 for name, kernel in resources(log).items()}
    for name in sorted(used.keys() | unit.register_budget.keys()):
        if name not in used:
            found.append(
                f"{name} is in the budget of {unit.name}, but ptxas reports no such kernel"
            )
        elif name not in unit.register_budget:
            found.append(f"{name} uses {used[name]} registers and has no budget in {unit.name}")
        elif used[name] > unit.register_budget[name]:
            budget = unit.register_budget[name]
            found.append(f"{name} uses {used[name]} registers, its budget is {budget}")
    return found
