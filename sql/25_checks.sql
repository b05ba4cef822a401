-- 25 _check_name: names are any text that can be read, quotes, unicode and percent signs included. Here and elsewhere a
-- backslash is written with E: without it, what it means is a setting of the caller's session.
create or replace function almanac._check_name(what text, name text, max_length integer)
    returns void
    language plpgsql immutable set search_path = pg_catalog, pg_temp
as $$
begin
    if _check_name.name is null then
        raise exception using errcode = '22004',
            message = format('%s must not be null', _check_name.what),
            hint    = format('Give %s a name of 1 to %s characters.', _check_name.what, _check_name.max_length);
    end if;
    if _check_name.name !~ E'\\S' or length(_check_name.name) > _check_name.max_length then
        raise exception using errcode = '22023',
            message = format('the name of %s must have 1 to %s characters, not all blank',
                             _check_name.what, _check_name.max_length),
            detail  = format('It has %s: "%s"', length(_check_name.name), left(_check_name.name, 50)),
            hint    = 'Choose a shorter name, or one with something to read in it.';
    end if;
end;
$$;
comment on function almanac._check_name(text, text, integer) is 'Raises unless the name is readable and short enough.';

-- 25 _payload_bytes: a value that comes out of a table may be compressed, and then its column size says nothing.
create or replace function almanac._payload_bytes(payload jsonb)
    returns integer
    language sql stable parallel safe
    return case when pg_column_compression(_payload_bytes.payload) is null then pg_column_size(_payload_bytes.payload)
                else octet_length(_payload_bytes.payload::text) end;
comment on function almanac._payload_bytes(jsonb) is 'How large a payload is.';

-- 25 _check_payload: an object or an array, within the queue's size.
-- Calls: _payload_bytes.
create or replace function almanac._check_payload(payload jsonb, max_bytes integer)
    returns void
    language plpgsql stable set search_path = pg_catalog, pg_temp
as $$
declare
    v_bytes integer := almanac._payload_bytes(_check_payload.payload);
begin
    if _check_payload.payload is null or jsonb_typeof(_check_payload.payload) not in ('object', 'array') then
        raise exception using errcode = 'PA005',
            message = 'a payload must be a JSON object or array',
            detail  = format('It is %s.', coalesce('a JSON ' || jsonb_typeof(_check_payload.payload), 'null')),
            hint    = 'Wrap the value, as in {"value": ...}; leave payload out for an empty object.';
    end if;
    if v_bytes > _check_payload.max_bytes then
        raise exception using errcode = 'PA005',
            message = format('payload of %s bytes is too large', v_bytes),
            detail  = format('This queue takes up to %s bytes.', _check_payload.max_bytes),
            hint    = 'Store the data elsewhere and pass a reference, or raise the limit with '
                      'put_queue(queue => ..., max_payload_bytes => ...).';
    end if;
end;
$$;
comment on function almanac._check_payload(jsonb, integer) is 'Raises PA005 unless the payload can be taken.';
