-- Casts to text are spelled out: `bigint || text` is stable, and a stable body would not be inlined.

-- 24 attempt_key: unique name of one attempt, for the audit trail. The suffix comes from the lease token, so it
-- differs also when an attempt number comes round again after release or redrive.
create or replace function almanac.attempt_key(job_id bigint, attempt integer, lease_token bigint)
    returns text
    language sql immutable parallel safe
    return job_id::text || '-' || attempt::text || '-' || lpad(to_hex(lease_token & 4294967295), 8, '0');
comment on function almanac.attempt_key(bigint, integer, bigint) is '<job_id>-<attempt>-<8 hex>.';

-- 24 _new_key_prefix: what the idempotency keys of a queue begin with: its name, as far as a key can hold it, and a
-- random part, so that queues of one name in two databases share no key.
create or replace function almanac._new_key_prefix(queue text)
    returns text
    language sql volatile parallel safe
    return left(regexp_replace(queue, '[^!-~]', '_', 'g'), 40) || '-'
           || left(replace(gen_random_uuid()::text, '-', ''), 12);
comment on function almanac._new_key_prefix(text) is '<name of the queue>-<12 hex>, printable ASCII.';

-- 24 _idempotency_key: what a job without a key of its own sends to the outside: the same over all attempts and lives.
-- With the microsecond at which it was made, because numbers come again after a failover to a standby that lacked the
-- last commits, and after a restore. A receiver that has seen a key does nothing.
create or replace function almanac._idempotency_key(key_prefix text, job_id bigint, created_at timestamptz)
    returns text
    language sql immutable parallel safe
    return key_prefix || ':' || job_id::text || ':'
           || to_hex((date_part('epoch', created_at at time zone 'UTC') * 1000000)::bigint);
comment on function almanac._idempotency_key(text, bigint, timestamptz) is
    '<prefix of the queue>:<job_id>:<Unix microseconds at which it was made, in hex>.';

-- 24 _tick_key: the idempotency key of a job that a schedule made. A name that is not printable ASCII or too long is
-- hashed; so is one that looks like the hash of another. Ticks are whole seconds, but for rules such as @every 1.5s.
create or replace function almanac._tick_key(key_prefix text, schedule text, tick_at timestamptz, triggered boolean)
    returns text
    language sql immutable parallel safe
    return key_prefix || ':'
           || case when schedule ~ '^[ -~]{1,48}$' and schedule !~ '~[0-9a-f]{32}$' then schedule
                   else left(regexp_replace(schedule, '[^!-~]', '_', 'g'), 15) || '~' || md5(schedule) end
           || case when triggered
                   then ':triggered:' || to_hex((date_part('epoch', tick_at at time zone 'UTC') * 1000000)::bigint)
                   else ':' || trim_scale(extract(epoch from tick_at at time zone 'UTC'))::text end;
comment on function almanac._tick_key(text, text, timestamptz, boolean) is
    '<prefix of the queue>:<schedule>:<Unix seconds of the tick>, or :triggered:<Unix microseconds, in hex>.';

-- 24 _places: how many jobs of a concurrency key may run at once. A schedule that lets one run at a time has a key of
-- its own, which means one, whatever the queue allows for keys of its users.
create or replace function almanac._places(concurrency_key text, max_running_per_key integer)
    returns integer
    language sql immutable parallel safe
    return case when starts_with(concurrency_key, 'schedule:') then 1 else max_running_per_key end;
comment on function almanac._places(text, integer) is 'How many jobs with this concurrency key may run at once.';

-- 24 _next_token: larger than every earlier token of the job, with random low bits, so that a claim lost in an
-- asynchronous failover is not mistaken for the one that follows it.
create or replace function almanac._next_token(lease_token bigint)
    returns bigint
    language sql volatile parallel restricted
    return (((lease_token >> 20) + 1) << 20) | floor(random() * 1048576)::bigint;
comment on function almanac._next_token(bigint) is 'The token that follows the given one.';
