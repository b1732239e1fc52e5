# Two images: `controller` (controller, agent, edge and command line) and `verifier` (what a
# verifier pod runs: the standard library, cryptography and llmkube/verifier).
# `make image` builds both with buildah, podman or docker; see hack/build-image.sh.
#
# The base needs a Python ≥ 3.11 that is called `python`, and nothing else: no shell is used, here
# or at run time. The build base needs pip, too, and the same Python.
ARG BASE=python:3.13-slim-bookworm
ARG BUILD_BASE=python:3.13-slim-bookworm

# What both builds share ---------------------------------------------------------------------------
FROM ${BUILD_BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/ /requirements/
COPY hack/image/ /image/

FROM build AS build-verifier
# Behind an intercepting proxy: --secret id=ca,src=FILE and --build-arg PIP_CERT=/run/secrets/ca
ARG PIP_CERT
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca,target=/run/secrets/ca \
    ["python", "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:", "--target=/opt/llmkube", "--requirement=/requirements/verifier.txt"]
COPY llmkube/__init__.py llmkube/clock.py /opt/llmkube/llmkube/
COPY llmkube/verifier/ /opt/llmkube/llmkube/verifier/
RUN ["python", "/image/finish.py", "/opt/llmkube", "--verifier"]

FROM build AS build-controller
ARG PIP_CERT
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca,target=/run/secrets/ca \
    ["python", "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:", "--target=/opt/llmkube", "--requirement=/requirements/runtime.txt"]
COPY llmkube/ /opt/llmkube/llmkube/
RUN ["python", "/image/finish.py", "/opt/llmkube"]

# The verifier -------------------------------------------------------------------------------------
FROM ${BASE} AS verifier
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="llmkube-verifier" \
      org.opencontainers.image.description="Dials a Mac back over TLS from inside the cluster" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-verifier /opt/llmkube /opt/llmkube
ENV PYTHONPATH=/opt/llmkube PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Many bases come without compiled standard modules, and a read-only root cannot keep them later:
# one import as root, here, compiles exactly those that are needed.
RUN ["python", "-c", "import encodings.idna, llmkube.verifier.__main__"]
ENV PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "llmkube.verifier"]

# The controller, and every other command ----------------------------------------------------------
FROM ${BASE} AS controller
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="llmkube-controller" \
      org.opencontainers.image.description="Keeps the status of MetalNodes and FederatedClusters true" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-controller /opt/llmkube /opt/llmkube
COPY hack/image/warm.py /tmp/warm.py
ENV PYTHONPATH=/opt/llmkube PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN ["python", "/tmp/warm.py", "/tmp/warm.py"]
ENV PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "llmkube"]
CMD ["controller"]
