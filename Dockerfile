# For machines with NVIDIA GPUs. How to build and start it: docs/running.md. Not built or run yet.
FROM python:3.12-slim-bookworm

# torch.compile calls a C compiler (Python's headers are in this base), and the log asks git for the commit
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /train_gpt
COPY requirements.txt .
COPY data/requirements.txt data/
COPY tests/requirements.txt tests/
COPY records/requirements.txt records/
RUN python -m pip install --no-cache-dir \
    -r requirements.txt -r data/requirements.txt -r tests/requirements.txt -r records/requirements.txt
COPY . .

# Whoever starts it may write here, with --user, too
RUN git config --system --add safe.directory /train_gpt \
    && mkdir -p data/fineweb10B data/nano data/own logs /cache \
    && chmod 1777 data data/fineweb10B data/nano data/own logs /cache
ENV HOME=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["./run.sh"]
