#!/bin/sh
# Build the images and try them. Usage: hack/build-image.sh [controller] [verifier]
#
#   ENGINE        buildah, podman or docker (default: the first that works)
#   BASE          base image with Python ≥ 3.11 as `python`; `local` makes one from Debian packages
#   BUILD_BASE    the same with pip (default: BASE)
#   IMAGE_PREFIX  what image names start with (default: that of the manifests in config/)
#   TAG           default: v and the version of the package
#   PIP_CERT      a CA bundle for pip, for networks with an intercepting proxy
#   ARCHIVES      a folder: write each image there, too, as NAME.tar (docker-archive)
#   SMOKE         0 leaves out the trial run
set -eu
cd "$(dirname "$0")/.."

works() {
  case $1 in
    docker | podman) command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

pick_engine() {
  for candidate in ${ENGINE:-docker podman buildah}; do
    if works "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "build-image: no working docker, podman or buildah (Debian: apt-get install buildah)" >&2
  exit 77
}

engine=$(pick_engine)
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' llmkube/__init__.py)
tag=${TAG:-v$version}
prefix=${IMAGE_PREFIX:-ghcr.io/llmkube/llmkube}
revision=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
base=${BASE:-}
build_base=${BUILD_BASE:-$base}
# runc is not needed for a build, and crun refuses some cgroup layouts
export BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}"

build() { # tag, arguments…
  name=$1
  shift
  case $engine in
    docker) DOCKER_BUILDKIT=1 docker build --quiet --tag "$name" "$@" ;;
    podman) podman build --quiet --tag "$name" "$@" ;;
    buildah) buildah build --quiet --layers --tag "$name" "$@" ;;
  esac >/dev/null
}

local_base() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  sh hack/local-base.sh "$folder"
  for kind in base build; do
    printf 'FROM scratch\nADD %s.tar /\n' "$kind" >"$folder/Dockerfile"
    build "localhost/llmkube-local-$kind:12" --file "$folder/Dockerfile" "$folder"
  done
  rm -rf "$folder"
  trap - EXIT
}

if [ "$base" = local ]; then
  echo "build-image: making a base image from Debian packages"
  local_base
  base=localhost/llmkube-local-base:12
  build_base=localhost/llmkube-local-build:12
fi

image() { # target
  name=$prefix-$1:$tag
  set -- --target "$1" --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  [ -z "$base" ] || set -- "$@" --build-arg "BASE=$base" --build-arg "BUILD_BASE=$build_base"
  [ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --build-arg "PIP_INDEX_URL=$PIP_INDEX_URL"
  if [ -n "${PIP_CERT:-}" ]; then
    set -- "$@" --secret "id=ca,src=$PIP_CERT" --build-arg PIP_CERT=/run/secrets/ca
  fi
  echo "build-image: $name with $engine"
  build "$name" "$@" .
}

# Run a command in an image, as its own user, on a read-only root where the engine can do that.
run_in() { # image, command…
  name=$1
  shift
  case $engine in
    docker | podman)
      "$engine" run --rm --read-only --cap-drop ALL --entrypoint '' \
        --env LLMKUBE_TERMINATION_LOG=/dev/stderr "$name" "$@"
      ;;
    buildah)
      container=$(buildah from "$name")
      status=0
      buildah run --env LLMKUBE_TERMINATION_LOG=/dev/stderr "$container" -- "$@" || status=$?
      buildah rm "$container" >/dev/null
      return $status
      ;;
  esac
}

smoke_verifier() {
  run_in "$1" python -c '
import base64, hashlib, json, os, subprocess, sys
from datetime import datetime, timedelta
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
assert os.getuid() == 65532, os.getuid()
key, name, day = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), timedelta(days=1)
start = datetime(2026, 1, 1)
der = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    .serial_number(1).not_valid_before(start).not_valid_after(start + day)
    .sign(key, hashes.SHA256()).public_bytes(Encoding.DER))
spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
text = lambda data: base64.b64encode(data).decode()
check = {"version": 1, "inputHash": "smoke", "spki": text(hashlib.sha256(spki).digest()),
    "certificate": text(der), "port": 1, "addresses": ["127.0.0.1"], "allow": ["127.0.0.0/8"],
    "deny": [], "connectTimeoutSeconds": 2, "handshakeTimeoutSeconds": 2}
env = {**os.environ, "LLMKUBE_CHECK": json.dumps(check)}
done = subprocess.run([sys.executable, "-m", "llmkube.verifier"], env=env, capture_output=True)
report = json.loads(done.stdout)
assert done.returncode == 0 and report["results"][0]["result"] == "Refused", (done, report)
'
}

smoke_controller() {
  run_in "$1" python -m llmkube --help >/dev/null
}

size() { # image
  case $engine in
    buildah) buildah images --format '{{.Size}}' "$1" | head -n 1 ;;
    docker | podman) "$engine" images --format '{{.Size}}' "$1" | head -n 1 ;;
  esac
}

archive() { # image, file
  rm -f "$2"
  case $engine in
    docker) docker save --output "$2" "$1" ;;
    podman) podman save --quiet --format docker-archive --output "$2" "$1" ;;
    buildah) buildah push --quiet "$1" "docker-archive:$2:$1" ;;
  esac
}

[ $# -gt 0 ] || set -- controller verifier
for target in "$@"; do
  image "$target"
  name=$prefix-$target:$tag
  [ "${SMOKE:-1}" = 0 ] || "smoke_$target" "$name"
  [ -z "${ARCHIVES:-}" ] || archive "$name" "$ARCHIVES/$target.tar"
  echo "build-image: $name, $(size "$name")"
done
