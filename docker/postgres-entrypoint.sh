#!/bin/sh
# Preload pg_cron for the database that POSTGRES_DB names, then go on as the base image does. Options given to the
# container come last and so go first.
set -eu
[ "${1#-}" = "${1:-}" ] || set -- postgres "$@"
if [ "${1:-}" = postgres ]; then
    shift
    # Background workers, because pg_cron would otherwise log in over TCP, for which it has no password.
    set -- postgres \
        -c shared_preload_libraries=pg_cron \
        -c "cron.database_name=${POSTGRES_DB:-${POSTGRES_USER:-postgres}}" \
        -c cron.use_background_workers=on \
        "$@"
fi
exec docker-entrypoint.sh "$@"
