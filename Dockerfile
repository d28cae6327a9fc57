# Trains and measures drafters on NVIDIA GPUs:
#   docker build -t draftsmith .
#   docker run --gpus all -v "$PWD/runs:/draftsmith/runs" draftsmith train recipes/quickstart/eagle3.yaml
#   docker run --gpus all -p 8000:8000 draftsmith serve TARGET --host 0.0.0.0 --api-key KEY
# Triton builds what launches its kernels where they run: gcc and python3-dev are for it.
FROM nvidia/cuda:12.9.1-runtime-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends gcc git libc6-dev python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"
WORKDIR /draftsmith
COPY . .
RUN pip install -e '.[train,serve,wandb]'
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
