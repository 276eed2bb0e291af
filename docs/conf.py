"""The docs site: ``make docs`` builds it from the pages of this repository and the docstrings, without a network.

The repository's root is the source folder, so links and pictures are the same here and in the repository.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ops  # noqa: E402

project = "normfuse"
author = "normfuse contributors"
copyright = f"2026, {author}"
version = release = ops.__version__

root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "bench/kernelbench/README.md"]
exclude_patterns = [".venv*", "build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them

html_theme = "furo"
html_title = f"normfuse {version}"
html_copy_source = False

#: The site's navigation, which stands under the first page.
NAVIGATION = """

```{toctree}
:hidden:
:caption: Use

docs/interface
docs/adopting
docs/fuse
docs/tensor_parallel
docs/tuning
docs/limits
docs/numerics
docs/special_values
docs/compiled_graphs
docs/graph_convolutions
docs/installing
docs/examples
docs/reference
```

```{toctree}
:hidden:
:caption: Measured

docs/benchmarks
docs/models
bench/kernelbench/README
docs/performance
docs/float32_products
docs/float32_cublas
docs/float32_few_rows
docs/float32_gradients
docs/half_precision_products
docs/product_epilogues
docs/wave_quantization
docs/row_minimum
docs/launch_overhead
docs/convolution
docs/convolution_epilogue
docs/norm_passes
docs/convolution_float32
docs/convolution_triton
```

```{toctree}
:hidden:
:caption: Project

docs/architecture
CONTRIBUTING
SECURITY
CHANGELOG
```
"""


class Example(Directive):
    """``{example} name``: a script of ``examples/``, and what it prints while the site is built."""

    required_arguments = 1

    def run(self):
        path = ROOT / "examples" / f"{self.arguments[0]}.py"
        result = subprocess.run([sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise self.error(f"{path.name} failed: {result.stderr.strip()}")
        code, output = path.read_text(), result.stdout
        return [
            nodes.literal_block(code, code, language="python"),
            nodes.paragraph("", "It prints:"),
            nodes.literal_block(output, output, language="text"),
        ]


def add_navigation(app, name, source):
    if name == root_doc:
        source[0] += NAVIGATION


def finish(app, exception):
    """A site begins with index.html; pictures that HTML names are beside the pages, as in the repository."""
    if exception is None and app.builder.name == "html":
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")
        shutil.copytree(ROOT / "docs" / "pictures", app.outdir / "docs" / "pictures", dirs_exist_ok=True)


def setup(app):
    app.add_directive("example", Example)
    app.connect("source-read", add_navigation)
    app.connect("build-finished", finish)
