# A training worker: corpus-client with torch, and the training example. From the root of the repository:
#   docker build -f docker/worker.Dockerfile -t corpus-worker .
#   docker run --gpus all corpus-worker http://data:8000 --corpus web --vocab-size 50304
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The second has no pip, and never had: it is what the image keeps.
RUN python -m venv /opt/build && python -m venv --without-pip /opt/corpus-client
COPY client/pyproject.toml scripts/constraints.txt ./
COPY docker/requirements.py docker/
RUN python docker/requirements.py pyproject.toml torch > requirements.txt \
    && /opt/build/bin/pip --python /opt/corpus-client install --constraint constraints.txt --requirement requirements.txt
RUN /opt/build/bin/pip install --constraint constraints.txt hatchling
COPY client .
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir wheels . \
    && /opt/build/bin/pip --python /opt/corpus-client install --no-deps wheels/*.whl

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="corpus-worker" \
      org.opencontainers.image.description="Trains a small GPT from a corpus-server" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/corpus-client/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# On few cores, threads of torch that spin while they wait keep the fetching thread from running.
ENV OMP_WAIT_POLICY=PASSIVE
RUN install -d -o 10001 -g 10001 /var/lib/corpus-worker \
    && rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/ensurepip
COPY --from=build /opt/corpus-client /opt/corpus-client
COPY client/examples/train.py /opt/worker/
WORKDIR /var/lib/corpus-worker
USER 10001:10001
VOLUME /var/lib/corpus-worker
ENTRYPOINT ["python", "/opt/worker/train.py"]
CMD ["--help"]
