# PostgreSQL with pg_cron, preloaded for the database that POSTGRES_DB names. Build from the root of the repository:
#   docker build -f docker/postgres.Dockerfile .
ARG BASE=postgres:17-trixie
FROM ${BASE}

# The base image says in PG_MAJOR which PostgreSQL it has.
RUN apt-get update \
 && apt-get install -y --no-install-recommends "postgresql-${PG_MAJOR}-cron" \
 && rm -rf /var/lib/apt/lists/*

COPY docker/postgres-entrypoint.sh /usr/local/bin/almanac-entrypoint.sh
COPY docker/create-pg-cron.sql /docker-entrypoint-initdb.d/00-create-pg-cron.sql

ENTRYPOINT ["almanac-entrypoint.sh"]
CMD ["postgres"]

# Over TCP: the server that the base image starts while it sets up the database listens on a socket only.
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=10 \
    CMD pg_isready --quiet --host 127.0.0.1 --username "${POSTGRES_USER:-postgres}"
