# DynChunk on a stock SGLang image: our files, one entry on Python's path, a health check. Nothing of the base is
# edited, compiled or resolved again.
#
# Kept to what the classic builder of Docker 20.10 understands, so there is no `# syntax=` line, no COPY --chmod and no
# heredoc; BuildKit builds it as well. No step needs the network, a GPU or torch.
ARG BASE_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${BASE_IMAGE}

LABEL org.opencontainers.image.title="DynChunk" \
      org.opencontainers.image.description="SGLang with long-prompt prefill kept inside a memory budget" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

# The image mirrors the repository: the same relative paths hold in both.
COPY LICENSE dynchunk /opt/dynchunk/
COPY docker-images/ /opt/dynchunk/docker-images/
COPY scripts/ /opt/dynchunk/scripts/
COPY launcher/ /opt/dynchunk/launcher/
COPY adapter/ /opt/dynchunk/adapter/

# PYTHONPATH: our boot folder first, then what the base had. `:+` adds the colon only where there was something: an
# empty entry would put the working directory on the path of every Python process.
# HOST: inside a container the launcher's own default, 127.0.0.1, could not be reached from outside.
ENV PYTHONPATH=/opt/dynchunk/adapter/boot${PYTHONPATH:+:$PYTHONPATH} \
    HOST=0.0.0.0

# chmod: a checkout made under a strict umask, or on a system without an executable bit, works all the same.
# compileall: a read-only container, or one that does not run as root, could not keep the bytecode of its first start.
RUN chmod -R a+rX /opt/dynchunk \
    && chmod a+x /opt/dynchunk/dynchunk \
    && ln -sf /opt/dynchunk/dynchunk /usr/local/bin/dynchunk \
    && python3 -m compileall -q /opt/dynchunk

EXPOSE 30000

# -S -E: without site packages and PYTHONPATH nothing can pull the engine into the probe, which runs for as long as the
# server does. timeout: above the probe's own 30 s, so that it can say what it saw. start-period: a big model loads for
# a long time, and the first success ends the period early. retries: one chunk that takes the engine long is no illness.
HEALTHCHECK --interval=30s --timeout=40s --start-period=60m --retries=5 \
    CMD ["python3", "-S", "-E", "/opt/dynchunk/launcher/health.py"]

# A list, so that there is no shell in between: `serve` becomes the engine, which then gets the signals itself. The
# base's entry point, where it has one, stays in front. The base's user stays too.
CMD ["dynchunk", "serve"]

# The proof, last, so that no image exists without it: a fresh Python loads the adapter and does not with
# DYNCHUNK_MODE=off; the engine in this base has the functions that DynChunk hooks, in the shape it knows; the launcher
# finds what it imports.
RUN python3 /opt/dynchunk/scripts/image/prove_adapter.py \
    && python3 -m dynchunk.patches.check \
    && dynchunk --version
