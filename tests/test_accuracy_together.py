"""Promise: on small problems, judged many together so that chance hides nothing, PyTorch is no more accurate."""

import pytest

from tests.accuracy import Together
from tests.chains import CHAINS, DTYPES, L19, Problem, chain_id, make_arguments
from tests.images import without_onednn

pytestmark = pytest.mark.usefixtures("poisoned_memory")
without_onednn = pytest.fixture(autouse=True)(without_onednn)

#: 240 rows, and 39 images, of sizes that fill a tile and sizes that do not. In 16 bits the ratio of the errors then
#: scatters over other seeds by 3% where it is about 0.6, and by nothing where both round alike (measured).
ROWS = (Problem(20, 32, 2, 16), Problem(24, 24, 3, 8), Problem(16, 33, 5, 10)) * 4
IMAGES = (Problem(6, 4, 2, 4, pixels=(3, 4)), Problem(7, 3, 1, 6, pixels=(4, 3))) * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
def test_small_problems(chain, dtype, record_property):
    together = Together()
    for seed, problem in enumerate(IMAGES if chain is L19 else ROWS):
        together.add(chain, make_arguments(chain, problem, dtype, seed=seed))
    together.judge()
