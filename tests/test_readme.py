"""Promise: the README's examples run as they stand; here on a small scale, without a GPU."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples(example):
    small = example.replace('"cuda"', '"cpu"').replace("1024", "8").replace("8192", "256")
    exec(small, {})
