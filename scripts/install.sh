#!/usr/bin/env bash
# Make a virtual environment and install this project into it, for working on: install.sh PYTHON ENVIRONMENT
#
# Where PYTHON already has a CUDA torch and a triton that will do, the environment borrows its packages and adds only
# what is missing, so that a GPU machine without a network works too. Everywhere else it gets the reference environment.
set -euo pipefail
python=$1
environment=$2

has_cuda_torch() {
    "$1" - 2>/dev/null <<'PYTHON'
import sys, torch, triton
at_least = lambda module, *wanted: tuple(int(part) for part in module.__version__.split(".")[:2]) >= wanted
sys.exit(not (torch.cuda.is_available() and at_least(torch, 2, 11) and at_least(triton, 3, 6)))
PYTHON
}

rm -rf "$environment"
if has_cuda_torch "$python"; then
    echo "Borrowing torch and triton from $("$python" -c 'import sys; print(sys.executable)')"
    # A .pth file, not --system-site-packages: that would miss the packages of a PYTHON that is itself in an environment.
    "$python" -m venv --without-pip "$environment"
    packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$packages/borrowed.pth"
    install=("$environment/bin/python" -m pip install --quiet)
    if ! "${install[@]}" --retries 1 --timeout 15 --editable '.[test]'; then
        echo "Could not fetch what is missing (above): going on with the packages that are there."
        "${install[@]}" --no-deps --no-build-isolation --editable . || pwd >"$packages/normfuse.pth"
    fi
else
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --constraint constraints.txt --editable '.[test]'
fi
