#!/usr/bin/env bash
# The core tests on other versions of torch, each in an environment of its own (.venv-torch-VERSION, kept for the next run).
#
#     tests/versions.sh 2.11.0 newest
#
# "newest" is what pip finds newest. PYTHON is the interpreter (python3), WORKERS the test processes (2), PIP_ARGS is handed
# to pip. On Linux, PyPI's torch is a CUDA build of several GB; a CPU build comes from the index that PIP_ARGS names.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
    echo "usage: tests/versions.sh VERSION..." >&2
    exit 2
fi

results=()
failed=0
for version in "$@"; do
    venv=".venv-torch-$version"
    requirement="torch==$version"
    if [ "$version" = newest ]; then requirement=torch; fi

    echo "== $requirement in $venv"
    "${PYTHON:-python3}" -m venv "$venv"
    # The constraints file pins one torch and what goes with it, so it has no say here.
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    "$venv/bin/python" -m pip install --upgrade ${PIP_ARGS:-} "$requirement" -e '.[dev]'
    found=$("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')
    if "$venv/bin/python" -m pytest -n "${WORKERS:-2}" -m "not slow"; then
        results+=("$found: passed")
    else
        results+=("$found: FAILED")
        failed=1
    fi
done

printf '%s\n' "${results[@]}"
exit "$failed"
