# The command pyclient, as a user without rights. Build from the root of the repository:
#   docker build -f docker/pyclient.Dockerfile .
ARG BASE=python:3.13-slim-trixie
FROM ${BASE} AS build
COPY . /src
RUN python3 -m pip wheel --quiet --no-deps --wheel-dir /wheels /src

FROM ${BASE}
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/almanac \
 && /opt/almanac/bin/pip install --quiet --no-cache-dir "$(echo /wheels/*.whl)[http,metrics,uvloop]" \
 && useradd --create-home --shell /usr/sbin/nologin almanac
ENV PATH=/opt/almanac/bin:$PATH PYTHONUNBUFFERED=1
USER almanac
WORKDIR /home/almanac
ENTRYPOINT ["pyclient"]
CMD ["--help"]
