#!/bin/sh
# Make base images from Debian 12 packages, for machines that reach a Debian mirror but no image
# registry. Usage: hack/local-base.sh FOLDER; writes FOLDER/base.tar (15 packages unpacked into an
# empty root: Python and what it links to, no shell) and FOLDER/build.tar (pip on top of that).
#
# apt checks the packages' signatures; nothing is installed on this machine.
set -eu

BASE_PACKAGES="base-files netbase libc6 libgcc-s1 libssl3 zlib1g libexpat1 libffi8 libbz2-1.0
 liblzma5 libuuid1 libpython3.11-minimal libpython3.11-stdlib python3.11-minimal media-types"
BUILD_PACKAGES="python3-pip-whl ca-certificates"

folder=${1:?usage: hack/local-base.sh FOLDER}
if ! grep -q '^VERSION_ID="12"' /etc/os-release 2>/dev/null; then
  echo "local-base: this needs Debian 12 (its packages are unpacked). Elsewhere give a base image:" >&2
  echo "  make image BASE=python:3.13-slim-bookworm" >&2
  exit 77
fi
for program in apt-get dpkg-deb tar; do
  command -v "$program" >/dev/null || { echo "local-base: $program is missing" >&2; exit 77; }
done

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/debs" "$scratch/root"

unpack() {
  rm -f "$scratch"/debs/*
  # apt's own user may not write here; as root it says so and carries on
  (cd "$scratch/debs" && apt-get download -q -o APT::Sandbox::User=root "$@" >/dev/null) || {
    echo "local-base: apt cannot download $*; try: apt-get update" >&2
    exit 1
  }
  for deb in "$scratch"/debs/*.deb; do
    dpkg-deb --extract "$deb" "$scratch/root"
  done
}

pack() {
  tar --create --file "$1.part" --directory "$scratch/root" --sort=name --numeric-owner \
    --owner=0 --group=0 .
  mv "$1.part" "$1"
}

mkdir -p "$scratch/root/etc"
printf 'root:x:0:0:root:/:/nonexistent\nnonroot:x:65532:65532:nonroot:/:/nonexistent\n' \
  >"$scratch/root/etc/passwd"
printf 'root:x:0:\nnonroot:x:65532:\n' >"$scratch/root/etc/group"
# shellcheck disable=SC2086
unpack $BASE_PACKAGES
ln -s python3.11 "$scratch/root/usr/bin/python3"
ln -s python3.11 "$scratch/root/usr/bin/python"
rm -rf "$scratch/root/usr/share/doc" "$scratch/root/usr/share/man" \
  "$scratch/root/usr/share/lintian" "$scratch/root/usr/lib/x86_64-linux-gnu/gconv" \
  "$scratch/root/usr/lib/aarch64-linux-gnu/gconv"
pack "$folder/base.tar"

# shellcheck disable=SC2086
unpack $BUILD_PACKAGES
site=$scratch/root/usr/lib/python3.11
for wheel in "$scratch"/root/usr/share/python-wheels/pip-*.whl; do
  python3 -m zipfile --extract "$wheel" "$site"
done
pack "$folder/build.tar"
