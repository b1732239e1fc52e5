#!/bin/sh
# Refresh the locked requirements. Usage: hack/lock.sh PYTHON [--upgrade]
set -eu
python=$(realpath -s "$1")
shift
cd "$(dirname "$0")/../requirements"
"$python" -m pip install --quiet pip-tools
compile() {
  output=$1
  shift
  "$python" -m piptools compile --quiet --generate-hashes --allow-unsafe --strip-extras \
    --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
    --output-file "$output" "$@"
}
compile runtime.txt "$@" ../pyproject.toml
compile dev.txt "$@" --extra dev --extra bench ../pyproject.toml
compile verifier.txt "$@" verifier.in
