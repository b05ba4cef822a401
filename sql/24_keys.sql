-- Casts to text are spelled out: `bigint || text` is stable, and a stable body would not be inlined.

-- 24 attempt_key: unique name of one attempt, for the audit trail. The suffix comes from the lease token, so it
-- differs also when an attempt number comes round again after release or redrive.
create or replace function almanac.attempt_key(job_id bigint, attempt integer, lease_token bigint)
    returns text
    language sql immutable parallel safe
    return job_id::text || '-' || attempt::text || '-' || lpad(to_hex(lease_token & 4294967295), 8, '0');
comment on function almanac.attempt_key(bigint, integer, bigint) is '<job_id>-<attempt>-<8 hex>.';

-- 24 _idempotency_key: what a job without a key of its own sends to the outside: the same over all attempts and lives.
-- With the microsecond at which it was made, because numbers come again: after a failover to a standby that lacked the
-- last commits, after a restore, in another database that calls the same receiver. Under a key that it has seen, a
-- receiver does nothing.
create or replace function almanac._idempotency_key(queue text, job_id bigint, created_at timestamptz)
    returns text
    language sql immutable parallel safe
    return 'job:' || queue || ':' || job_id::text || ':'
           || to_hex((date_part('epoch', created_at at time zone 'UTC') * 1000000)::bigint);
comment on function almanac._idempotency_key(text, bigint, timestamptz) is
    'job:<queue>:<job_id>:<Unix microseconds at which it was made, in hex>.';

-- 24 _next_token: larger than every earlier token of the job, with random low bits, so that a claim lost in an
-- asynchronous failover is not mistaken for the one that follows it.
create or replace function almanac._next_token(lease_token bigint)
    returns bigint
    language sql volatile parallel restricted
    return (((lease_token >> 20) + 1) << 20) | floor(random() * 1048576)::bigint;
comment on function almanac._next_token(bigint) is 'The token that follows the given one.';
