"""Promise: what is told of a compiled kernel is so."""

import pytest

from autotune_configs.offline import spills_in_loops


@pytest.mark.parametrize("place, expected", [("0010", False), ("0030", True), ("0060", False)])
def test_spills_in_loops(place, expected):
    """Of a loop from 0x20 to 0x40, behind which a branch goes forward."""
    lines = {
        "0020": "LDG.E R4, desc[UR4][R2.64] ;  /* 0x0000000402047981 */",
        "0040": "@!P5 BRA 0x20 ;  /* 0xffffffbc00 */",
        "0050": "@P2 BRA 0x70 ;",
        "0070": "EXIT ;",
        place: "LDL.LU R31, [R1] ;",
    }
    sass = "\n".join([f"        /*{at}*/          {text}" for at, text in sorted(lines.items())])
    assert spills_in_loops(sass) is expected
